"""Whether the replay of a recorded engine ran what that engine ran."""

from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ifbbench.analysis.number_texts import number_of
from ifbbench.errors import InputError
from ifbbench.rundir.columns import iteration_columns
from ifbbench.rundir.run_directory import find_iterations
from ifbbench.rundir.timeline import UNUSED

COMPARED = ("scheduled_requests", "total_context_tokens", "budget_used")


def difference_from_recording(recording: Path, replay: Path, config: Mapping[str, Any]) -> str | None:
    """A sentence on the iterations of a replay whose requests, prompt tokens or tokens are not as many as those of the
    same iteration in the recording, or on why these cannot be read; None if all are equal, or a directory has none.

    config: settings of the replay.
    """
    paths = [find_iterations(directory) for directory in (recording, replay)]
    if not all(path.exists() for path in paths):
        return None
    try:
        recorded, replayed = (_sizes(path, config) for path in paths)
    except InputError as error:  # the run itself does not need them
        return f"The replay was not compared with the recorded schedule: {error}"
    pairs = enumerate(zip_longest(recorded, replayed))
    differing = [(number, one, other) for number, (one, other) in pairs if one != other]
    if not differing:
        return None
    number, one, other = differing[0]
    total = max(len(recorded), len(replayed))
    return (
        f"The replay is not the recorded schedule: {len(differing):,} of {total:,} iterations differ, first iteration "
        f"{number}: {_described(other)}; recorded: {_described(one)}."
    )


def _sizes(path: Path, config: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Requests, prompt tokens and tokens of each iteration."""
    columns = iteration_columns(path, config, UNUSED - set(COMPARED))
    return list(zip(*(map(int, columns[name]) for name in COMPARED), strict=True))


def _described(sizes: tuple[int, ...] | None) -> str:
    if sizes is None:
        return "no such iteration"
    requests, prompt_tokens, tokens = sizes
    return f"{number_of(requests, 'request')} with {number_of(tokens, 'token')}, {prompt_tokens:,} of them of prompts"
