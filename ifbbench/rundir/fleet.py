"""The files of a fleet: a run directory of all its requests, with a run directory for each replica in it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
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
# Figures of which a replica may have more than its share.
BALANCED = ("requests", "prompt_tokens", "output_tokens")
Offers = Mapping[str, Sequence[float]]
OffersOf = Callable[[int], Offers | None]


class _EndedRequest(Struct):
    """What a line of `requests.jsonl` is ordered by. index: in the trace of its replica."""

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
    directory: Path, recording_format: str, members: Sequence[Sequence[int]], offers_of: OffersOf
) -> None:
    """Write the fleet's `requests.jsonl`: the lines of all replicas in the order in which requests ended, each with its
    index in the whole trace and `replica`, and what the router saw of the replicas.

    members: of each replica, the index in the whole trace of each of its requests. offers_of(index): see RequestLine;
    None if the router looked at nothing."""
    lines: list[tuple[float, int, bytes, int]] = []
    for number, indices in enumerate(members):
        ended_s = 0.0
        for one, line in _lines(replica_directory(directory, number)):
            ended_s = max(ended_s, one.arrival_s if one.end_s is None else one.end_s)
            index = indices[one.index]
            whole = line.replace(b'"index":%d' % one.index, b'"index":%d' % index, 1)
            lines.append((ended_s, number, whole, index))
    lines.sort(key=lambda one: one[:2])  # stable: those of a replica stay in their order
    with closing(JsonLinesWriter(directory / f"requests.{recording_format}")) as writer:
        for _, number, line, index in lines:
            offers = offers_of(index)
            more = b"" if offers is None else b',"offers":' + encode(offers)
            writer.write([line[:-1] + b',"replica":%d' % number + more + b"}"])


def _lines(directory: Path) -> Iterator[tuple[_EndedRequest, bytes]]:
    path = find_lines(directory, "requests")
    if not path.exists():
        return
    with closing(open_to_read(path)) as file:
        for line in file:
            yield _decode(line), line.rstrip(b"\n")


def fleet_figures(
    router: str, summaries: Sequence[Mapping[str, Any]], gpus: Sequence[int], up_s: Sequence[float]
) -> dict[str, Any]:
    """The entry `fleet` of `summary.json`. summaries: of each replica. gpus, up_s: its GPUs, and how long it was up."""
    replicas = [
        {"replica": number, "gpus": gpus[number], "up_s": up_s[number]} | {name: one[name] for name in REPLICA_FIGURES}
        for number, one in enumerate(summaries)
    ]
    return {
        "router": router,
        "gpus": sum(gpus),
        "gpu_hours": sum(count * seconds for count, seconds in zip(gpus, up_s, strict=True)) / 3600,
        "imbalance": imbalance(summaries),
        "replicas": replicas,
    }


def imbalance(summaries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What the replica with most requests, prompt tokens or output tokens has, over the mean of these replicas."""
    found = {}
    for name in BALANCED:
        values = [one["requests"]["total"] if name == "requests" else one[name] for one in summaries]
        found[name] = max(values) * len(values) / sum(values) if sum(values) else 1.0
    return found
