"""Fits the constants of the cost model to measured iterations."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ifbbench.clock import NANOSECONDS
from ifbbench.simulated.cost_model import CostModel
from ifbbench.simulated.hardware import HardwareProfile
from ifbbench.simulated.shard import Shard
from ifbbench.simulated.step_work import StepWork
from ifbbench.studies.measure import Sample

Floats = NDArray[np.float64]

# Generation steps with mean KV lengths in the same range of so many tokens make one point.
KV_TOKENS_PER_POINT = 16
FITTED_SHARES = ("matmul", "memory", "context_attention", "generation_attention")
FITTED_CONSTANTS = (*FITTED_SHARES, "kernel_s", "context_s")
# Constants that are fields of the profile itself.
HOST_CONSTANTS = ("host_iteration_s", "host_request_s")
# Keeps a constant that no measurement depends on: this times the logarithm of its change counts like the relative error
# of a point.
HOLD = 0.05
# Errors far beyond this share count linearly, not squared: they are probably disturbances.
LARGE_ERROR = 0.15
MIN_S = 1e-9
# Lower limits of the first guesses, because the search is in logarithms.
FIRST_GUESSES = {"host_request_s": 1e-6, "context_s": 1e-5, "host_iteration_s": 1e-6}
# Largest factor by which a constant may change, either way.
MAX_FACTOR = 50.0
# Step of the numerical derivatives, and the relative gain at which a fit ends.
STEP = 1e-4
CONVERGED = 1e-9


class Timed(Protocol):
    """A measured time.

    kind: names its group in tables.
    """

    @property
    def seconds(self) -> float: ...
    @property
    def kind(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Observation:
    """A measured time, which one iteration takes or several together.

    steps: the work of each iteration, and its weight in the sum.
    has_host: the time includes the host's.
    weight: weight of its error in the fit, beside that of others.
    """

    seconds: float
    steps: Sequence[tuple[StepWork, float]]
    kind: str
    has_host: bool = True
    tp_size: int = 1
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Point:
    """The median of samples with the same work.

    seconds, loop_s: see Sample.
    """

    work: StepWork
    seconds: float
    loop_s: float | None
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

    def observation(self, has_host: bool = True, tp_size: int = 1, weight: float = 1.0) -> Observation:
        """The point as an observation of one iteration. has_host, weight: see Observation."""
        return Observation(self.seconds, ((self.work, 1.0),), self.kind, has_host, tp_size, weight)


def points_of(samples: Iterable[Sample]) -> list[Point]:
    """Group samples that differ only by a few tokens in the KV cache of generation requests."""
    groups: defaultdict[tuple[int, ...], list[Sample]] = defaultdict(list)
    for sample in samples:
        work = sample.work
        mean_kv_len = work.generation_kv_tokens // max(work.generation_tokens, 1)
        groups[
            work.context_tokens,
            work.context_requests,
            work.attention_pairs,
            work.outputs,
            work.generation_tokens,
            mean_kv_len // KV_TOKENS_PER_POINT,
        ].append(sample)
    return [
        Point(
            work=sorted(group, key=lambda sample: sample.work.generation_kv_tokens)[len(group) // 2].work,
            seconds=median(sample.seconds for sample in group),
            loop_s=_median(sample.loop_s for sample in group),
            samples=len(group),
        )
        for group in groups.values()
    ]


def _median(values: Iterable[float | None]) -> float | None:
    """The median of the values; None if none is known."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


@dataclass(frozen=True, slots=True)
class FitError:
    """Errors of predictions, as shares of the measured time (0 to 1)."""

    median: float
    p90: float
    worst: float

    @classmethod
    def of(cls, points: Sequence[Timed], predicted_s: Floats) -> "FitError":
        """The errors of `predicted_s`, the seconds predicted for each of `points`."""
        errors = np.abs(predicted_s / [point.seconds for point in points] - 1)
        return cls(float(np.median(errors)), float(np.quantile(errors, 0.9)), float(errors.max()))


def fit(points: Sequence[Point], hardware: HardwareProfile, shard: Shard) -> HardwareProfile:
    """`hardware` with the constants for which the predictions for the model of `shard` are closest to `points`.

    The loop's own time is fitted first. All other constants are one fit: the shares of the device's peaks, the time to
    start a kernel, and the time added by each request.
    """
    observations = [point.observation() for point in points]
    names = (*FITTED_CONSTANTS, "host_request_s")
    return fit_constants(Predictor(observations, shard), observations, with_loop_times(points, hardware), names).profile


