"""The files of a fleet: a run directory of all its requests, with a run directory for each replica in it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from heapq import merge
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.json import Decoder, encode

from ifbbench.compressed import open_to_read
from ifbbench.rundir.lines import JsonLinesWriter
from ifbbench.rundir.run_directory import REPLICA_DIRECTORIES, find_lines

# The figures of each replica that the fleet's summary has.
REPLICA_FIGURES = (
    "requests", "prompt_tokens", "output_tokens", "output_throughput_tokens_per_s", "prefix_hit_rate", "queue_time_s",
    "ttft_s", "tpot_s", "e2e_s", "iterations", "pauses", "kv_blocks",
)  # fmt: skip
SHARED_STORE = "remote"
# Figures of which a replica may have more than its share.
BALANCED = ("requests", "prompt_tokens", "output_tokens")
Offers = Mapping[str, Sequence[float | None]]
OffersOf = Callable[[int], Offers | None]


class _EndedRequest(Struct):
    """What a line of `requests.jsonl` is ordered by.

    index: index in the trace of its replica.
    """

    index: int
    arrival_s: float
    end_s: float | None = None


_decode = Decoder(_EndedRequest).decode


def replica_directory(directory: Path, number: int) -> Path:
    """The run directory of a replica."""
    return directory / f"{REPLICA_DIRECTORIES}{number}"


def replica_directories(directory: Path) -> list[Path]:
    """The run directories of the replicas in that of a fleet, by number; empty in another one."""
    found = directory.glob(f"{REPLICA_DIRECTORIES}*/run.json")
    numbers = (path.parent.name.removeprefix(REPLICA_DIRECTORIES) for path in found)
    return [replica_directory(directory, number) for number in sorted(int(one) for one in numbers if one.isdecimal())]


def write_requests(
    directory: Path,
    recording_format: str,
    members: Sequence[Sequence[int]],
    offers_of: OffersOf = lambda index: None,
    ended_in: Callable[[int, int], bool] = lambda index, number: True,
    lost: Sequence[bytes] = (),
) -> None:
    """Write the fleet's `requests.jsonl`: the lines of all replicas in the order in which requests ended, each with its
    index in the whole trace and `replica`, and what the router saw of the replicas.

    members: for each replica, the index in the whole trace of each of its requests.
    offers_of(index): returns what the router looked at (see RequestLine); None if it looked at nothing.
    ended_in(index, number): returns whether the request ended in this replica; otherwise it was sent to another one.
    lost: the lines of requests that no replica took, which end with the last ones.
    """

    def ended(number: int, indices: Sequence[int]) -> Iterator[tuple[float, int, bytes, int]]:
        """When the requests of a replica ended, in order, with their lines."""
        ended_s = 0.0
        for one, line in _lines(replica_directory(directory, number)):
            ended_s = max(ended_s, one.arrival_s if one.end_s is None else one.end_s)
            index = indices[one.index]
            if ended_in(index, number):
                yield ended_s, number, line.replace(b'"index":%d' % one.index, b'"index":%d' % index, 1), index

    # Merged while they are read: memory holds a line of each replica.
    merged = merge(*[ended(number, indices) for number, indices in enumerate(members)], key=lambda one: one[:2])
    with closing(JsonLinesWriter(directory / f"requests.{recording_format}")) as writer:
        for _, number, line, index in merged:
            offers = offers_of(index)
            more = b"" if offers is None else b',"offers":' + encode(offers)
            writer.write([line[:-1] + b',"replica":%d' % number + more + b"}"])
        writer.write(lost)


def _lines(directory: Path) -> Iterator[tuple[_EndedRequest, bytes]]:
    path = find_lines(directory, "requests")
    if not path.exists():
        return
    with closing(open_to_read(path)) as file:
        for line in file:
            yield _decode(line), line.rstrip(b"\n")


@dataclass(frozen=True)
class Member:
    """A replica of a fleet.

    settings: settings that not all replicas have in common.
    price: price of a GPU hour; None if it is not known.
    started_s, ended_s: when its GPUs were taken, and when they were free again.
    service: what else is known of that in fleets that change.
    """

    settings: Mapping[str, Any]
    gpus: int
    price: float | None
    started_s: float
    ended_s: float
    service: Mapping[str, Any]

    @property
    def up_s(self) -> float:
        return max(self.ended_s - self.started_s, 0.0)


def fleet_figures(router: str, summaries: Sequence[Mapping[str, Any]], members: Sequence[Member]) -> dict[str, Any]:
    """The entry `fleet` of `summary.json`. summaries: of each replica."""
    replicas = []
    for number, (one, member) in enumerate(zip(summaries, members, strict=True)):
        own = {"settings": dict(member.settings)} if member.settings else {}
        replicas.append(
            {"replica": number, "gpus": member.gpus, "up_s": member.up_s}
            | dict(member.service)
            | own
            | {name: one[name] for name in REPLICA_FIGURES}
        )
    return {
        "router": router,
        "gpus": _gpus_at_a_time(members),
        "gpu_hours": sum(member.gpus * member.up_s for member in members) / 3600,
        **_cost(members, sum(one["output_tokens"] for one in summaries)),
        "imbalance": imbalance(summaries),
        "replicas": replicas,
    }


def tier_figures(summaries: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """The entry `kv_tiers` of a fleet's summary: what replicas have of their own, added up, and what they share."""
    found: dict[str, dict[str, int]] = {}
    for one in summaries:
        for name, figures in (one.get("kv_tiers") or {}).items():
            so_far = found.get(name)
            if so_far is None or name == SHARED_STORE:
                found[name] = dict(figures)
                continue
            _add_to(so_far, figures)
    return found


def retention_figures(summaries: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The entry `kv_retention` of a fleet's summary, of all replicas together; empty where none has one."""
    found: dict[str, int] = {}
    for one in summaries:
        _add_to(found, one.get("kv_retention") or {})
    return found


def _add_to(so_far: dict[str, int], figures: Mapping[str, int]) -> None:
    """Take in the figures of one more replica."""
    for name, value in figures.items():
        before = so_far.get(name, 0)
        so_far[name] = max(before, value) if name == "max_waiting_writes" else before + value


def imbalance(summaries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What the replica with most requests, prompt tokens or output tokens has, over the mean of these replicas."""
    found = {}
    for name in BALANCED:
        values = [one["requests"]["total"] if name == "requests" else one[name] for one in summaries]
        found[name] = max(values) * len(values) / sum(values) if sum(values) else 1.0
    return found


def _gpus_at_a_time(members: Sequence[Member]) -> int:
    """The largest number of GPUs that were taken at a time."""

    def at(time_s: float) -> int:
        return sum(one.gpus for one in members if one.started_s == time_s or one.started_s < time_s < one.ended_s)

    return max(at(member.started_s) for member in members)


def _cost(members: Sequence[Member], output_tokens: int) -> dict[str, float | None]:
    """What the GPUs cost; nothing if the price of one is not known."""
    cost = 0.0
    for member in members:
        if member.price is None:
            return {}
        cost += member.price * member.gpus * member.up_s / 3600
    per_million = cost / output_tokens * 1e6 if output_tokens else None
    return {"cost": cost, "cost_per_million_output_tokens": per_million}
