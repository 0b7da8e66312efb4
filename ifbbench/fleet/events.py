"""The file of `--replica_events`: which replicas fail, drain and start, and when."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ifbbench.errors import InputError
from ifbbench.settings.bounds import MAX_REPLICAS, MAX_SPAN_S
from ifbbench.settings.fields import integer, located, number, table
from ifbbench.settings.table_files import read_tables

# What an entry asks for: a replica fails, or takes no further requests; so many start; or the fleet has so many.
FAIL, DRAIN, START, REPLICAS = "fail", "drain", "start", "replicas"
KINDS = (FAIL, DRAIN, START, REPLICAS)
AT, LIKE = "at", "like"


class ReplicaEvent(NamedTuple):
    """What happens at a time.

    value: number of the replica that fails or drains; how many replicas start; or how many the fleet has then.
    like: number of the replica whose settings new ones have.
    """

    at_s: float
    kind: str
    value: int
    like: int = 0


def read_events(path: Path, replicas: int, can_grow: bool, has_sides: bool = False) -> list[ReplicaEvent]:
    """The events of a file in order of time.

    replicas: number of replicas at first.
    can_grow: whether replicas start that are not in the file.
    has_sides: whether prefill and decode are apart, so that none can start.

    InputError for an entry that cannot be, such as the failure of a replica that is never there.
    """
    found = list[ReplicaEvent]()
    for position, entry in enumerate(read_tables(path, "--replica_events"), start=1):
        with located(f"--replica_events {path}: entry {position}"):
            found.append(_event(entry, replicas))
            if has_sides and found[-1].kind in (START, REPLICAS):
                raise InputError(
                    f"{found[-1].kind}: is not built with --prefill_replicas and --decode_replicas, whose replicas "
                    "fail and drain; leave it out."
                )
    found.sort(key=lambda one: one.at_s)
    _check_numbers(found, replicas, can_grow, path)
    return found


def _event(entry: dict[str, str], replicas: int) -> ReplicaEvent:
    table(entry, "it", (AT, *KINDS, LIKE), (AT,))
    kinds = [kind for kind in KINDS if kind in entry]
    if len(kinds) != 1:
        raise InputError(f"it has {' and '.join(kinds) or 'no event'}; expected one of {', '.join(KINDS)}.")
    (kind,) = kinds
    at_s = number(entry[AT], AT, 0.0, MAX_SPAN_S, unit="s", from_text=True)
    value = integer(entry[kind], kind, 1 if kind == START else 0, MAX_REPLICAS, from_text=True)
    if LIKE in entry and kind not in (START, REPLICAS):
        raise InputError(f"{LIKE} is of replicas that start; leave it out.")
    return ReplicaEvent(at_s, kind, value, integer(entry.get(LIKE, 0), LIKE, 0, replicas - 1, from_text=True))


def _check_numbers(events: Sequence[ReplicaEvent], replicas: int, can_grow: bool, path: Path) -> None:
    """InputError for the number of a replica that has not started by then."""
    started = replicas
    for event in events:
        if event.kind == START:
            started += event.value
        elif event.kind == REPLICAS:
            can_grow = True  # how many start depends on how many are there
        elif event.value >= started and not can_grow:
            raise InputError(
                f"--replica_events {path}: replica {event.value} has not started by {event.at_s:g} s; expected a "
                f"number from 0 to {started - 1}. Replicas that start have the numbers that follow."
            )
