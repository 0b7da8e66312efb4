"""`what_if.json` of a run directory: what other settings did on the trace of the run, as `why` last found."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from ifbbench.compressed import check_regular
from ifbbench.errors import IfbbenchError, InputError
from ifbbench.rundir.checking import as_object, check
from ifbbench.rundir.run_directory import RUN, WHAT_IF, write_json

# The files that say which run an outcome is of.
OF_RUN = (RUN, "summary.json")
# The path of the number of requests that failed, which is compared as a figure.
FAILED = "requests.failed"


class Effect(Struct):
    """A figure with the run's settings and with others."""

    before: float | None
    after: float | None
    is_noise: bool


class TriedChange(Struct):
    """Other settings and what they did, by paths into summary.json."""

    settings: dict[str, Any]
    effects: dict[str, Effect]
    command: str
    gpus: int
    needs_more_gpus: bool
    loses_more: bool = False


class RefusedChange(Struct):
    """Other settings that cannot run."""

    settings: dict[str, Any]
    reason: str


class WhatIfFile(Struct):
    """What was tried; see docs/results.md.

    run_sha256: hash of the files OF_RUN when it was tried.
    """

    run_sha256: str
    goal: str
    goal_chosen: str
    objectives: dict[str, float]
    engine: str
    command: str
    baseline: dict[str, float | None]
    recorded: dict[str, float | None] | None
    replayed: dict[str, float | None] | None
    errors: dict[str, float]
    window: dict[str, Any] | None
    changes: list[TriedChange]
    recommended: int | None
    reason: str | None
    on_all: TriedChange | None
    then: TriedChange | None
    untried: list[dict[str, Any]]
    refused: list[RefusedChange]
    notes: list[str]
    milder: int | None = None


def keep_what_if(directory: Path, found: Mapping[str, Any]) -> str | None:
    """Keep an outcome in the run directory. Returns why that cannot be done, None if it is.

    found: as `what_if` of `why --json`, of changes that were tried."""
    try:
        write_json(directory / WHAT_IF, {"run_sha256": _digest(directory), **found})
    except IfbbenchError as error:
        return str(error)
    return None


def kept_what_if(directory: Path) -> tuple[dict[str, Any] | None, bool]:
    """The outcome in a run directory, None if there is none, and whether it is of the run that is there now. InputError
    for a damaged file."""
    path = directory / WHAT_IF
    if not path.exists():
        return None, False
    try:
        check_regular(path)
        found = as_object(path.read_bytes())
        check(found, WhatIfFile)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: {reason}; remove it, or let `ifbbench why {directory}` write it again.") from error
    return found, found["run_sha256"] == _digest(directory)


def _digest(directory: Path) -> str:
    parts = [path.read_bytes() for name in OF_RUN if (path := directory / name).is_file()]
    return hashlib.sha256(b"".join(parts)).hexdigest()