def predicted_s(points: Sequence[Point], cost_model: CostModel) -> Floats:
    """Seconds of host and device, one after the other, for each of `points`, [points]."""
    times = [cost_model.host_ns(point.num_requests) + cost_model.device_ns(point.work) for point in points]
    return np.array(times) / NANOSECONDS


class Predictor:
    """Predicts observations under any profile: weighted sums over the distinct iterations in them.

    shard: shard of the model; the degree of tensor parallelism is that of each observation.
    overlaps: the host prepares an iteration while the device executes the one before.
    """

    def __init__(self, observations: Sequence[Observation], shard: Shard, overlaps: bool = False) -> None:
        self._overlaps = overlaps
        steps: dict[tuple[int, StepWork], int] = {}
        entries = [
            (row, steps.setdefault((one.tp_size, work), len(steps)), one.has_host, weight)
            for row, one in enumerate(observations)
            for work, weight in one.steps
        ]
        rows, columns, has_host, weights = zip(*entries, strict=True)
        self._rows, self._weights, self._num_rows = np.array(rows), np.array(weights), len(observations)
        # The times of host and device come first, those of the device alone behind them.
        self._columns = np.where(has_host, columns, np.array(columns) + len(steps))
        # An iteration of a pipeline is one micro batch, which passes through all stages.
        self._steps = [(tp_size, work, work.context_requests + work.generation_tokens) for tp_size, work in steps]
        self._shards = {tp_size: dataclasses.replace(shard, tp_size=tp_size) for tp_size, _ in steps}

    def __call__(self, hardware: HardwareProfile) -> Floats:
        """Seconds of each observation, [observations]."""
        models = {tp_size: CostModel(shard, hardware) for tp_size, shard in self._shards.items()}
        device_s = np.array([models[tp_size].device_ns(work) for tp_size, work, _ in self._steps]) / NANOSECONDS
        host_s = np.array([models[tp_size].host_ns(requests) for tp_size, _, requests in self._steps]) / NANOSECONDS
        whole_s = np.maximum(host_s, device_s) if self._overlaps else host_s + device_s
        times = np.concatenate([whole_s, device_s])[self._columns]
        return np.bincount(self._rows, self._weights * times, minlength=self._num_rows).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted constants.

    slopes: [observations, constants], change of the logarithm of each prediction with that of each constant.
    errors: [observations], logarithms of predicted over measured time.
    """

    profile: HardwareProfile
    slopes: Floats
    errors: Floats


def fit_constants(
    predict: Predictor,
    observations: Sequence[Observation],
    hardware: HardwareProfile,
    names: Sequence[str],
    hold: float = HOLD,
) -> Fit:
    """Least squares of the errors of `observations`: the constants `names` of `hardware`, which is otherwise kept.

    The unknowns are logarithms of factors, so no constant becomes negative. hold: see HOLD.
    """
    hardware = with_first_guesses(hardware, names)
    measured_s = np.array([one.seconds for one in observations])
    weights = np.sqrt([one.weight for one in observations])

    def errors(unknowns: Floats) -> Floats:
        ratios: Floats = predict(scaled(hardware, names, np.exp(unknowns))) / measured_s
        return np.log(ratios)

    def residuals(unknowns: Floats) -> Floats:
        return np.concatenate([weights * _tamed(errors(unknowns)), hold * unknowns])

    start = np.zeros(len(names))
    unknowns = _least_squares(residuals, start) if names else start
    profile = scaled(hardware, names, np.exp(unknowns))
    return Fit(profile, slopes_of(predict, profile, names), errors(unknowns))


def slopes_of(predict: Predictor, hardware: HardwareProfile, names: Sequence[str]) -> Floats:
    """The slopes of a `Fit` that found `hardware`, for the constants `names`."""

    def logarithms(unknowns: Floats) -> Floats:
        predicted: Floats = np.log(predict(scaled(hardware, names, np.exp(unknowns))))
        return predicted

    start = np.zeros(len(names))
    return _slopes(logarithms, start, logarithms(start))


def constant(hardware: HardwareProfile, name: str) -> float:
    """The constant called `name`, of the profile itself or of its kernels."""
    return float(getattr(hardware if name in HOST_CONSTANTS else hardware.constants, name))


def with_constants(hardware: HardwareProfile, values: Mapping[str, float]) -> HardwareProfile:
    """`hardware` with other values of some constants."""
    of_host: dict[str, Any] = {name: value for name, value in values.items() if name in HOST_CONSTANTS}
    of_kernels = {name: value for name, value in values.items() if name not in HOST_CONSTANTS}
    return dataclasses.replace(hardware, constants=dataclasses.replace(hardware.constants, **of_kernels), **of_host)


def slowed(hardware: HardwareProfile, ratio: float) -> HardwareProfile:
    """`hardware` on which everything that is fitted takes `ratio` times as long."""
    names = (*FITTED_CONSTANTS, "matmul_fp8", "launch_s", *HOST_CONSTANTS)
    values = {name: constant(hardware, name) for name in names}
    return with_constants(
        hardware, {name: value * ratio if name.endswith("_s") else value / ratio for name, value in values.items()}
    )


def with_first_guesses(hardware: HardwareProfile, names: Iterable[str]) -> HardwareProfile:
    """`hardware` without constants among `names` that are too close to zero for a search in logarithms."""
    return with_constants(
        hardware, {name: max(constant(hardware, name), FIRST_GUESSES.get(name, 0.0)) for name in names}
    )


def scaled(hardware: HardwareProfile, names: Iterable[str], factors: Floats) -> HardwareProfile:
    """`hardware` with each of the constants `names` times its factor."""
    pairs = zip(names, factors.tolist(), strict=True)
    return with_constants(hardware, {name: constant(hardware, name) * factor for name, factor in pairs})


def with_loop_times(points: Sequence[Point], hardware: HardwareProfile) -> HardwareProfile:
    """`hardware` with the times of the loop that `points` have measured. With batches of one size only, the time for
    each request is kept."""
    if len(sizes := {point.num_requests for point in points}) > 1:
        return with_constants(hardware, dict(zip(HOST_CONSTANTS, _loop_times(points), strict=True)))
    loop_s = median(point.loop_s or 0.0 for point in points)
    iteration_s = loop_s - sizes.pop() * hardware.host_request_s
    return with_constants(hardware, {"host_iteration_s": max(iteration_s, MIN_S)})


def loop_errors(points: Sequence[Point], hardware: HardwareProfile) -> dict[str, float]:
    """The standard errors of the two constants of the loop, as shares of them, if `points` measured it."""
    times = np.array([(1.0, point.num_requests) for point in points]) * (
        hardware.host_iteration_s,
        hardware.host_request_s,
    )
    shares = times / np.maximum([[point.loop_s or 0.0] for point in points], MIN_S)
    spread = float(np.median(np.abs(shares.sum(axis=1) - 1)))
    if len({point.num_requests for point in points}) == 1:
        return {"host_iteration_s": spread}
    errors = np.sqrt(np.diag(np.linalg.pinv(shares.T @ shares, hermitian=True))) * spread
    return dict(zip(HOST_CONSTANTS, errors.tolist(), strict=True))


def _loop_times(points: Sequence[Point]) -> tuple[float, float]:
    """Seconds of the loop for an iteration and for each request in it: least squares of relative errors."""
    loop_s = np.maximum([point.loop_s or 0.0 for point in points], MIN_S)
    terms = np.array([(1.0, point.num_requests) for point in points]) / loop_s[:, None]
    iteration_s, request_s = np.linalg.lstsq(terms, np.ones(len(points)), rcond=None)[0].tolist()
    return max(iteration_s, MIN_S), max(request_s, FIRST_GUESSES["host_request_s"])


def _tamed(errors: Floats) -> Floats:
    """Residuals whose squares are the pseudo-Huber loss: quadratic for small errors, linear for large ones."""
    sizes: Floats = np.sqrt(2 * (np.hypot(1, errors / LARGE_ERROR) - 1))
    return np.copysign(LARGE_ERROR * sizes, errors)


def _least_squares(residuals: Callable[[Floats], Floats], start: Floats) -> Floats:
    """Unknowns near `start`, within MAX_FACTOR, at which the sum of the squared residuals has a minimum.

    The predicted times are whole nanoseconds, so that derivatives are differences over STEP."""
    from scipy.optimize import least_squares

    bound = np.log(MAX_FACTOR)
    latest: list[Floats] = []  # the unknowns of the latest residuals, and these: slopes are asked for at the same

    def values(at: Floats) -> Floats:
        if not latest or not np.array_equal(latest[0], at):
            latest[:] = at.copy(), residuals(at)
        return latest[1]

    found = least_squares(values, start, lambda at: _slopes(residuals, at, values(at)), (-bound, bound), ftol=CONVERGED)
    return np.asarray(found.x)


def _slopes(function: Callable[[Floats], Floats], unknowns: Floats, values: Floats) -> Floats:
    """Derivatives of `function`, which is `values` at `unknowns`, with respect to each unknown, [values, unknowns]."""
    columns = [(function(unknowns + STEP * unit) - values) / STEP for unit in np.eye(len(unknowns))]
    return np.stack(columns, axis=1) if columns else np.zeros((len(values), 0))
