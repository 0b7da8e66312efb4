"""A part of a run for charts: a window of iterations or of seconds, and some of the requests."""

import re

import numpy as np
import pandas as pd

from ifbbench.analysis.token_times import IterationClock
from ifbbench.errors import InputError
from ifbbench.rundir.line_types import RUNNING
from ifbbench.rundir.reader import Floats, RunData

# No number has more digits: Python refuses to parse one of thousands.
_POINT = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)(s|ms)?", re.ASCII)
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)
_RANGE = re.compile(r"(\d{1,18})-(\d{1,18})", re.ASCII)


def select(run: RunData, begin: str | None = None, end: str | None = None, requests: str | None = None) -> RunData:
    """`run` with the tables restricted to iterations `begin` to `end` and to `requests`, a list such as `3,8-12`.

    begin, end: an iteration (`120`) or a time (`3.5s`, `800ms`); None for the run's own. Iterations are never chosen by
    request. InputError if a text is not valid or nothing is left.
    """
    if begin is None and end is None and requests is None:
        return run
    clock = IterationClock.of(run)
    if not len(clock.numbers):
        return run
    first = _iteration("--from", begin, clock.numbers, clock.end_s, int(clock.numbers[0]))
    last = _iteration("--to", end, clock.numbers, clock.start_s, int(clock.numbers[-1]), last=True)
    if first > last:
        raise InputError(f"--from {begin} --to {end}: no iteration is between them; expected --from before --to.")
    part = RunData(run.path, run.run, run.summary)
    spans = run.spans
    kept = (spans["first_iteration"] <= last) & (spans["last_iteration"] >= first)
    if requests is not None:
        kept &= spans["request_id"].isin(_chosen(run, requests))
    spans = _clipped(spans[kept].reset_index(drop=True), first, last, run.num_micro_batches)
    numbers = run.iterations["iteration_counter"]
    rows = run.requests[run.requests["request_id"].isin(set(spans["request_id"]))]
    # The tables of RunData are read when they are first used; these need no reading.
    vars(part).update(
        iterations=run.iterations[(numbers >= first) & (numbers <= last)].reset_index(drop=True),
        spans=spans,
        requests=rows.reset_index(drop=True),
    )
    return part


def _iteration(
    option: str, text: str | None, numbers: Floats, times_s: Floats, default: int, last: bool = False
) -> int:
    """The iteration that a bound of the window names."""
    if text is None:
        return default
    match = _POINT.fullmatch(text.strip())
    if match is None or (match[2] is None and "." in match[1]):
        raise InputError(f"{option} {text}: not valid; expected an iteration, such as 120, or a time, such as 3.5s.")
    if match[2] is None:
        return int(match[1])
    seconds = float(match[1]) / (1000 if match[2] == "ms" else 1)
    index = int(np.searchsorted(times_s, seconds, side="right")) - int(last)
    if not 0 <= index < len(numbers):
        raise InputError(
            f"{option} {text}: outside of the run, which lasts from {times_s[0]:.3f} s to "
            f"{times_s[-1]:.3f} s; give a time within it."
        )
    return int(numbers[index])


def _chosen(run: RunData, text: str) -> set[str]:
    """The ids of a list such as `3,8-12`; an id with a dash is taken as it is."""
    known = dict.fromkeys([*run.requests["request_id"], *run.spans["request_id"]])
    chosen: set[str] = set()
    for part in filter(None, (one.strip() for one in text.split(","))):
        if part in known:
            chosen.add(part)
        elif (bounds := _RANGE.fullmatch(part)) is not None and int(bounds[1]) <= int(bounds[2]):
            low, high = int(bounds[1]), int(bounds[2])
            chosen |= {one for one in known if _NUMBER.fullmatch(one) and low <= int(one) <= high}
        else:
            some = ", ".join(list(known)[:3])
            raise InputError(f"--requests {text}: {part!r} is not a request of the run; expected ids, such as {some}.")
    if not chosen:
        raise InputError(f"--requests {text}: no request of the run is among them.")
    return chosen


def _clipped(spans: pd.DataFrame, first: int, last: int, num_micro_batches: int) -> pd.DataFrame:
    """`spans` without their parts outside of the window."""
    # Steps that are cut off.
    every = np.where(spans["phase"].isin(RUNNING), num_micro_batches, 1)
    cut_before = -(-(first - spans["first_iteration"]).clip(lower=0).to_numpy(dtype=int) // every)
    cut_behind = -(-(spans["last_iteration"] - last).clip(lower=0).to_numpy(dtype=int) // every)
    if not cut_before.any() and not cut_behind.any():
        return spans
    spans = spans.assign(
        first_iteration=spans["first_iteration"] + cut_before * every,
        last_iteration=spans["last_iteration"] - cut_behind * every,
    )
    lengths = (spans["last_iteration"] - spans["first_iteration"]) // every + 1
    chunks, kept_steps = (
        [
            part[before : max(len(part) - behind, 0)] if isinstance(part, list) else part
            for part, before, behind in zip(spans[name], cut_before, cut_behind, strict=True)
        ]
        for name in ("chunks", "steps")
    )
    tokens_before, tokens_behind, tokens = cut_before, cut_behind, np.asarray(lengths, dtype=int)
    is_drafted = spans["steps"].notna()
    if is_drafted.any():  # iterations of several tokens
        tokens_before, tokens_behind, tokens = tokens_before.copy(), tokens_behind.copy(), tokens.copy()
        for index in np.flatnonzero(is_drafted).tolist():
            steps = spans["steps"].iloc[index]
            tokens[index] = sum(kept_steps[index])
            tokens_before[index] = sum(steps[: cut_before[index]])
            tokens_behind[index] = sum(steps) - tokens[index] - tokens_before[index]
    spans = spans.assign(
        chunks=pd.Series(chunks, dtype=object),
        steps=pd.Series(kept_steps, dtype=object),
        first_output=spans["first_output"] + tokens_before,
        # Output tokens come in the last iterations of a span.
        produced=np.minimum((spans["produced"].fillna(0) - tokens_behind).clip(lower=0), tokens),
    )
    # The window may lie between two steps.
    with_steps: pd.DataFrame = spans[spans["first_iteration"] <= spans["last_iteration"]]
    return with_steps.reset_index(drop=True)
