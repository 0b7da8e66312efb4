"""The recording of a fleet that serves, beside those of its replicas."""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import file_digest
from heapq import merge
from pathlib import Path
from typing import Any

from msgspec.json import decode, encode

from ifbbench.build.engine import Engine
from ifbbench.compressed import open_to_read
from ifbbench.replay.fleet import Ended, FleetRun, describe_fleet, fleet_summary
from ifbbench.rundir import run_directory
from ifbbench.rundir.fleet import replica_directory, write_requests
from ifbbench.serving.fleet import FleetService
from ifbbench.serving.recording import SOURCE
from ifbbench.settings.config import RunConfig
from ifbbench.workload.formats import write_lines
from ifbbench.workload.trace import NO_SESSION, Trace


class FleetRecording:
    """What is written to the run directory of a fleet that serves, beside those of its replicas."""

    def __init__(self, directory: Path, engines: Sequence[Engine], config: RunConfig) -> None:
        self.directory, self._engines, self._config = directory, engines, config
        engine = engines[0]
        own = [config.of_one_replica()] * len(engines)
        self._description = describe_fleet(Trace(directory.name, [], "", SOURCE), engine, config, own)
        self._description["name"] = directory.name
        self._trace = f"trace.{engine.config.recording_format}"

    def write_begin(self, directory: Path, name: str) -> None:
        """Write what the directory has at first."""
        (directory / self._trace).touch()
        run_directory.write_begun(directory, self._description)

    def close(self, ended: Sequence[Ended], service: FleetService) -> dict[str, Any]:
        """Write the files of the fleet, once those of its replicas are complete; returns the summary."""
        config, directory = self._config, self.directory
        attempts = _Attempts(service)
        members = [array("q", [attempts.index_of(one) for one in sorted(ids)]) for ids in service.members]
        paths = [replica_directory(directory, number) / self._trace for number in range(len(ended))]
        write_lines(_in_order(paths, service, attempts), directory / self._trace, overwrite=True)
        configs = [config.of_one_replica()] * len(ended)
        failed = {one["replica"] for one in service.failures}
        ended = [
            (one | {"partial": one["partial"] and at not in failed}, parts) for at, (one, parts) in enumerate(ended)
        ]
        priorities = [priority for _, priority in service.sent_again.values()]
        run = FleetRun(ended, members, configs, failures=service.failures, sent_again=priorities)
        summary, _ = fleet_summary(Trace(directory.name, [], "", SOURCE), config, self._engines[0], run)
        if len(ended) > 1:
            summary |= _lateness([one for one, _ in ended])
        write_requests(
            directory,
            self._engines[0].config.recording_format,
            members,
            lambda index: service.offers_of(attempts.last[index]),
            lambda index, number: attempts.ends_in(index, number),
        )
        with (directory / self._trace).open("rb") as file:
            sha256 = file_digest(file, "sha256").hexdigest()
        self._description["trace"] |= {"requests": len(attempts.last), "sha256": sha256}
        run_directory.write_json(directory / "summary.json", summary)
        digest = {"schedule_digest": summary["schedule_digest"], "partial": summary["partial"]}
        run_directory.write_json(directory / run_directory.RUN, {**self._description, **digest})
        return summary


def _lateness(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`delivery_lag_s` and `replay_differs` of all replicas."""
    lags = [one["delivery_lag_s"] for one in summaries]
    found: dict[str, Any] = {
        "delivery_lag_s": {"mean": sum(lag["mean"] for lag in lags) / len(lags), "max": max(lag["max"] for lag in lags)}
    }
    if all("replay_differs" in one for one in summaries):
        names = summaries[0]["replay_differs"]
        found["replay_differs"] = {name: sum(one["replay_differs"][name] for one in summaries) for name in names}
    return found


class _Attempts:
    """Which requests of replicas are attempts of the same one.

    last: id of the last attempt of each request, in order of arrival.
    """

    def __init__(self, service: FleetService) -> None:
        again = service.sent_again
        later = {one for one, _ in again.values()}
        self._replicas = {one: number for number, ids in enumerate(service.members) for one in ids} if again else {}
        self._index: dict[int, int] = {}
        self.last = array("q")
        for first in sorted(merge(*service.members)):
            if first in later:
                continue
            request_id = first
            self._index[request_id] = len(self.last)
            while request_id in again:
                request_id, _ = again[request_id]
                self._index[request_id] = len(self.last)
            self.last.append(request_id)

    def index_of(self, request_id: int) -> int:
        """The index of the request of an attempt."""
        return self._index[request_id]

    def ends_in(self, index: int, number: int) -> bool:
        """Whether the last attempt of a request was at this replica."""
        return not self._replicas or self._replicas[self.last[index]] == number


def _in_order(paths: Sequence[Path], service: FleetService, attempts: _Attempts) -> Iterator[str]:
    """The lines of the traces of all replicas in order of arrival, each request once, with their sessions. One that was
    sent again has the line of its last attempt, and arrives as its first one did."""
    again = {
        request_id: line
        for path in paths
        if service.sent_again
        for request_id, line in _numbered(path)
        if request_id in service.first_arrivals_s
    }
    for request_id, line in merge(*map(_numbered, paths), key=lambda one: one[0]):
        if request_id in again:
            continue
        last = attempts.last[attempts.index_of(request_id)]
        if last != request_id:
            row = decode(again[last])
            line = encode(row | {"arrival_s": service.first_arrivals_s[last]}).decode() + "\n"
        session = service.session_of(last)
        yield line if session == NO_SESSION else f'{line.rstrip()[:-1]},"session_id":{session}}}\n'


def _numbered(path: Path) -> Iterator[tuple[int, str]]:
    with open_to_read(path) as file:
        for line in file:
            yield int(line.partition(b":")[2].partition(b",")[0]), line.decode()
