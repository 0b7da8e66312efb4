"""A fleet whose router looks at replicas: their loops are stepped on one clock, from one arrival to the next."""

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from ifbbench.build.engine import Engine
from ifbbench.clock import NANOSECONDS
from ifbbench.engine.interfaces import NO_LIMIT, EngineLost
from ifbbench.engine.request import EarlierAttempts, Request, computed_tokens
from ifbbench.engine.responses import Response
from ifbbench.engine.stepped_loop import SteppedLoop
from ifbbench.errors import RunFailed
from ifbbench.fleet.front import Front, is_to_be_read, offers, read_at_ns
from ifbbench.fleet.prefix_index import Pieces, PrefixIndex, prompt_pieces
from ifbbench.fleet.router import Replica, ReplicaState, RoutedRequest, Router
from ifbbench.progress import Progress
from ifbbench.replay.client import ReplayClient, make_client
from ifbbench.replay.first_tokens import FirstTokens
from ifbbench.replay.fleet_changes import Changes
from ifbbench.replay.routed import Routed, RoutedClient, RoutedServedClient, append, share_of
from ifbbench.replay.single import client_of, loop_of, next_event_s, wait
from ifbbench.rundir.recorder import SummaryRecorder
from ifbbench.settings.config import RunConfig
from ifbbench.virtual_clock import VirtualClock, tick, to_seconds
from ifbbench.workload.load import session_numbers
from ifbbench.workload.trace import ID, SECONDS, RequestColumns, Trace, TraceRequest, columns_of

MakeRecorder = Callable[[int, Trace, Engine, ReplayClient], SummaryRecorder]
"""Makes the recorder of the replica of this number, from the trace of its requests, which grows."""

SHOWN_EVERY = 256


