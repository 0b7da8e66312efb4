"""Fits the constants of the cost model to measured iterations."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ifbbench.planning.measure import Sample
from ifbbench.simulation.cost_model import NANOSECONDS, CostModel
from ifbbench.simulation.hardware import HardwareProfile
from ifbbench.simulation.shard import Shard
from ifbbench.simulation.step_work import StepWork

Floats = NDArray[np.float64]

# Generation steps with mean KV lengths in the same range of so many tokens make one point.
KV_TOKENS_PER_POINT = 16
FITTED_SHARES = ("matmul", "memory", "context_attention", "generation_attention")
FITTED_CONSTANTS = (*FITTED_SHARES, "kernel_s", "context_s")
# Keeps a constant that no measurement depends on: this times the logarithm of its change counts like the relative error
# of a point.
HOLD = 0.05
# Errors far beyond this share count linearly, not squared: they are probably disturbances.
LARGE_ERROR = 0.15
MIN_S = 1e-9
# Lower limits of the first guesses, because the search is in logarithms.
FIRST_REQUEST_S = 1e-6
FIRST_CONTEXT_S = 1e-5
# least_squares: step of the numerical derivatives, longest step of an unknown, relative gain at which it ends, damping.
STEP = 1e-4
LONGEST_STEP = 1.0
MAX_ITERATIONS = 100
CONVERGED = 1e-9
FIRST_DAMPING, MIN_DAMPING, MAX_DAMPING = 1e-2, 1e-9, 1e9


@dataclass(frozen=True, slots=True)
class Point:
    """The median of samples with the same work. seconds, loop_s: see Sample."""

    work: StepWork
    seconds: float
    loop_s: float
    samples: int

    @property
    def kind(self) -> str:
        """Which phases the batch has: context, generation or mixed."""
        if not self.work.generation_tokens:
            return "context"
        return "mixed" if self.work.context_tokens else "generation"

    @property
    def num_requests(self) -> int:
        """Requests of the batch; each generation request has one token."""
        return self.work.context_requests + self.work.generation_tokens


def points_of(samples: Iterable[Sample]) -> list[Point]:
    """Group samples that differ only by a few tokens in the KV cache of generation requests."""
    groups: defaultdict[tuple[int, ...], list[Sample]] = defaultdict(list)
    for sample in samples:
        work = sample.work
        mean_kv_len = work.generation_kv_tokens // max(work.generation_tokens, 1)
        groups[
            work.context_tokens, work.context_requests, work.attention_pairs, work.outputs, work.generation_tokens,
            mean_kv_len // KV_TOKENS_PER_POINT,
        ].append(sample)  # fmt: skip
    return [
        Point(
            work=sorted(group, key=lambda sample: sample.work.generation_kv_tokens)[len(group) // 2].work,
            seconds=median(sample.seconds for sample in group),
            loop_s=median(sample.loop_s for sample in group),
            samples=len(group),
        )
        for group in groups.values()
    ]


@dataclass(frozen=True, slots=True)
class FitError:
    """Errors of predictions, as shares of the measured time (0 to 1)."""

    median: float
    p90: float
    worst: float

    @classmethod
    def of(cls, points: Sequence[Point], predicted_s: Floats) -> "FitError":
        """The errors of `predicted_s`, the seconds predicted for each of `points`."""
        errors = np.abs(predicted_s / [point.seconds for point in points] - 1)
        return cls(float(np.median(errors)), float(np.quantile(errors, 0.9)), float(errors.max()))


def fit(points: Sequence[Point], hardware: HardwareProfile, shard: Shard) -> HardwareProfile:
    """`hardware` with the constants for which the predictions for the model of `shard` are closest to `points`.

    The loop's own time is fitted first. All other constants are one fit of least squared relative errors: the shares of
    the device's peaks, the time to start a kernel, and the time added by each request. The unknowns are logarithms of
    factors, so no constant becomes negative.
    """
    host_iteration_s, host_request_s = _loop_times(points)
    constants = dataclasses.replace(hardware.constants, context_s=max(hardware.constants.context_s, FIRST_CONTEXT_S))
    hardware = dataclasses.replace(
        hardware, host_iteration_s=host_iteration_s, host_request_s=host_request_s, constants=constants
    )
    measured_s = np.array([point.seconds for point in points])

    def residuals(unknowns: Floats) -> Floats:
        found_s = predicted_s(points, CostModel(shard, _scaled(hardware, np.exp(unknowns))))
        return np.concatenate([_tamed(np.log(found_s / measured_s)), HOLD * unknowns])

    unknowns = least_squares(residuals, np.zeros(len(FITTED_CONSTANTS) + 1))
    return _scaled(hardware, np.exp(unknowns))


def predicted_s(points: Sequence[Point], cost_model: CostModel) -> Floats:
    """Seconds of host and device, one after the other, for each of `points`, [points]."""
    times = [cost_model.host_ns(point.num_requests) + cost_model.device_ns(point.work) for point in points]
    return np.array(times) / NANOSECONDS


def _loop_times(points: Sequence[Point]) -> tuple[float, float]:
    """Seconds of the loop for an iteration and for each request in it: least squares of relative errors."""
    loop_s = np.maximum([point.loop_s for point in points], MIN_S)
    terms = np.array([(1.0, point.num_requests) for point in points]) / loop_s[:, None]
    iteration_s, request_s = np.linalg.lstsq(terms, np.ones(len(points)), rcond=None)[0].tolist()
    return max(iteration_s, MIN_S), max(request_s, FIRST_REQUEST_S)


def _tamed(errors: Floats) -> Floats:
    """Residuals whose squares are the pseudo-Huber loss: quadratic for small errors, linear for large ones."""
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


def least_squares(residuals: Callable[[Floats], Floats], start: Floats) -> Floats:
    """Unknowns near `start` at which the sum of the squared residuals has a minimum.

    Levenberg-Marquardt: a Gauss-Newton step, damped until the sum decreases. Derivatives are differences over STEP, and
    no unknown moves by more than LONGEST_STEP at once, so the unknowns should be of the order of 1.
    """
    unknowns, damping = start, FIRST_DAMPING
    values = residuals(unknowns)
    for _ in range(MAX_ITERATIONS):
        slopes = np.stack(
            [(residuals(unknowns + STEP * unit) - values) / STEP for unit in np.eye(len(unknowns))], axis=1
        )
        square, gradient = slopes.T @ slopes, slopes.T @ values
        gain = 0.0
        while gain <= 0 and damping < MAX_DAMPING:
            step = np.linalg.solve(square + damping * np.diag(np.diag(square) + MIN_DAMPING), -gradient)
            step = np.clip(step, -LONGEST_STEP, LONGEST_STEP)
            tried = residuals(unknowns + step)
            gain = float(values @ values - tried @ tried)
            damping = max(damping / 10, MIN_DAMPING) if gain > 0 else damping * 10
        least_gain = CONVERGED * float(values @ values)
        if gain > 0:
            unknowns, values = unknowns + step, tried
        if gain <= least_gain:
            break
    return unknowns
