"""A fleet whose router looks at replicas: their loops are stepped on one clock, from one arrival to the next."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from ifbbench.build.engine import Engine
from ifbbench.clock import NANOSECONDS, Progress, VirtualClock
from ifbbench.engine.interfaces import NO_LIMIT
from ifbbench.engine.request import Request
from ifbbench.engine.responses import Response
from ifbbench.errors import RunFailed
from ifbbench.fleet.prefix_index import Pieces, PrefixIndex, prompt_pieces
from ifbbench.fleet.router import PREFIXES, REQUESTS, STATE, Replica, ReplicaState, RoutedRequest, Router
from ifbbench.replay.client import ReplayClient, make_client
from ifbbench.replay.routed import Routed, RoutedClient, RoutedServedClient, append, share_of
from ifbbench.replay.single import client_of, loop_of
from ifbbench.rundir.recorder import SummaryRecorder
from ifbbench.settings.config import RunConfig
from ifbbench.workload.load import session_numbers
from ifbbench.workload.trace import ID, SECONDS, RequestColumns, Trace, TraceRequest, columns_of

MakeRecorder = Callable[[int, Trace, Engine, ReplayClient], SummaryRecorder]
"""Makes the recorder of the replica of this number, from the trace of its requests, which grows."""

SHOWN_EVERY = 256


class SteppedReplica:
    """A replica in steps. members: the index in the whole trace of each of its requests.

    clients: the classes of its client, without and with a serving process. more: arguments of its loop."""

    def __init__(
        self,
        number: int,
        engine: Engine,
        trace: Trace,
        make_recorder: MakeRecorder,
        clients: tuple[type[RoutedClient], type[RoutedServedClient]] = (RoutedClient, RoutedServedClient),
        **more: Any,
    ) -> None:
        self.engine = engine
        self.trace = replace(trace, requests=share_of(columns_of(trace.requests)))
        client = client_of(self.trace, engine, *clients)
        assert isinstance(client, Routed)
        self.client: Routed = client
        self._columns = columns_of(self.trace.requests)
        client.prepare(self._columns)
        self.recorder = make_recorder(number, self.trace, engine, client)
        self.loop = loop_of(engine, client, self.recorder, is_open_loop=False, holds_ends=True, **more)
        self.clock = engine.clock
        self.members = array("q")
        self.view = Replica(number, PrefixIndex(engine.config.max_tokens_in_paged_kvcache or 2**62))
        self._idle_at: tuple[int, int] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether it has requests that are not answered."""
        return self.client.answered < len(self.members)

    @property
    def next_time_s(self) -> float:
        """Before this time it answers nothing, unless a request is offered."""
        if not self.loop.is_idle:
            return self.clock.now()
        event_s = self.client.next_event_s
        return inf if event_s is None else max(event_s, self.clock.now())

    def offer(self, columns: RequestColumns, index: int, arrival_s: float) -> None:
        """The request at `index` of the whole trace was sent to it."""
        append(self._columns, columns, index, arrival_s)
        self.members.append(index)
        self.client.offer(arrival_s)

    def run_until(self, time_s: float) -> None:
        """Run everything before `time_s`: iterations that start before it, and of those the ends before it. All
        requests that arrive before it must have been offered."""
        clock = self.clock
        self.client.horizon_s = time_s
        while self.advance() and clock.now() < time_s:
            pass

    def advance(self) -> bool:
        """Run one step, or what is left of the latest; False if nothing is to be done before `horizon_s`."""
        loop, client = self.loop, self.client
        if loop.is_held:
            loop.take_in()
            return True
        if loop.step():
            self._idle_at = None
            return True
        event_s, counts = client.next_event_s, (client.handed_out, client.answered)
        if event_s is None or event_s >= client.horizon_s:
            return False
        if not client.wait():
            if counts == self._idle_at:
                raise RunFailed("no progress: no request of a replica is active, and its engine fetches none.")
            self._idle_at = counts
        return True

    def state(self) -> ReplicaState:
        """What it reports now."""
        scheduler = self.loop.scheduler
        # The clock is later than what the client knows: it must not be asked.
        cache, queued = scheduler.cache_state(), len(scheduler.waiting) + len(self.members) - self.client.handed_out
        kv_use = (cache.used_blocks or 0) / cache.max_blocks if cache.max_blocks else 0.0
        return ReplicaState(queued, len(scheduler.table.requests), kv_use)


