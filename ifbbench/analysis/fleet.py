"""What the router of a fleet did: which replicas were hot, and which prefixes were computed again for balance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ifbbench.analysis.fleet_changes import FleetChanges, at_router_s
from ifbbench.analysis.number_texts import count, percent, significant
from ifbbench.fleet.prefix_index import PrefixIndex, prompt_pieces
from ifbbench.rundir.checking import read_object
from ifbbench.rundir.fleet import replica_directories
from ifbbench.rundir.reader import RunData
from ifbbench.rundir.run_directory import RUN
from ifbbench.settings.config import RunConfig
from ifbbench.workload.load import read_source
from ifbbench.workload.trace import TraceRequest

# A replica is hot if its requests waited so many times the mean of all replicas, where waiting takes such a share.
HOT, LEAST_SHARE_OF_E2E = 1.5, 0.01
HOT_NAMED = 3


@dataclass(frozen=True)
class ReplicaWaiting:
    """How long requests waited in the queue of a replica, and its share of all requests.

    is_hot: see HOT.
    """

    replica: int
    share_of_requests: float
    share_of_waiting: float
    waited_s: float
    ttft_p99_s: float | None
    is_hot: bool


@dataclass(frozen=True)
class Hits:
    """Prompt tokens that replicas were expected to hold: of those chosen, and of the best ones.

    lost_requests: those that went to another replica than one with the longest prefix.
    less_load: how many more prompt tokens waited for an answer at the best replica than at the chosen one, on average;
        None where the router did not look.
    lost_tokens: tokens of these requests' prompts beyond what the chosen replica was expected to hold.
    """

    prompt_tokens: int
    chosen_tokens: int
    best_tokens: int
    lost_requests: int
    less_load: float | None

    @property
    def lost_tokens(self) -> int:
        return self.best_tokens - self.chosen_tokens

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"lost_tokens": self.lost_tokens}


class FleetFindings:
    """Findings of a fleet's run directory."""

    def __init__(self, run: RunData) -> None:
        self.run = run
        self.router = str(run.config.get("router"))

    @cached_property
    def waiting(self) -> list[ReplicaWaiting]:
        """The waiting of each replica."""
        done = self.run.completed
        # A replica is not to blame for the time before a request was sent to it.
        queue_s = done["queue_time_s"].to_numpy(dtype=float) - at_router_s(done)
        # No line has a replica where none has answered a request.
        replicas = done["replica"].to_numpy(dtype=int) if len(done) else np.empty(0, int)
        ttft_s = done["ttft_s"].to_numpy(dtype=float)
        found, total_s = [], float(queue_s.sum()) or 1.0
        matters = self.num_replicas > 1 and total_s >= LEAST_SHARE_OF_E2E * float(done["e2e_s"].sum())
        for number in range(self.num_replicas):
            is_mine = replicas == number
            waited_s = float(queue_s[is_mine].sum())
            slow_s = float(np.percentile(ttft_s[is_mine], 99)) if is_mine.any() else None
            share = float(is_mine.sum()) / max(len(done), 1)
            is_hot = matters and waited_s * self.num_replicas >= HOT * total_s
            found.append(ReplicaWaiting(number, share, waited_s / total_s, waited_s, slow_s, is_hot))
        return found

    @property
    def num_replicas(self) -> int:
        return len(self.replicas) or int(self.run.config.get("replicas") or 1)

    @cached_property
    def replicas(self) -> list[dict[str, Any]]:
        """The figures of each replica; empty of a run that was killed."""
        return ((self.run.summary or {}).get("fleet") or {}).get("replicas") or []

    @cached_property
    def changes(self) -> FleetChanges | None:
        """What replicas that started and ended did; None of a fleet that stayed as it was."""
        events = ((self.run.summary or {}).get("fleet") or {}).get("events")
        return FleetChanges(self.run, events, self.replicas) if events else None

    @cached_property
    def hot(self) -> list[ReplicaWaiting]:
        """The hot replicas, those with most waiting first."""
        return sorted((one for one in self.waiting if one.is_hot), key=lambda one: -one.waited_s)

    @cached_property
    def hits(self) -> Hits | None:
        """None if no prompts share prefixes, the trace does not say which, or no request has been sent."""
        if "replica" not in self.run.requests:
            return None
        requests = self.run.requests[self.run.requests["replica"].notna()]
        requests = requests.assign(sent_s=requests["arrival_s"] + at_router_s(requests))
        requests = requests.sort_values(["sent_s", "index"], kind="stable")
        trace = read_source(self.run.path, RunConfig()).requests
        indices, replicas = requests["index"].tolist(), requests["replica"].astype(int).tolist()
        expected = expected_hits([trace[index] for index in indices], replicas, self._capacities)
        if self.changes is not None:
            expected *= self.changes.takes_requests(requests["sent_s"].to_numpy(dtype=float))
        if not expected.any():
            return None
        chosen = expected[np.arange(len(replicas)), replicas]
        best = expected.max(axis=1)
        is_lost = best > chosen
        loads: float | None = None
        if "offers" in requests and is_lost.any():
            loads = _less_load(requests["offers"].tolist(), replicas, expected, is_lost)
        prompt_tokens = int(requests["prompt_len"].sum())
        return Hits(prompt_tokens, int(chosen.sum()), int(best.sum()), int(is_lost.sum()), loads)

    @cached_property
    def _capacities(self) -> list[int]:
        """The tokens of each replica's KV cache."""
        found = []
        for path in replica_directories(self.run.path):
            config = read_object(path / RUN).get("config") or {}
            found.append(int(config.get("max_tokens_in_paged_kvcache") or 2**62))
        return found

    def sentences(self) -> list[str]:
        """The findings in words."""
        total_s = sum(one.waited_s for one in self.waiting)
        found = []
        if self.hot:
            names = ", ".join(
                f"replica {one.replica} with {percent(one.share_of_waiting)} of the waiting and "
                f"{percent(one.share_of_requests)} of the requests"
                for one in self.hot[:HOT_NAMED]
            )
            found.append(f"Requests waited {significant(total_s)} request-seconds in queues. Hot: {names}.")
        else:
            slow = [one.ttft_p99_s for one in self.waiting if one.ttft_p99_s is not None]
            between = f"; the p99 of TTFT is {significant(min(slow))} to {significant(max(slow))} s" if slow else ""
            found.append(
                f"Requests waited {significant(total_s)} request-seconds in queues, and no replica was hot{between}."
            )
        if (hits := self.hits) is not None:
            share = percent(hits.lost_tokens / max(hits.prompt_tokens, 1))
            text = (
                f"{percent(hits.chosen_tokens / max(hits.prompt_tokens, 1))} of the prompt tokens were expected at the "
                f"replica that the router chose. {count(hits.lost_requests)} requests went to another one than that "
                f"with the longest prefix, which lost {count(hits.lost_tokens)} tokens ({share} of the prompts) to "
                "balance"
            )
            if hits.less_load is not None:
                more = "fewer" if hits.less_load >= 0 else "more"
                text += f"; it had {significant(abs(hits.less_load))} prompt tokens {more} before it on average"
            found.append(f"{text}.")
        if self.changes is not None:
            found += self.changes.sentences()
        worst = max(self.waiting, key=lambda one: one.waited_s)
        command = f"`ifbbench why {self.run.path}/replica={worst.replica}`"
        found.append(f"{command} says what bound the replica whose requests waited longest.")
        return found

    def as_dict(self) -> dict[str, Any]:
        """The findings for `why --json`."""
        return {
            "run": str(self.run.path),
            "router": self.router,
            "replicas": list(map(vars, self.waiting)),
            "hits": None if self.hits is None else self.hits.as_dict(),
            "changes": None if self.changes is None else self.changes.as_dict(),
            "text": " ".join(self.sentences()),
        }


