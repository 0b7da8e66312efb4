"""Fits the cost model's constants to measured iterations."""

import dataclasses
from collections.abc import Callable, Sequence
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
FITTED_CONSTANTS = (*FITTED_SHARES, "kernel_s", "context_s")
# A constant that no measurement says anything about stays what it was: this times the logarithm of its change counts
# like the relative error of a point.
HOLD = 0.05
# An error far beyond this share counts with its size, not its square: it is more likely a disturbance than the model's.
LARGE_ERROR = 0.15
LEAST_S = 1e-9
# Where the search for what a request, or context, adds begins at least; a logarithm cannot begin at 0.
FIRST_REQUEST_S = 1e-6
FIRST_CONTEXT_S = 1e-5


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
    host_iteration_s, host_request_s = _loop_times(points)
    constants = dataclasses.replace(hardware.constants, context_s=max(hardware.constants.context_s, FIRST_CONTEXT_S))
    hardware = dataclasses.replace(
        hardware, host_iteration_s=host_iteration_s, host_request_s=host_request_s, constants=constants
    )
    measured_s = np.array([point.seconds for point in points])

    def residuals(unknowns: Floats) -> Floats:
        found_s = predicted_s(points, make_cost_model(_scaled(hardware, np.exp(unknowns))))
        return np.concatenate([_tamed(np.log(found_s / measured_s)), HOLD * unknowns])

    unknowns = least_squares(residuals, np.zeros(len(FITTED_CONSTANTS) + 1))
    return _scaled(hardware, np.exp(unknowns))


def predicted_s(points: Sequence[Point], cost_model: CostModel) -> Floats:
    """Seconds of the points' iterations, host and device one after the other, [points]."""
    times = [cost_model.host_ns(point.num_requests) + cost_model.device_ns(point.work) for point in points]
    return np.array(times) / NANOSECONDS


def _loop_times(points: Sequence[Point]) -> tuple[float, float]:
    """Seconds that the loop takes for an iteration, and for each request in it: least squares of relative errors."""
    loop_s = np.maximum([point.loop_s for point in points], LEAST_S)
    terms = np.array([(1.0, point.num_requests) for point in points]) / loop_s[:, None]
    iteration_s, request_s = np.linalg.lstsq(terms, np.ones(len(points)), rcond=None)[0].tolist()
    return max(iteration_s, LEAST_S), max(request_s, FIRST_REQUEST_S)


def _tamed(errors: Floats) -> Floats:
    """Numbers whose squares grow like those of small errors, but like the size of large ones: pseudo-Huber loss."""
    sizes: Floats = np.sqrt(2 * (np.hypot(1, errors / LARGE_ERROR) - 1))
    return np.copysign(LARGE_ERROR * sizes, errors)


def _scaled(hardware: HardwareProfile, factors: Floats) -> HardwareProfile:
    """`hardware` with each of FITTED_CONSTANTS, and then `host_request_s`, times its factor."""
    *of_constants, of_request = factors.tolist()
    constants = {
        name: getattr(hardware.constants, name) * factor
        for name, factor in zip(FITTED_CONSTANTS, of_constants, strict=True)
    }
    return dataclasses.replace(
        hardware, constants=dataclasses.replace(hardware.constants, **constants),
        host_request_s=hardware.host_request_s * of_request,
    )  # fmt: skip
