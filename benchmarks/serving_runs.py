"""Predictions of many rows: in several processes, kept one by one, with progress.

A prediction is kept as a line of a file as soon as it is there, so that a call that was interrupted goes on where it
ended. It counts as long as the row, its settings, the package and the runner are the same. Rows that repeat a
measurement of the same settings share one. Short rows come first: what is interrupted has most rows done.
"""

import hashlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import ifbbench
from benchmarks.serving_rows import NotReplayable, Row, clients_of, predict, requests_of

PACKAGE = Path(ifbbench.__file__).parent
SOURCES = [path for suffix in ("py", "toml", "json") for path in sorted(PACKAGE.rglob(f"*.{suffix}"))]
NOT_USED = ("expected_errors.json",)
RUNNER_FILES = ("serving_rows.py", "inferencex_rows.py", "inferencex_recipes.py", "inferencex_recipes.csv")
RUNNER = [Path(__file__).with_name(name) for name in RUNNER_FILES]
POWER = "power_w_per_gpu"
NOT_RUN = "not run: the time given by --minutes was over"
# A line of progress at most so often, in seconds.
PROGRESS_S = 10.0
# About how long a row takes, in seconds of a core (compiled, 2026-11-28): for each request; with draft tokens, where
# iterations run one by one, also for each iteration of a replica, and for each token.
REQUEST_S, ITERATION_S, TOKEN_S = 2e-3, 3e-4, 3e-6


def predictions(
    rows: Sequence[Row],
    models: Mapping[str, Any],
    jobs: int,
    cache: Path | None = None,
    minutes: float | None = None,
) -> list[dict[str, Any]]:
    """What is predicted for each row, or {"error": why not}.

    jobs: processes. cache: where predictions are kept. minutes: after this time no further row begins."""
    package = _digest_of_sources()
    keys = [hashlib.sha256(json.dumps([replayed(row), package]).encode()).hexdigest() for row in rows]
    known = _read(cache)
    first = {key: index for index, key in reversed(list(enumerate(keys)))}
    missing = sorted((index for key, index in first.items() if key not in known), key=lambda index: _work(rows[index]))
    with cache.open("a", encoding="utf-8") if cache else nullcontext() as file:
        for index, figures in _run([(index, rows[index]) for index in missing], models, jobs, minutes):
            known[keys[index]] = figures
            if file:
                file.write(json.dumps({"key": keys[index], **figures}) + "\n")
                file.flush()
    return [known.get(key, {"error": NOT_RUN}) for key in keys]


def replayed(row: Row) -> dict[str, Any]:
    """What a prediction depends on: not the figures that were measured, but which of them there are."""
    measured = ("id", "date", "output_tokens_per_s", POWER)
    return {
        name: sorted(key for key, figure in value.items() if figure is not None) if name.endswith("_ms") else value
        for name, value in row.items()
        if name not in measured
    }


def _digest_of_sources() -> str:
    package = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES if path.name not in NOT_USED))
    for path in RUNNER:
        package.update(path.read_bytes())
    return package.hexdigest()


def _read(cache: Path | None) -> dict[str, dict[str, Any]]:
    """The predictions that a file has. A last line that was cut by an interruption is left out."""
    found = {}
    for line in cache.read_text(encoding="utf-8").splitlines() if cache and cache.exists() else ():
        try:
            figures = json.loads(line)
        except ValueError:
            continue
        found[figures.pop("key")] = figures
    return found


def _work(row: Row) -> float:
    """About how long a row takes, in seconds. With draft tokens a replica has an iteration for each token of a client,
    at most."""
    requests = len(requests_of(row))
    seconds = requests * REQUEST_S
    if row.get("num_drafts") or row.get("drafts"):
        replicas = row["sides"]["decode"]["workers"] if row.get("sides") else 1
        rounds = requests / (clients_of(row) or requests)
        seconds += row["output"] * (rounds * replicas * ITERATION_S + requests * TOKEN_S)
    return seconds


def _run(
    rows: Sequence[tuple[int, Row]], models: Mapping[str, Any], jobs: int, minutes: float | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and prediction of each row, as they are done, with lines of progress on the standard error."""
    if not rows:
        return
    begin_s, done, work_done = time.monotonic(), 0, 0.0
    works = {index: _work(row) for index, row in rows}
    works_left = sum(works.values())
    ends_s = None if minutes is None else begin_s + 60 * minutes
    shown_s = begin_s
    with Pool(jobs, initializer=_leave_interrupts) as pool:
        for index, figures in pool.imap_unordered(partial(_predicted, models=models, ends_s=ends_s), rows):
            done, now_s = done + 1, time.monotonic()
            works_left -= works[index]
            work_done += 0.0 if "error" in figures else works[index]  # those that fail say nothing about time
            if now_s - shown_s >= PROGRESS_S or done == len(rows):
                shown_s = now_s
                left_s = (now_s - begin_s) * works_left / max(work_done, 1.0)
                print(
                    f"{done} of {len(rows)} predictions, {now_s - begin_s:.0f} s, about {left_s:.0f} s left",
                    file=sys.stderr,
                    flush=True,
                )
            if figures.get("error") != NOT_RUN:
                yield index, figures


def _leave_interrupts() -> None:
    """An interruption ends the main process, which ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _predicted(
    numbered: tuple[int, Row], models: Mapping[str, Any], ends_s: float | None
) -> tuple[int, dict[str, Any]]:
    index, row = numbered
    if ends_s is not None and time.monotonic() > ends_s:
        return index, {"error": NOT_RUN}
    try:
        return index, dict(predict(row, models))
    except NotReplayable as reason:
        return index, {"error": str(reason)}
    except Exception as error:  # a row that cannot be replayed must not end the others
        return index, {"error": f"{type(error).__name__}: {error}"}
