"""Which constants of a cost model a set of measurements determines, and how surely."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ifbbench.simulated.hardware import HardwareProfile
from ifbbench.simulated.shard import Shard
from ifbbench.studies.fit import (
    Fit,
    FitError,
    Floats,
    Observation,
    Predictor,
    constant,
    fit_constants,
    slopes_of,
    with_constants,
)

# A constant is determined if its standard error is at most this share of it.
MAX_ERROR = 0.25
# Measured times are not trusted more than this: a model of few terms has errors of its own.
LEAST_NOISE = 0.01
# Standard deviation of a normal distribution over its median absolute deviation.
NORMAL_MEDIAN = 1.4826
# Standard deviation of a constant's logarithm before anything is measured.
PRIOR = 1.0
# The prior of a constant that is kept: profiles of similar devices and engines differ by so much.
PRIOR_OF_KEPT = 0.5
# Constants that explain each other's influence to this share cannot be told apart.
SAME_INFLUENCE = 0.9
# A time this many times as long or short as predicted is left out: warm-up, compilation, or a wait.
OUTLIER = 4.0
# Constants of a search that starts far away; the last fit has none.
LAST_HOLD = 1e-3
MIN_HELD_OUT = 4
# A constant that fewer observations depend on is kept: one disturbance could decide it.
MIN_SUPPORT = 1.5
# Times of an iteration that a search begins with at this share of it at least.
GUESSED, FIRST_SHARE = ("host_iteration_s", "context_s"), 0.02


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of one constant.

    error: its standard error as a share of it; None if it was kept.
    reason: why it was.
    """

    name: str
    value: float
    error: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Determined:
    """Fitted constants and their verdicts.

    observations: those that were used.
    predicted_s: [observations].
    fit_error: error of the fit to all of them.
    held_out_error: error of constants fitted to one half of them in predicting the other; None if there are too few.
    left_out: number of outliers.
    """

    profile: HardwareProfile
    verdicts: tuple[Verdict, ...]
    observations: Sequence[Observation]
    predicted_s: Floats
    fit_error: FitError
    held_out_error: FitError | None
    left_out: int


def determine(
    observations: Sequence[Observation],
    hardware: HardwareProfile,
    shard: Shard,
    names: Sequence[str],
    overlaps: bool = False,
) -> Determined:
    """Fit those of the constants `names` that `observations` determine; the others keep the value in `hardware`.

    Constants that cannot be told apart are tried together: the one with the least influence is kept, until the standard
    errors of the rest are small. hardware, overlaps: see `fit_constants` and `Predictor`.
    """
    count = len(observations)
    observations = _usual(observations, hardware, shard, names, overlaps)
    predict = Predictor(observations, shard, overlaps)
    first = fit_constants(predict, observations, _start(hardware, observations, names), names)
    free = _determined(first, names, observations)
    last = fit_constants(predict, observations, _start(hardware, observations, free), free, LAST_HOLD)
    # Influences change with the constants, so that some may now be uncertain.
    everything = _with_kept(last, predict, observations, names)
    if (fewer := [name for name in _determined(everything, names, observations) if name in free]) != free:
        free = fewer
        last = fit_constants(predict, observations, _start(hardware, observations, free), free, LAST_HOLD)
        everything = _with_kept(last, predict, observations, names)
    errors = _standard_errors(everything, names, free, observations)
    verdicts = tuple(
        Verdict(name, constant(last.profile, name), errors[name])
        if name in errors
        else Verdict(name, constant(last.profile, name), None, _reason(name, names, free, everything))
        for name in names
    )
    found_s = predict(last.profile)
    return Determined(
        last.profile,
        verdicts,
        observations,
        found_s,
        FitError.of(observations, found_s),
        _held_out(observations, hardware, shard, free, overlaps),
        count - len(observations),
    )


def _usual(
    observations: Sequence[Observation], hardware: HardwareProfile, shard: Shard, names: Sequence[str], overlaps: bool
) -> Sequence[Observation]:
    """The observations that a fit in which all count alike predicts about right; all if that are not most. The mean of
    their weights is 1."""
    alike = [replace(one, weight=1.0) for one in observations]
    fit = fit_constants(Predictor(alike, shard, overlaps), alike, _start(hardware, alike, names), names)
    usual = [one for one, error in zip(observations, fit.errors, strict=True) if abs(error) < np.log(OUTLIER)]
    chosen = usual if len(usual) > len(observations) / 2 else observations
    mean = sum(one.weight for one in chosen) / len(chosen)
    return [replace(one, weight=one.weight / mean) for one in chosen]