class SteppedFleet:
    """A router, its replicas, and the client in front of them, which has the whole trace.

    A router sees what happened before the request arrives, not what happens at the same time.

    replica_of: of each request of the trace, the number of its replica, -1 before it is routed. offers: what the router
    looked at, each [requests routed × replicas], and `position` of a request among those routed."""

    def __init__(
        self,
        trace: Trace,
        config: RunConfig,
        router: Router,
        replicas: Sequence[SteppedReplica],
        progress: Progress,
    ) -> None:
        self._columns, self._router, self.replicas, self._progress = (
            columns_of(trace.requests),
            router,
            replicas,
            progress,
        )
        self._clock = VirtualClock()
        # Only when requests arrive matters of this client.
        self.front = make_client(config, trace, self._clock, arriving)
        self._age_ns, self._read_ns = round(config.router_state_age * NANOSECONDS), -1
        looks_at = router.looks_at
        self._has_state, self._has_prefixes = STATE in looks_at, PREFIXES in looks_at
        self._has_requests = REQUESTS in looks_at
        self._sessions = session_numbers(self._columns)
        self._beginnings: dict[object, int] = {}
        self.replica_of, self._position = array("i", [-1]) * len(trace), array("i", [-1]) * len(trace)
        self._offers: dict[str, array[Any]] = {
            name: array(SECONDS if name == "kv_use" else ID) for name in self._looked_at()
        }
        self._routed, self._views = 0, [one.view for one in replicas]

    def run(self) -> None:
        """Run until each request is answered."""
        front, total, shown = self.front, len(self._columns), 0
        while not front.done:
            event_s = front.next_event_s
            if not self._advance_until(inf if event_s is None else event_s):
                continue
            if event_s is None:
                if not front.done:
                    raise RunFailed("no progress: no replica is busy, and no request arrives.")
                break
            self._clock.wait_until(event_s)
            for request in front.get_requests(NO_LIMIT):
                self._route(request, front.arrival_s(request))
            if self._routed >= shown + SHOWN_EVERY:
                shown = self._routed
                self._progress.update(front.answered, total, f"{len(self.replicas)} replicas")
        for one in self.replicas:
            one.client.horizon_s = inf
            while one.loop.is_held or one.loop.step():  # iterations in flight of no outstanding request
                one.loop.take_in()

    def offers_of(self, index: int) -> Mapping[str, Sequence[float]] | None:
        """What the router saw of each replica when the request at `index` arrived; None if it looks at nothing."""
        first, count = self._position[index] * len(self.replicas), len(self.replicas)
        if not self._offers or first < 0:
            return None
        return {name: values[first : first + count].tolist() for name, values in self._offers.items()}

    def _looked_at(self) -> list[str]:
        names = {"requests": self._has_requests, "tokens": self._has_requests, "hit_tokens": self._has_prefixes}
        names |= {"queued": self._has_state, "kv_use": self._has_state}
        return [name for name, is_there in names.items() if is_there]

    def _advance_until(self, time_s: float) -> bool:
        """Run all replicas until `time_s`, a time of the front's client; False if an earlier request has appeared."""
        if self._has_state and time_s < inf and not self._read_states(time_s):
            return False
        return self._run_all(time_s)

    def _run_all(self, time_s: float) -> bool:
        if not self.front.is_open_loop:
            return self._run_in_turn(time_s)
        for one in self.replicas:
            if one.clock.now() < time_s:
                one.run_until(time_s)
            if one.client.answers:
                self._take_answers(one, time_s)
        return True

    def _read_states(self, time_s: float) -> bool:
        """Read the state of the replicas as late as a multiple of the age allows; False as `_advance_until`."""
        time_ns = round(time_s * NANOSECONDS)
        read_ns = time_ns - time_ns % self._age_ns if self._age_ns else time_ns
        if read_ns == self._read_ns:
            return True
        if not self._run_all(read_ns / NANOSECONDS):
            return False
        self._read_ns = read_ns
        for one in self.replicas:
            one.view.state = one.state()
        return True

    def _take_answers(self, one: SteppedReplica, before_s: float) -> None:
        answers = one.client.answers
        while answers and answers[0][0] < before_s:
            self._take_answer(one)

    def _take_answer(self, one: SteppedReplica) -> None:
        answered_s, own = one.client.answers.popleft()
        index = one.members[own]
        one.view.requests -= 1
        one.view.tokens -= self._columns.prompt_len[index]
        self._clock.wait_until(answered_s)
        self.front.send_response(final_response(index))

    def _run_in_turn(self, time_s: float) -> bool:
        """Where answers let requests arrive: no replica runs an iteration that starts later than another one may
        answer. False if one has let a request arrive."""
        event_s = self.front.next_event_s
        while True:
            answered = [(one.client.answers[0][0], at) for at, one in enumerate(self.replicas) if one.client.answers]
            answered_s, first = min(answered, default=(inf, -1))
            times = sorted((one.next_time_s, at) for at, one in enumerate(self.replicas) if one.is_busy)
            next_s, chosen = times[0] if times else (inf, -1)
            if answered_s < time_s and answered_s <= next_s:
                self._take_answer(self.replicas[first])
                if self.front.next_event_s != event_s:
                    return False
                continue
            if next_s >= time_s:
                return True
            one = self.replicas[chosen]
            one.client.horizon_s = min(time_s, times[1][0] if len(times) > 1 else inf, answered_s)
            if not one.advance():  # a request of its own comes when another one may answer
                one.client.horizon_s = min(time_s, answered_s)
                one.advance()

    def _route(self, request: Request, arrival_s: float) -> None:
        index, columns = request.index, self._columns
        pieces: Pieces = ()
        if self._has_prefixes:
            pieces = prompt_pieces(columns[index], self._beginnings)
        prompt_len = columns.prompt_len[index]
        routed = RoutedRequest(
            self._routed, columns.request_id[index], arrival_s, prompt_len, int(self._sessions[index]), pieces
        )
        self._note(index, routed)
        chosen = self._router.choose(routed, self._views)
        one = self.replicas[chosen.number]
        self.replica_of[index] = chosen.number
        chosen.requests += 1
        chosen.tokens += prompt_len
        if pieces:
            chosen.prefixes.add(pieces)
        one.offer(columns, index, arrival_s)
        self._routed += 1

    def _note(self, index: int, routed: RoutedRequest) -> None:
        """Keep what the router sees."""
        offers, views = self._offers, self._views
        self._position[index] = self._routed
        if self._has_requests:
            offers["requests"].extend([one.requests for one in views])
            offers["tokens"].extend([one.tokens for one in views])
        if self._has_prefixes:
            offers["hit_tokens"].extend([one.expected_hit(routed) for one in views])
        if self._has_state:
            offers["queued"].extend([one.state.queued for one in views])
            offers["kv_use"].extend([one.state.kv_use for one in views])


def arriving(index: int, row: TraceRequest) -> Request:
    """A request of which only the arrival matters."""
    return Request(index, 1, 1, index=index)


def final_response(index: int) -> Response:
    """The answer to it."""
    return Response(Request(index, 1, 1, index=index), is_final=True)