class SteppedReplica:
    """A replica in steps.

    shows_state: whether its state is read (`state_at`).
    clients: the classes of its client, without and with a serving process.
    members: for each of its requests, the index in the whole trace.
    """

    def __init__(
        self,
        number: int,
        engine: Engine,
        trace: Trace,
        make_recorder: MakeRecorder,
        sees_first_tokens: bool = False,
        *,
        shows_state: bool = False,
        clients: tuple[type[RoutedClient], type[RoutedServedClient]] = (RoutedClient, RoutedServedClient),
    ) -> None:
        self.engine = engine
        self.trace = replace(trace, requests=share_of(columns_of(trace.requests)))
        client = client_of(self.trace, engine, *clients)
        assert isinstance(client, Routed)
        self.client: Routed = client
        self._columns = columns_of(self.trace.requests)
        client.prepare(self._columns)
        self.recorder = make_recorder(number, self.trace, engine, client)
        self._first_tokens = FirstTokens(self.recorder) if sees_first_tokens else None
        observer = self._first_tokens or self.recorder
        loop = loop_of(engine, client, observer, is_open_loop=False, loop_class=SteppedLoop)
        assert isinstance(loop, SteppedLoop)
        loop.sees_first_tokens |= sees_first_tokens
        self.loop = loop
        loop.may_be_interrupted = shows_state
        self.clock = engine.clock
        self.members = array("q")
        self.view = Replica(number, PrefixIndex(engine.config.max_tokens_in_paged_kvcache or 2**62))
        # Until then nothing comes to it, where it runs by itself (`run_until`).
        self._runs_until_s = inf
        self._idle_at: tuple[int, int] | None = None
        self.failed_s = inf
        # The times to first tokens, and the prompt tokens that a request without one is expected to compute.
        self._ttfts, self.prefills = list[float](), dict[int, int]()
        self.latest_answer_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether it has requests that it will answer."""
        return self.client.answered < len(self.members) and not self.has_failed

    @property
    def has_failed(self) -> bool:
        return self.failed_s < inf

    @property
    def next_time_s(self) -> float:
        """Before this time it answers nothing, unless a request is offered."""
        if not self.loop.is_idle:
            return self.clock.now()
        event_s = next_event_s(self.engine, self.client, self.loop.seen_s)
        return inf if event_s is None else max(event_s, self.clock.now())

    def offer(
        self, columns: RequestColumns, index: int, arrival_s: float, earlier: EarlierAttempts | None = None
    ) -> None:
        """The request at `index` of the whole trace was sent to it. earlier: see Request."""
        if self.engine.tiers is not None and self.loop.is_idle:  # a shared store must not be asked at an earlier time
            self.clock.wait_until(arrival_s)
        self.loop.shorten(tick(arrival_s))
        append(self._columns, columns, index, arrival_s)
        self.members.append(index)
        self.client.offer(arrival_s, earlier)
        if self.loop.waits_for_transfers:
            self.loop.wake()

    def run_until(self, time_s: float) -> None:
        """Run everything before `time_s`: iterations that start before it, and of those the ends before it. All
        requests that arrive before it must have been offered. Iterations may be held that start later, as most of what
        comes to a fleet goes to another replica: what comes to this one undoes them."""
        clock = self.clock
        if self.has_failed:
            return
        self._runs_until_s = time_s
        if self.engine.tiers is None:
            self.loop.may_be_interrupted = True
        else:  # a queue looks into stores in each iteration, which is not undone
            self.client.horizon_s = time_s
        while self.advance() and clock.now() < time_s:
            pass

    @property
    def waits_until_s(self) -> float:
        """A replica that does nothing waits for requests that arrive before this time."""
        return min(self.client.horizon_s, self._runs_until_s)

    def advance(self) -> bool:
        """Run one step, or what is left of the latest; False if nothing is to be done before `waits_until_s`."""
        loop, client = self.loop, self.client
        if loop.is_held:
            loop.take_in()
            return True
        # A store that replicas share must not be asked at a time that is past for others.
        is_late = self.engine.tiers is not None and loop.is_idle and self.next_time_s > self.clock.now()
        if not is_late and loop.step():
            self._idle_at = None
            return True
        event_s = next_event_s(self.engine, client, loop.seen_s)
        counts = client.handed_out, client.answered
        if event_s is None or event_s >= self.waits_until_s:
            return False
        if not wait(self.engine, client):
            if counts == self._idle_at:
                raise RunFailed("no progress: no request of a replica is active, and its engine fetches none.")
            self._idle_at = counts
        elif self.engine.tiers is not None:  # what others have begun since may arrive earlier than was known
            self.loop.wake()
        return True

    def fail(self, time_s: float, error_of: Callable[[int], str | None]) -> list[tuple[int, int]]:
        """It is lost at `time_s`: returns its requests that are not answered, by their index in the whole trace, each
        with the tokens that had been computed for it. Answers that have left the engine still arrive.

        error_of(index): why the request has failed; None if it is sent again."""
        self.lose(time_s)
        return self.leave_open(error_of)

    def lose(self, time_s: float) -> None:
        """Its engine is lost at `time_s`, which its requests do not know yet."""
        self.loop.shorten(tick(time_s))
        self.loop.lose_engine(time_s)
        if self.engine.tiers is not None:
            self.engine.tiers.lose(time_s)
        if self.engine.makes_tokens:
            self.engine.executor.close()  # ends its process
        self.failed_s = time_s

    def leave_open(self, error_of: Callable[[int], str | None]) -> list[tuple[int, int]]:
        """Its requests that are not answered leave; see `fail`."""
        lost = list[tuple[int, int]]()
        for own in self.client.open:
            index = self.members[own]
            request = self.loop.scheduler.find(self._columns.request_id[own]) or self.client.not_fetched(own)
            tokens = computed_tokens(request)
            self.recorder.left(request, error_of(index))
            lost.append((index, tokens))
        return lost

    def take_first_tokens(self, before_s: float) -> None:
        """Take in the first tokens that came before `before_s`."""
        times = deque[tuple[float, int]]() if self._first_tokens is None else self._first_tokens.times
        while times and times[0][0] < before_s:
            at_s, own = times.popleft()
            self.view.prefill_tokens -= self.prefills.pop(own, 0)
            earlier = self.client.earlier.get(own)
            self._ttfts.append(at_s - (self._columns.arrival_s[own] if earlier is None else earlier.arrival_s))

    def ttfts(self, before_s: float) -> list[float]:
        """The times to the first tokens that came before `before_s`, and were not returned before."""
        self.take_first_tokens(before_s)
        found, self._ttfts = self._ttfts, []
        return found

    def state_at(self, time_s: float) -> ReplicaState:
        """What it reports at `time_s`, up to which it has run."""
        return self.state_before(tick(time_s))

    def state_before(self, time_ns: int) -> ReplicaState:
        """What it reports while the last iteration runs that starts before `time_ns`."""
        scheduler, used = self.loop.scheduler, self.loop.used_blocks_at(time_ns)
        # The clock is later than what the client knows: it must not be asked.
        queued = len(scheduler.waiting) + len(self.members) - self.client.handed_out
        max_blocks = scheduler.cache_state().max_blocks
        return ReplicaState(queued, len(scheduler.table.requests), used / max_blocks if max_blocks else 0.0)


class SteppedFleet:
    """A router, its replicas, and the client in front of them, which has the whole trace.

    A router sees what happened before the request arrives, not what happens at the same time.

    replica_of: for each request of the trace, the number of its latest replica, -1 before it is routed.
    lost: requests that no replica took: when they arrived, and why.
    offers: what the router looked at, for each request that was routed as many values as there were replicas, from its
        `position` on; -1 of those that took no requests.
    """

    def __init__(
        self,
        trace: Trace,
        config: RunConfig,
        router: Router,
        replicas: list[SteppedReplica],
        changes: Changes,
        progress: Progress,
    ) -> None:
        self._columns, self._progress = columns_of(trace.requests), progress
        self._front = Front(router)
        self.replicas = replicas
        self._clock = VirtualClock()
        # Only when requests arrive matters of this client.
        self.front = make_client(config, trace, self._clock, arriving)
        self._age_ns, self._read_ns = round(config.router_state_age * NANOSECONDS), -1
        self._sessions = session_numbers(self._columns)
        self._beginnings: dict[object, int] = {}
        self.replica_of, self._position = array("i", [-1]) * len(trace), array("q", [-1]) * len(trace)
        self._offers: dict[str, array[Any]] = {
            name: array(SECONDS if name == "kv_use" else ID) for name in self._front.names
        }
        # How many replicas there were when each request was routed.
        self._width = array("i", [0]) * len(trace)
        # What routers see of the replicas that take requests; requests while there is none, and attempts so far.
        self.views = [one.view for one in replicas]
        self.waiting: list[int] = []
        self._earlier: dict[int, EarlierAttempts] = {}
        self.lost: dict[int, tuple[float, str]] = {}
        self._retries, self._shares_store = config.request_retries, config.kv_remote_bytes > 0
        # The process of a replica that computes may end at any time.
        self._computes = any(one.engine.makes_tokens for one in replicas)
        self.changes = changes
        changes.begin(self)

    def run(self) -> None:
        """Run until each request is answered."""
        front, total, shown = self.front, len(self._columns), 0
        while not front.done:
            event_s, change_s = front.next_event_s, self.changes.next_s
            if not self._advance_until(min(inf if event_s is None else event_s, change_s)):
                continue
            if front.done:
                break
            if event_s is None and not any(one.is_busy or one.client.answers for one in self.replicas):
                self._lose_waiting()
            elif change_s < inf and (event_s is None or change_s <= event_s):
                self._clock.wait_until(change_s)
                self.changes.apply(change_s)
                continue
            if event_s is None:
                continue
            self._clock.wait_until(event_s)
            for request in front.get_requests(NO_LIMIT):
                arrival_s, held_until_s = front.arrival_s(request), front.held_until_s(request)
                self._route(request, max(arrival_s, held_until_s), is_later=held_until_s > arrival_s)
            if self._front.routed >= shown + SHOWN_EVERY:
                shown = self._front.routed
                self._progress.update(front.answered, total, f"{len(self.replicas)} replicas")
        for one in self.replicas:
            one.client.horizon_s = inf
            # Iterations may be in flight of no outstanding request.
            while not one.has_failed and (one.loop.is_held or one.loop.step()):
                one.loop.take_in()

    def offers_of(self, index: int) -> Mapping[str, Sequence[float | None]] | None:
        """What the router saw of each replica when the request at `index` was sent, None of those that took no
        requests; None if it looks at nothing."""
        first, count = self._position[index], self._width[index]
        if not self._offers or first < 0:
            return None
        return offers({name: values[first : first + count].tolist() for name, values in self._offers.items()})

    def fail(self, one: SteppedReplica, time_s: float) -> dict[str, int]:
        """The replica is lost: its requests are sent to others, or have failed if that was done too often. Returns how
        many were, and the tokens that were computed for nothing."""
        attempts = self._earlier

        def error_of(index: int) -> str | None:
            retries = attempts[index].retries if index in attempts else 0
            if retries < self._retries:
                return None
            return f"replica {one.view.number} failed at {time_s:g} s" + (f", after {retries} retries" * bool(retries))

        lost = one.fail(time_s, error_of)
        again = [index for index, _ in lost if error_of(index) is None]
        errors = {index: error for index, _ in lost if (error := error_of(index)) is not None}
        for index, tokens in lost:
            before = attempts.get(index, EarlierAttempts(0, self._arrival_s(index), 0))
            attempts[index] = EarlierAttempts(before.retries + 1, before.arrival_s, before.lost_tokens + tokens)
        for index, error in errors.items():
            self.front.send_response(final_response(index, error))
        for index in again:
            self.replica_of[index] = -1
            self._route(arriving(index), time_s, is_later=True)
        return {"retried": len(again), "lost": len(errors), "lost_tokens": sum(tokens for _, tokens in lost)}

    def route_waiting(self, time_s: float) -> None:
        """A replica takes requests: send those that waited for one."""
        waiting, self.waiting = self.waiting, []
        for index in waiting:
            self._route(arriving(index), time_s, is_later=True)

    def _lose_waiting(self) -> None:
        """No replica is busy, and no request arrives: what waits for a replica has failed if none will start."""
        if not self.waiting:
            raise RunFailed("no progress: no replica is busy, and no request arrives.")
        if self.changes.may_start:
            self._clock.wait_until(self.changes.next_s)
            self.changes.apply(self.changes.next_s)
            return
        waiting, self.waiting = self.waiting, []
        for index in waiting:
            self.lost[index] = self._arrival_s(index), "no replica takes requests"
            self.front.send_response(final_response(index, self.lost[index][1]))

    def _arrival_s(self, index: int) -> float:
        """When the request arrived first."""
        return self.front.arrival_s(arriving(index))

    def _advance_until(self, time_s: float) -> bool:
        """Run all replicas until `time_s`, a time of the front's client; False if an earlier request has appeared."""
        if self._front.sees_state and time_s < inf and not self._read_states(time_s):
            return False
        return self._run_all(time_s)

    def _run_all(self, time_s: float) -> bool:
        if not self.front.is_open_loop or self._shares_store or self._computes:
            return self._run_in_turn(time_s)
        for one in self.replicas:
            if one.clock.now() < time_s:
                one.run_until(time_s)
            if one.client.answers:
                self._take_answers(one, time_s)
        return True

    def _read_states(self, time_s: float) -> bool:
        """Read the state of the replicas as late as a multiple of the age allows; False as `_advance_until`."""
        read_ns = read_at_ns(time_s, self._age_ns)
        if read_ns == self._read_ns:
            return True
        if not self._run_all(read_ns / NANOSECONDS):
            return False
        self._take_states(read_ns)
        return True

    def _take_states(self, read_ns: int) -> None:
        """Read the states of the replicas, which have run until then."""
        self._read_ns = read_ns
        for one in self.replicas:
            one.view.state = one.state_at(read_ns / NANOSECONDS)

    def _read_before(self, next_s: float) -> bool:
        """Read the states if they are to be read before `next_s`; whether they were."""
        sees_answers = self._front.sees_state and not self.front.is_open_loop
        if not sees_answers or not is_to_be_read(next_s, self._age_ns, self._read_ns):
            return False
        self._take_states(read_at_ns(next_s, self._age_ns))
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
        one.latest_answer_s = answered_s
        self._clock.wait_until(answered_s)
        self.front.send_response(final_response(index))

    def _run_in_turn(self, time_s: float) -> bool:
        """Where answers let requests arrive, replicas share a store, or they compute: no replica runs an iteration that
        starts later than another one may answer, write or fail. False if one has let a request arrive, or failed."""
        event_s = self.front.next_event_s
        while True:
            answered = [(one.client.answers[0][0], at) for at, one in enumerate(self.replicas) if one.client.answers]
            answered_s, first = min(answered, default=(inf, -1))
            times = sorted((one.next_time_s, at) for at, one in enumerate(self.replicas) if one.is_busy)
            next_s, chosen = times[0] if times else (inf, -1)
            if self._read_before(min(answered_s, next_s)):
                continue
            if answered_s < time_s and answered_s <= next_s:
                self._take_answer(self.replicas[first])
                if self.front.next_event_s != event_s:
                    return False
                continue
            if next_s >= time_s:
                return True
            one = self.replicas[chosen]
            others_s = times[1][0] if len(times) > 1 else inf
            if one.engine.tiers is not None:
                # Iterations that are interrupted must not look into a store again: a queue looks there in each one.
                one.engine.tiers.others_s = to_seconds(tick(next_s) + 1) if one.loop.may_be_interrupted else others_s
            one.client.answers_let_in = not self.front.is_open_loop
            # A step asks and writes a store only when it begins, and at its end, which is held.
            one.client.horizon_s = time_s if self.front.is_open_loop else min(time_s, others_s, answered_s)
            try:
                if not one.advance():  # a request of its own comes when another one may answer
                    own_s = one.client.answers[0][0] if one.client.answers else inf
                    one.client.horizon_s = min(time_s, answered_s, own_s)
                    one.advance()
            except EngineLost as error:
                self.changes.fail(chosen, one.clock.now(), str(error))
                return False

    def _route(self, request: Request, arrival_s: float, is_later: bool = False) -> None:
        """Send a request to a replica at `arrival_s`. is_later: it had arrived before."""
        index, columns = request.index, self._columns
        if not self.views:
            self.waiting.append(index)
            return
        pieces: Pieces = ()
        if self._front.sees_prefixes:
            pieces = prompt_pieces(columns[index], self._beginnings)
        prompt_len = columns.prompt_len[index]
        routed = RoutedRequest(
            self._front.routed, columns.request_id[index], arrival_s, prompt_len, int(self._sessions[index]), pieces
        )
        if self._front.sees_prefills:
            for one in self.replicas:
                one.take_first_tokens(arrival_s)
        count = len(self.replicas)
        sent = self._front.route(routed, self.views, count)
        if self._offers:
            self._position[index], self._width[index] = len(next(iter(self._offers.values()))), count
            for name, values in sent.seen.items():
                self._offers[name].extend(values)
        one = self.replicas[sent.replica.number]
        self.replica_of[index] = sent.replica.number
        if self._front.sees_prefills:
            one.prefills[len(one.members)] = sent.prefill_tokens
        earlier = self._earlier.get(index)
        if is_later and earlier is None:
            earlier = EarlierAttempts(0, self._arrival_s(index), 0)
        one.offer(columns, index, arrival_s, earlier)


def arriving(index: int, row: TraceRequest | None = None) -> Request:
    """A request of which only the arrival matters."""
    return Request(index, 1, 1, index=index)


def final_response(index: int, error: str | None = None) -> Response:
    """The answer to it."""
    return Response(arriving(index), is_final=True, error=error)
