"""A fleet with prefill and decode apart, in steps: the loops of all replicas on one clock, and the transfers of keys
and values between them.

A router chooses both replicas of a request when it arrives. The prefill replica computes the prompt and one token, and
keeps the blocks; then the request goes to the decode replica, which takes blocks for the prompt as its engine's rules
say. The transfer begins then, and once it has arrived, the decode replica goes on, and the blocks of the prefill
replica are released.

Where blocks are reserved first (SGLang, and transfers by layer), the request goes to the decode replica when it
arrives, and to the prefill replica once the decode replica has blocks for it. The transfer ends after the prompt is
complete.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np

from ifbbench.build.engine import Engine
from ifbbench.clock import NANOSECONDS
from ifbbench.engine.arrays import IntArray
from ifbbench.engine.interfaces import NO_LIMIT, KvScheduler
from ifbbench.engine.plan import ContextChunk
from ifbbench.engine.request import EarlierAttempts, Request
from ifbbench.engine.sent_batches import SentChunk
from ifbbench.errors import RunFailed
from ifbbench.fleet.links import Links, MeasuredLinks, left_after_prefill
from ifbbench.fleet.prefix_index import Pieces, prompt_pieces
from ifbbench.fleet.router import PREFIXES, REQUESTS, STATE, Replica, RoutedRequest, Router
from ifbbench.progress import Progress
from ifbbench.replay.client import make_client
from ifbbench.replay.replica_processes import FirstToken, KvPart, move_kv, process_of
from ifbbench.replay.routed import RoutedClient, RoutedServedClient
from ifbbench.replay.served import ServedClient
from ifbbench.replay.stepped_fleet import SHOWN_EVERY, MakeRecorder, SteppedReplica, arriving, final_response
from ifbbench.rundir.disaggregated import Passage
from ifbbench.rundir.line_types import RequestLine
from ifbbench.rundir.lines import value_of
from ifbbench.settings.config import VLLM, RunConfig
from ifbbench.virtual_clock import VirtualClock, tick
from ifbbench.workload.load import session_numbers
from ifbbench.workload.trace import RequestColumns, Trace, columns_of


class KvMailbox:
    """The `KvTransfers` of a replica. Requests are named by their index in its trace.

    held: those that are complete, while their blocks are kept. completions: of these, when their prompts were complete,
    until the fleet takes them. reservations: those that have got blocks for what is sent to them, until the fleet takes
    them, and when. receiving: these requests, until that has come."""

    def __init__(self) -> None:
        self.held: dict[int, Request] = {}
        self.completions: list[tuple[float, Request]] = []
        self.reservations: list[tuple[float, Request]] = []
        self.receiving: dict[int, Request] = {}
        self._sent: list[Request] = []
        self._received: list[Request] = []

    @property
    def has_news(self) -> bool:
        """Whether the loop has something to take."""
        return bool(self._sent or self._received)

    def sent(self, index: int) -> None:
        """What the prefill replica kept is no longer needed."""
        self._sent.append(self.held.pop(index))

    def received(self, index: int) -> None:
        """What the decode replica waited for has come."""
        self._received.append(self.receiving.pop(index))

    def forget(self, index: int) -> None:
        """Nothing is sent to this request."""
        self.receiving.pop(index, None)

    # Called by the loop.

    def kept(self, request: Request, now_s: float) -> None:
        self.held[request.index] = request
        self.completions.append((now_s, request))

    def reserved(self, requests: Sequence[Request], now_s: float) -> None:
        for request in requests:
            self.receiving[request.index] = request
            self.reservations.append((now_s, request))

    def take_sent(self) -> Sequence[Request]:
        sent, self._sent = self._sent, []
        return sent

    def take_received(self) -> Sequence[Request]:
        received, self._received = self._received, []
        return received


class _Sending:
    """What the clients of a prefill replica have in common. to_send: indices of the requests that go on elsewhere."""

    to_send: set[int]

    def prepare(self, share: RequestColumns) -> None:
        self.to_send = set()
        super().prepare(share)  # type: ignore[misc]

    def get_requests(self: Any, max_requests: int) -> list[Request]:
        """See ReplayClient."""
        requests: list[Request] = super().get_requests(max_requests)  # type: ignore[misc]
        for request in requests:
            request.is_sent_on = request.index in self.to_send
        return requests


class _SendingClient(_Sending, RoutedClient):
    """The client of a prefill replica."""


class _SendingServedClient(_Sending, RoutedServedClient):
    """The client of a prefill replica, behind a serving process."""


class _AcceptedClient(_SendingServedClient):
    """The client of a prefill replica whose serving process accepts a request while that of the decode replica does, so
    that it is ready when the latter has blocks."""

    def _accept_one(self, received_s: float, prompt_len: int) -> float:
        return received_s


class _Receiving:
    """What the clients of a decode replica have in common. remote: indices of the requests whose prompts are computed
    elsewhere. taken_s: when the engine took each request. received_s: when keys and values of each came, which is when
    it arrives for the records of this replica."""

    remote: set[int]
    taken_s: dict[int, float]
    received_s: dict[int, float]

    def prepare(self, share: RequestColumns) -> None:
        self.remote, self.taken_s, self.received_s = set(), {}, {}
        super().prepare(share)  # type: ignore[misc]

    def get_requests(self: Any, max_requests: int) -> list[Request]:
        """See ReplayClient."""
        requests: list[Request] = super().get_requests(max_requests)  # type: ignore[misc]
        now_s = self._clock.now()
        for request in requests:
            self.taken_s[request.index] = now_s
            if request.index in self.remote:
                request.remote_len = request.prompt_len
        return requests

    def arrival_s(self, request: Request) -> float:
        """When the request arrived, or its keys and values did."""
        arrival_s: float = super().arrival_s(request)  # type: ignore[misc]
        return self.received_s.get(request.index, arrival_s)

    def held_until_s(self, request: Request) -> float:
        """See ReplayClient; the client of a replica holds nothing back."""
        return self.arrival_s(request)


class _ReceivingClient(_Receiving, RoutedClient):
    """The client of a decode replica."""


class _ReceivingServedClient(_Receiving, RoutedServedClient):
    """The client of a decode replica, behind a serving process."""


class SideReplica(SteppedReplica):
    """A replica that computes prompts, or one that generates. lines: of its requests that have ended, by index in its
    trace. known_s: until then nothing comes; what does later interrupts its loop. reserves_first: see SteppedSides."""

    def __init__(
        self,
        number: int,
        engine: Engine,
        trace: Trace,
        make_recorder: MakeRecorder,
        is_prefill: bool,
        reserves_first: bool,
    ) -> None:
        self.is_prefill, self.mail, self.known_s = is_prefill, KvMailbox(), inf
        clients: tuple[type[RoutedClient], type[RoutedServedClient]] = _ReceivingClient, _ReceivingServedClient
        if is_prefill:
            clients = _SendingClient, _AcceptedClient if reserves_first else _SendingServedClient
        super().__init__(number, engine, trace, make_recorder, clients=clients)
        self.loop.transfers, self.loop.may_be_interrupted = self.mail, True
        self.lines: dict[int, RequestLine] = {}
        self.recorder.on_request = self._keep_line

    def _keep_line(self, line: RequestLine) -> None:
        self.lines[line.index] = line

    @property
    def is_busy(self) -> bool:
        return super().is_busy or self.mail.has_news

    @property
    def waits_until_s(self) -> float:
        return self.known_s

    @property
    def next_time_s(self) -> float:
        if self.mail.has_news:
            return self.clock.now()
        time_s = super().next_time_s
        return inf if self.loop.waits_for_transfers and time_s <= self.clock.now() else time_s

    def advance(self) -> bool:
        """See SteppedReplica. What has arrived may wait for the places of requests that are transferred."""
        is_waiting = self.loop.waits_for_transfers and not self.mail.has_news
        if is_waiting and super().next_time_s <= self.clock.now():
            return False
        return super().advance()

    def offer(
        self, columns: RequestColumns, index: int, arrival_s: float, earlier: EarlierAttempts | None = None
    ) -> None:
        super().offer(columns, index, arrival_s, earlier)
        self._idle_at = None
        self.loop.wake()

    @property
    def kv_scheduler(self) -> KvScheduler:
        assert isinstance(self.loop.scheduler, KvScheduler)
        return self.loop.scheduler

    def shorten_latest(self) -> None:
        """The request that was offered last ends with its first token."""
        self._columns.max_new_tokens[-1] = self._columns.output_len[-1] = 1

    def stop(self, own: int, error: str) -> None:
        """The request with this index in its trace fails."""
        self.mail.forget(own)
        self.loop.stop(self._columns.request_id[own], error)

    def wake(self, now_s: float) -> None:
        """There is something in the mailbox."""
        if self.loop.is_idle:
            self.clock.wait_until(now_s)
        self._idle_at = None
        self.loop.wake()


class SteppedSides:
    """The routers, the replicas of both sides and the client in front of them, which has the whole trace.

    Events at the same time are taken in this order: what routers read, arrivals, answers, ends of transfers, and then
    iterations. prefill, decode: the replicas; the numbers of the latter go on from those of the former. reserves_first:
    a request goes to its prefill replica once it has blocks of its decode replica. layers: of the model, where they are
    sent one by one; None if transfers begin when prompts are complete. lines: of the requests that have ended, in order
    of time."""

    def __init__(
        self,
        trace: Trace,
        config: RunConfig,
        routers: tuple[Router, Router],
        sides: tuple[Sequence[SideReplica], Sequence[SideReplica]],
        links: Links | None,
        progress: Progress,
        *,
        reserves_first: bool = False,
        layers: int | None = None,
    ) -> None:
        self._columns, self._routers, self._progress = columns_of(trace.requests), routers, progress
        self.prefill, self.decode = sides
        # Whose first tokens come with the keys and values, and bytes that were copied.
        self._sends_first, self.moved_bytes = config.engine != VLLM, 0
        self._links = links or MeasuredLinks(len(self.prefill), len(self.decode), self._move)
        self._reserves_first, self._layers = reserves_first, layers
        self.replicas = [*self.prefill, *self.decode]
        self._clock = VirtualClock()
        self.front = make_client(config, trace, self._clock, arriving)
        self._age_ns, self._read_ns = round(config.router_state_age * NANOSECONDS), -1
        self._least_remote = config.disaggregate_from
        self._looks_at = frozenset(routers[0].looks_at) | frozenset(routers[1].looks_at)
        self._has_prefixes = PREFIXES in self._looks_at or config.disaggregate_from > 0
        self._sessions = session_numbers(self._columns)
        self._beginnings: dict[object, int] = {}
        self._routed = [0, 0]  # by each router
        # The time of the latest event or step, and the last one of the replicas that have begun what begins then.
        self._now_ns, self._begun = -1, -1
        self._passages: dict[int, Passage] = {}
        self._offers: dict[int, dict[str, list[float | None]]] = {}
        self.lines: list[RequestLine] = []

    def run(self) -> None:
        """Run until each request is answered."""
        shown, total = 0, len(self._columns)
        while not self.front.done:
            event_s = self.front.next_event_s
            event_s = inf if event_s is None else event_s
            answered_s, answering = min(
                [(one.client.answers[0][0], at) for at, one in enumerate(self.replicas) if one.client.answers],
                default=(inf, -1),
            )
            busy = [(one.next_time_s, at) for at, one in enumerate(self.replicas) if one.is_busy]
            next_s, at = min(busy, default=(inf, -1))
            known_s = min(self._read_s(event_s), answered_s, self._links.next_s)
            if known_s < inf and known_s <= next_s:
                self._come_to(known_s)
                self._take_event(known_s, event_s, answered_s, answering)
            elif next_s < inf:
                self._come_to(next_s, at)
                self._step(self.replicas[at], next_s, known_s)
            elif not self.front.done:
                raise RunFailed("no progress: no replica is busy, and no request arrives.")
            if self.front.answered >= shown + SHOWN_EVERY:
                shown = self.front.answered
                self._progress.update(shown, total, f"{len(self.prefill)} + {len(self.decode)} replicas")
        for one in self.replicas:
            while one.loop.is_held or one.loop.step():  # iterations in flight of no outstanding request
                one.loop.take_in()

    # Events, in order of time.

    def _come_to(self, now_s: float, at: int = -1) -> None:
        """It is `now_s`, and the replica at this position goes on: those before it have begun what begins now."""
        now_ns = tick(now_s)
        if now_ns > self._now_ns:
            self._now_ns, self._begun = now_ns, at
        else:
            self._begun = max(self._begun, at)

    def _interrupt(self, one: SideReplica) -> SideReplica:
        """Something comes to this replica now that changes what it runs."""
        one.loop.interrupt(self._now_ns + (one.view.number <= self._begun))
        return one

    def _read_s(self, event_s: float) -> float:
        """When states are read for an arrival at `event_s`; or then, if they need not be read before."""
        if event_s == inf or STATE not in self._looks_at:
            return event_s
        time_ns = round(event_s * NANOSECONDS)
        read_ns = time_ns - time_ns % self._age_ns if self._age_ns else time_ns
        return event_s if read_ns == self._read_ns else read_ns / NANOSECONDS

    def _take_event(self, now_s: float, event_s: float, answered_s: float, answering: int) -> None:
        if self._read_s(event_s) == now_s and (STATE in self._looks_at and self._take_states(event_s)):
            return
        if event_s == now_s:
            self._clock.wait_until(event_s)
            for request in self.front.get_requests(NO_LIMIT):
                self._route(request, self.front.arrival_s(request), self.front.held_until_s(request))
        elif answered_s == now_s:
            self._take_answer(self.replicas[answering])
        else:
            for index in self._links.take(now_s):
                self._receive(self._passages[index], now_s)

    def _take_states(self, event_s: float) -> bool:
        """Read the states of all replicas, if they are to be read now; whether they were."""
        time_ns = round(event_s * NANOSECONDS)
        read_ns = time_ns - time_ns % self._age_ns if self._age_ns else time_ns
        if read_ns == self._read_ns:
            return False
        self._read_ns = read_ns
        for one in self.replicas:
            one.view.state = self._interrupt(one).state()
        return True

    def _step(self, one: SideReplica, now_s: float, known_s: float) -> None:
        one.known_s = now_s
        if not one.advance():  # once a request has got blocks, another one may at once
            one.known_s = known_s
            one.advance()
        mail = one.mail
        reservations, mail.reservations = mail.reservations, []
        for now_s, request in reservations:
            self._reserve(self._passages[one.members[request.index]], request, now_s)
        completions, mail.completions = mail.completions, []
        for now_s, request in completions if self._reserves_first else ():
            self._send_rest(self._passages[one.members[request.index]], now_s)

    # The way of a request.

    def _route(self, request: Request, arrival_s: float, submitted_s: float) -> None:
        index, columns = request.index, self._columns
        pieces: Pieces = prompt_pieces(columns[index], self._beginnings) if self._has_prefixes else ()
        passage = self._passages[index] = Passage(index, arrival_s, submitted_s, self._reserves_first)
        routed = self._request_for(1, index, arrival_s, pieces)
        self._note(index, routed)
        decode = self._chosen(self._routers[1], self.decode, routed)
        held = decode.view.expected_hit(routed) if decode.engine.limits.reuse.enabled else 0
        is_remote = routed.prompt_len - held >= self._least_remote
        # What ends with its first token, also because nothing else fits behind the prompt, is not sent.
        is_sent = min(columns.output_len[index], decode.engine.limits.max_seq_len - routed.prompt_len) != 1
        if is_remote:
            prefill = self._chosen(self._routers[0], self.prefill, self._request_for(0, index, arrival_s, pieces))
            passage.prefill = prefill.view.number
            self._count(prefill.view, 0, routed)
        if not is_remote or is_sent:
            passage.decode = decode.view.number
            self._count(decode.view, 1, routed)
        if is_remote and not (is_sent and self._reserves_first):
            self._offer_to_prefill(passage, submitted_s)
        else:
            self._offer_to_decode(passage, submitted_s)

    def _offer_to_prefill(self, passage: Passage, arrival_s: float) -> None:
        prefill = self._prefill_of(passage)
        passage.of_prefill = len(prefill.members)
        if passage.decode is not None:
            prefill.client.to_send.add(passage.of_prefill)  # type: ignore[union-attr]
        self._interrupt(prefill).offer(self._columns, passage.index, arrival_s)
        prefill.shorten_latest()

    def _request_for(self, side: int, index: int, arrival_s: float, pieces: Pieces) -> RoutedRequest:
        columns = self._columns
        return RoutedRequest(
            self._routed[side],
            columns.request_id[index],
            arrival_s,
            columns.prompt_len[index],
            int(self._sessions[index]),
            pieces,
        )

    def _chosen(self, router: Router, side: Sequence[SideReplica], routed: RoutedRequest) -> SideReplica:
        number = router.choose(routed, [one.view for one in side]).number
        return self.replicas[number]

    def _uncount(self, view: Replica, index: int) -> None:
        """The request is no longer at this replica."""
        view.requests -= 1
        view.tokens -= self._columns.prompt_len[index]

    def _count(self, view: Replica, side: int, routed: RoutedRequest) -> None:
        """The request goes to this replica."""
        self._routed[side] += 1
        view.requests += 1
        view.tokens += routed.prompt_len
        if routed.pieces:
            view.prefixes.add(routed.pieces)

    def _note(self, index: int, routed: RoutedRequest) -> None:
        """Keep what the routers see."""
        views, offers = [one.view for one in self.replicas], dict[str, list[float | None]]()
        if REQUESTS in self._looks_at:
            offers |= {"requests": [one.requests for one in views], "tokens": [one.tokens for one in views]}
        if PREFIXES in self._looks_at:
            offers["hit_tokens"] = [one.expected_hit(routed) for one in views]
        if STATE in self._looks_at:
            offers |= {"queued": [one.state.queued for one in views], "kv_use": [one.state.kv_use for one in views]}
        if offers:
            self._offers[index] = offers

    def _take_answer(self, one: SideReplica) -> None:
        answered_s, own = one.client.answers.popleft()
        index = one.members[own]
        self._uncount(one.view, index)
        passage = self._passages.get(index)
        if passage is None:
            return  # a request whose decode replica has answered
        if one.is_prefill and passage.decode is not None:
            if passage.reserved_s >= 0:
                if passage.prefilled_s < 0:  # it failed
                    decode = self._interrupt(self._decode_of(passage))
                    decode.stop(passage.of_decode, one.lines[own].error or "its prefill failed")
            elif (held := one.mail.held.get(own)) is not None and not _has_ended(held):
                passage.prefilled_s = answered_s
                self._offer_to_decode(passage, answered_s)
            else:  # it failed, or its first token has ended it
                if held is not None:
                    self._release(passage, answered_s)
                self._uncount(self._decode_of(passage).view, index)
                passage.decode = None
                self._end(passage, answered_s)
            return
        if passage.prefill is not None and not one.is_prefill and passage.received_s < 0:
            self._lose_prefill(passage, answered_s)  # the decode replica has refused it
        self._end(passage, answered_s)

    def _lose_prefill(self, passage: Passage, now_s: float) -> None:
        """A request ends before its keys and values have come."""
        prefill = self._prefill_of(passage)
        if passage.of_prefill in prefill.mail.held:
            self._release(passage, now_s)
        elif passage.of_prefill < 0:  # it was not sent there
            self._uncount(prefill.view, passage.index)
            passage.prefill = None

    def _offer_to_decode(self, passage: Passage, arrival_s: float) -> None:
        decode = self._decode_of(passage)
        passage.of_decode = len(decode.members)
        if passage.prefill is not None:
            decode.client.remote.add(passage.of_decode)  # type: ignore[union-attr]
        self._interrupt(decode).offer(self._columns, passage.index, arrival_s)

    def _reserve(self, passage: Passage, request: Request, now_s: float) -> None:
        """The decode replica has blocks for the prompt."""
        client = self._decode_of(passage).client
        own, offered_s = passage.of_decode, passage.submitted_s if self._reserves_first else passage.prefilled_s
        passage.accepted_s = client.accepted_s(own) if isinstance(client, ServedClient) else offered_s
        passage.taken_s = client.taken_s[own]  # type: ignore[union-attr]
        passage.reserved_s = now_s
        passage.tokens = request.prompt_len - request.position
        if self._reserves_first:
            self._offer_to_prefill(passage, now_s)
        else:
            self._send(passage, passage.tokens, now_s)

    def _send_rest(self, passage: Passage, now_s: float) -> None:
        """The prompt is complete, and the decode replica has blocks: send what has not been sent during the prefill.

        By layer, the keys and values of a layer leave once it is computed. Layers take equal times of the prefill, and
        have the link for themselves meanwhile; the last layer is sent after the prefill."""
        passage.prefilled_s, left = now_s, float(passage.tokens)
        if self._layers is not None and isinstance(self._links, Links):  # measured transfers are of whole prompts
            line = self._prefill_of(passage).lines[passage.of_prefill]
            rate = self._links.rate(*self._ends_of(passage))
            computing_s = now_s - value_of(line.first_scheduled_s)
            left = left_after_prefill(passage.tokens, self._layers, rate, computing_s)
        self._send(passage, left, now_s)

    def _send(self, passage: Passage, tokens: float, now_s: float) -> None:
        passage.transfer_s = now_s
        self._links.send(passage.index, *self._ends_of(passage), tokens, now_s)

    def _move(self, index: int) -> float:
        """Copy the keys and values of a request between the processes of its replicas; returns how many seconds that
        took."""
        passage = self._passages[index]
        prefill, decode = self._prefill_of(passage), self._decode_of(passage)
        held, request = prefill.mail.held[passage.of_prefill], decode.mail.receiving[passage.of_decode]
        start, end = request.prompt_len - passage.tokens, request.prompt_len
        sent = KvPart(_tables_of(prefill, held), start, end)
        received = KvPart(_tables_of(decode, request), start, end, decode.kv_scheduler.take_copies())
        first = None
        if self._sends_first:
            assert held.table is not None
            assert request.table is not None
            token = held.table.outputs(held.slot, 0, 1)
            request.table.write_outputs(np.array([request.slot]), np.array([0]), token)
            chunk = ContextChunk(request, end - 1, 1)
            first = FirstToken(SentChunk.of(chunk), int(token[0]))
        seconds, num_bytes = move_kv(process_of(prefill.engine), sent, process_of(decode.engine), received, first)
        self.moved_bytes += num_bytes
        return seconds

    def _ends_of(self, passage: Passage) -> tuple[int, int]:
        """Both ends of the transfer, as the links number them."""
        assert passage.prefill is not None
        assert passage.decode is not None
        return passage.prefill, passage.decode - len(self.prefill)

    def _receive(self, passage: Passage, now_s: float) -> None:
        """Keys and values have arrived."""
        passage.received_s = now_s
        self._release(passage, now_s)
        decode = self._interrupt(self._decode_of(passage))
        decode.client.received_s[passage.of_decode] = now_s  # type: ignore[union-attr]
        decode.mail.received(passage.of_decode)
        decode.wake(now_s)

    def _release(self, passage: Passage, now_s: float) -> None:
        """What the prefill replica has kept is no longer needed."""
        prefill = self._interrupt(self._prefill_of(passage))
        prefill.mail.sent(passage.of_prefill)
        prefill.wake(now_s)

    def _end(self, passage: Passage, answered_s: float) -> None:
        prefilled = None if passage.of_prefill < 0 else self._prefill_of(passage).lines.pop(passage.of_prefill)
        decoded = None if passage.decode is None else self._decode_of(passage).lines.pop(passage.of_decode)
        line = passage.line(prefilled, decoded, self._columns.max_new_tokens[passage.index])
        if passage.index in self._offers:
            line.offers = self._offers.pop(passage.index)
        self.lines.append(line)
        del self._passages[passage.index]
        self._clock.wait_until(answered_s)
        self.front.send_response(final_response(passage.index))

    def _prefill_of(self, passage: Passage) -> SideReplica:
        assert passage.prefill is not None
        return self.replicas[passage.prefill]

    def _decode_of(self, passage: Passage) -> SideReplica:
        assert passage.decode is not None
        return self.replicas[passage.decode]


def _tables_of(one: SideReplica, request: Request) -> tuple[IntArray, ...]:
    """The blocks of a request, of each attention window."""
    return tuple([table[request.slot, 0] for table in one.loop.scheduler.layout.block_tables])


def _has_ended(request: Request) -> bool:
    """Whether the first token of a request has ended it; of symbolic tokens that is not known."""
    if request.table is None or not request.table.makes_tokens:
        return False
    return int(request.table.outputs(request.slot, 0, 1)[0]) in request.stop.end_tokens
