"""Fits the cost model's constants to measured iterations."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ifbbench.calibration.least_squares import least_squares
from ifbbench.calibration.points import Point
from ifbbench.simulation.cost_model import NANOSECONDS, CostModel
from ifbbench.simulation.hardware import HardwareProfile

Floats = NDArray[np.float64]
MakeCostModel = Callable[[HardwareProfile], CostModel]
"""The cost model of the measured model on a hardware profile."""

FITTED_SHARES = ("matmul", "memory", "context_attention", "generation_attention")
FITTED_TIMES = ("kernel_s",)
# What a constant that no measurement says anything about is held to its first value by: a tenfold change costs as much
# as one point that is off by so many times its measured time.
HOLD = 0.05
# An error beyond this share counts with its size, not its square: it is more likely a disturbance than the model's.
LARGE_ERROR = 0.15
REWEIGHTINGS = 5
LEAST_S = 1e-9
# Where the search for what a request adds begins at least; a logarithm cannot begin at 0.
FIRST_REQUEST_S = 1e-6


@dataclass(frozen=True, slots=True)
class FitError:
    """How far predictions are from what was measured, as shares of the measured time (0 to 1)."""

    median: float
    p90: float
    worst: float

    @classmethod
    def of(cls, points: Sequence[Point], predicted_s: Floats) -> "FitError":
        """Of these points, for which so many seconds were predicted."""
        errors = np.abs(predicted_s / [point.seconds for point in points] - 1)
        return cls(float(np.median(errors)), float(np.quantile(errors, 0.9)), float(errors.max()))


def fit(points: Sequence[Point], hardware: HardwareProfile, make_cost_model: MakeCostModel) -> HardwareProfile:
    """`hardware` with the constants under which the cost model's iterations come closest to `points`.

    The loop's own time is measured by itself. All else is one fit, least in the squares of relative errors: the shares
    of the device's peaks, the time that kernels take to start, and what each request adds. The unknowns are logarithms,
    so no constant becomes negative; and it is the cost model itself that is fitted, so nothing of it is said twice.
    """
    hardware = dataclasses.replace(hardware, **_host_constants(points))
    measured_s = np.array([point.seconds for point in points])

    def constants(unknowns: Floats) -> HardwareProfile:
        return _scaled(hardware, dict(zip(_fitted_names(), np.exp(unknowns).tolist(), strict=True)))

    def errors(unknowns: Floats) -> Floats:
        return np.log(predicted_s(points, make_cost_model(constants(unknowns))) / measured_s)

    unknowns, weights = np.zeros(len(_fitted_names())), np.ones(len(points))
    for _ in range(REWEIGHTINGS):
        held = weights  # bound to this round's weights

        def weighted(unknowns: Floats, held: Floats = held) -> Floats:
            return np.concatenate([held * errors(unknowns), HOLD * unknowns])

        unknowns = least_squares(weighted, unknowns)
        weights = np.sqrt(np.minimum(1.0, LARGE_ERROR / np.maximum(np.abs(errors(unknowns)), LEAST_S)))
    return constants(unknowns)


def predicted_s(points: Sequence[Point], cost_model: CostModel) -> Floats:
    """Seconds of the points' iterations, host and device one after the other, [points]."""
    times = [cost_model.host_ns(point.num_requests) + cost_model.device_ns(point.work) for point in points]
    return np.array(times) / NANOSECONDS


def _host_constants(points: Sequence[Point]) -> dict[str, float]:
    """What the loop takes for an iteration, and for each request in it, least in the squares of relative errors."""
    loop_s = np.maximum([point.loop_s for point in points], LEAST_S)
    terms = np.array([(1.0, point.num_requests) for point in points]) / loop_s[:, None]
    iteration_s, request_s = np.linalg.lstsq(terms, np.ones(len(points)), rcond=None)[0].tolist()
    return {"host_iteration_s": max(iteration_s, LEAST_S), "host_request_s": max(request_s, FIRST_REQUEST_S)}


def _fitted_names() -> tuple[str, ...]:
    return (*FITTED_SHARES, *FITTED_TIMES, "host_request_s")


def _scaled(hardware: HardwareProfile, factors: Mapping[str, float]) -> HardwareProfile:
    """`hardware` with each of these constants times its factor."""
    shares = {name: getattr(hardware.constants, name) * factors[name] for name in (*FITTED_SHARES, *FITTED_TIMES)}
    return dataclasses.replace(
        hardware, constants=dataclasses.replace(hardware.constants, **shares),
        host_request_s=hardware.host_request_s * factors["host_request_s"],
    )  # fmt: skip