def _start(hardware: HardwareProfile, observations: Sequence[Observation], names: Sequence[str]) -> HardwareProfile:
    """`hardware` with times that are large enough to be found by a search in logarithms."""
    iterations_s = [one.seconds / sum(weight for _, weight in one.steps) for one in observations]
    guess_s = FIRST_SHARE * float(np.median(iterations_s))
    return with_constants(hardware, {name: max(constant(hardware, name), guess_s) for name in names if name in GUESSED})


def _with_kept(fit: Fit, predict: Predictor, observations: Sequence[Observation], names: Sequence[str]) -> Fit:
    """`fit` with the slopes of all constants `names`, also of those that were kept."""
    start = _start(fit.profile, observations, names)
    return Fit(fit.profile, slopes_of(predict, start, names), fit.errors)


def _determined(fit: Fit, names: Sequence[str], observations: Sequence[Observation]) -> list[str]:
    """The constants that remain when the least certain is kept, one by one, until all others are certain enough."""
    left = [index for index, slopes in enumerate(fit.slopes.T) if _support(slopes) >= MIN_SUPPORT]
    information = _information(fit, observations)
    while left:
        among = np.ix_(left, left)
        errors = np.sqrt(np.diag(np.linalg.inv(information[among] + np.eye(len(left)) / PRIOR**2)))
        worst = int(np.argmax(errors))
        if errors[worst] <= MAX_ERROR:
            break
        left.pop(worst)
    return [names[index] for index in left]


def _support(slopes: Floats) -> float:
    """How many observations depend on a constant: as many as would with equal slopes."""
    squares = slopes**2
    return float(squares.sum() ** 2 / np.square(squares).sum()) if squares.any() else 0.0


def _standard_errors(
    fit: Fit, names: Sequence[str], free: Sequence[str], observations: Sequence[Observation]
) -> dict[str, float]:
    """The standard error of each fitted constant, as a share of it, with what the kept ones may be wrong by."""
    is_kept = np.array([name not in free for name in names])
    covariance = np.linalg.pinv(_information(fit, observations) + np.diag(is_kept / PRIOR_OF_KEPT**2), hermitian=True)
    errors = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    return {name: float(error) for name, error in zip(names, errors, strict=True) if name in free}


def _information(fit: Fit, observations: Sequence[Observation]) -> Floats:
    """The inverse of the covariance of the constants' logarithms, without any prior, [constants, constants]."""
    noise = np.empty(len(observations))
    for kind in {one.kind for one in observations}:
        of_kind = np.array([one.kind == kind for one in observations])
        noise[of_kind] = max(NORMAL_MEDIAN * float(np.median(np.abs(fit.errors[of_kind]))), LEAST_NOISE)
    weights = np.array([one.weight for one in observations]) / noise**2
    information: Floats = (fit.slopes.T * weights) @ fit.slopes
    return information


def _reason(name: str, names: Sequence[str], free: Sequence[str], fit: Fit) -> str:
    """Why the observations do not determine the constant."""
    columns = dict(zip(names, fit.slopes.T, strict=True))
    own = columns[name]
    size = float(np.linalg.norm(own))
    if size < LEAST_NOISE / MAX_ERROR:
        return "no measured time depends on it"
    if _support(own) < MIN_SUPPORT:
        return "too few measured times depend on it"
    others = [other for other in free if abs(float(own @ columns[other])) > 0]
    if others:
        matrix = np.stack([columns[other] for other in others], axis=1)
        weights = np.linalg.lstsq(matrix, own, rcond=None)[0]
        if np.linalg.norm(own - matrix @ weights) < np.sqrt(1 - SAME_INFLUENCE) * size:
            shares = np.abs(weights) * np.linalg.norm(matrix, axis=0)
            alike = [other for other, share in zip(others, shares, strict=True) if share > 0.3 * shares.max()]
            return f"cannot be told apart from {' and '.join(alike)}"
    return "its influence is smaller than the errors"


def _held_out(
    observations: Sequence[Observation], hardware: HardwareProfile, shard: Shard, names: Sequence[str], overlaps: bool
) -> FitError | None:
    """The errors of constants fitted to one half of the observations in predicting the other half."""
    halves: tuple[list[Observation], list[Observation]] = ([], [])
    for one in observations:
        halves[hashlib.sha256(repr((one.kind, one.steps)).encode()).digest()[0] % 2].append(one)
    fitted, judged = halves
    if min(len(fitted), len(judged)) < max(MIN_HELD_OUT, len(names)):
        return None
    start = _start(hardware, fitted, names)
    fit = fit_constants(Predictor(fitted, shard, overlaps), fitted, start, names, LAST_HOLD)
    return FitError.of(judged, Predictor(judged, shard, overlaps)(fit.profile))