def expected_hits(
    requests: Sequence[TraceRequest], replicas: Sequence[int], capacities: Sequence[int]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The prompt tokens that each replica was expected to hold of each request, [requests][replicas].

    requests: the requests in the order in which they were routed.
    replicas: the replica of each request.
    capacities: number of tokens that each replica holds.
    """
    indices = [PrefixIndex(capacity) for capacity in capacities]
    beginnings: dict[object, int] = {}
    found = np.zeros((len(requests), len(capacities)), np.int64)
    for row, (request, replica) in enumerate(zip(requests, replicas, strict=True)):
        pieces = prompt_pieces(request, beginnings)
        if len(pieces) > 1 or request.prefix_ids or request.prompt_tokens is not None:
            found[row] = [one.expected_hit(pieces) for one in indices]
        indices[replica].add(pieces)
    return found


def _less_load(
    offers: Sequence[Mapping[str, Sequence[float]] | None],
    replicas: Sequence[int],
    expected: np.ndarray[Any, np.dtype[np.int64]],
    is_lost: np.ndarray[Any, np.dtype[np.bool_]],
) -> float | None:
    """How many prompt tokens fewer the chosen replicas had than the best ones, of the requests that lost hits."""
    differences = []
    for row in np.flatnonzero(is_lost).tolist():
        tokens = (offers[row] or {}).get("tokens")
        best = int(expected[row].argmax())
        if tokens is not None and None not in (tokens[best], tokens[replicas[row]]):
            differences.append(tokens[best] - tokens[replicas[row]])
    return float(np.mean(differences)) if differences else None


@dataclass(frozen=True)
class Parting:
    """The first request that two routers sent to different replicas, a and b, and how many they did so in all.

    offers: what the routers of a and of b saw of these two replicas, by name; None where one looked at nothing."""

    request_id: str
    arrival_s: float
    replicas: tuple[int, int]
    different: int
    total: int
    offers: tuple[dict[str, list[float]] | None, dict[str, list[float]] | None]

    def sentence(self, names: tuple[str, str]) -> str:
        """names: names of the runs."""
        text = (
            f"Routing first differs at request {self.request_id}, which arrives at {significant(self.arrival_s)} s: "
            f"replica {self.replicas[0]} in {names[0]}, {self.replicas[1]} in {names[1]}. {count(self.different)} of "
            f"{count(self.total)} requests went to different replicas."
        )
        for name, offer in zip(names, self.offers, strict=True):
            if offer is not None:
                seen = ", ".join(
                    f"{what.replace('_', ' ')} {significant(first)} and {significant(second)}"
                    for what, (first, second) in offer.items()
                )
                text += f" The router of {name} saw of the two: {seen}."
        return text

    def as_dict(self) -> dict[str, Any]:
        return vars(self)


def first_parting(a: RunData, b: RunData) -> Parting | None:
    """Where the routing of two fleets first differs; None if it does not, or they have other requests."""
    tables = [
        run.requests[run.requests["replica"].notna()].sort_values(["arrival_s", "index"], kind="stable")
        for run in (a, b)
    ]
    tables = [table.set_index("index") for table in tables]
    shared = tables[0].index.intersection(tables[1].index, sort=False)
    first, second = (table.loc[shared] for table in tables)
    is_different = (first["replica"].to_numpy() != second["replica"].to_numpy()).nonzero()[0]
    if not len(is_different):
        return None
    rows = [table.iloc[int(is_different[0])] for table in (first, second)]
    replicas = int(rows[0]["replica"]), int(rows[1]["replica"])
    offers = [_of_two(row.get("offers"), replicas) for row in rows]
    return Parting(
        str(rows[0]["request_id"]),
        float(rows[0]["arrival_s"]),
        replicas,
        len(is_different),
        len(shared),
        (offers[0], offers[1]),
    )


def _of_two(offers: Any, replicas: tuple[int, int]) -> dict[str, list[float]] | None:
    if not isinstance(offers, Mapping) or max(replicas) >= min(map(len, offers.values())):
        return None
    return {name: [values[replica] for replica in replicas] for name, values in offers.items()}
