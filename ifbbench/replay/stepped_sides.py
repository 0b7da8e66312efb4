"""A fleet with prefill and decode apart, in steps: the loops of all replicas on one clock, and the transfers of keys
and values between them.

A router chooses both replicas of a request when it arrives. The prefill replica computes the prompt and one token, and
keeps the blocks; then the request goes to the decode replica, which takes blocks for the prompt as its engine's rules
say. The transfer begins then, and once it has arrived, the decode replica goes on, and the blocks of the prefill
replica are released.

Where blocks are reserved first (SGLang, and transfers by layer), the request goes to the decode replica when it
arrives, and to the prefill replica once the decode replica has blocks for it. The transfer ends after the prompt is
complete.

A replica may fail. Requests that need it go on elsewhere from the start, and leave the other replica that they were at;
a request that has not come to it yet gets another replica of its side.
"""

from collections.abc import Sequence
from math import inf

import numpy as np

from ifbbench.clock import NANOSECONDS
from ifbbench.engine.arrays import IntArray
from ifbbench.engine.interfaces import NO_LIMIT, EngineLost
from ifbbench.engine.plan import ContextChunk
from ifbbench.engine.request import EarlierAttempts, Request, computed_tokens
from ifbbench.engine.sent_batches import SentChunk
from ifbbench.errors import RunFailed
from ifbbench.fleet.front import is_to_be_read, read_at_ns
from ifbbench.fleet.links import Links, MeasuredLinks, left_after_prefill
from ifbbench.fleet.prefix_index import Pieces, prompt_pieces
from ifbbench.fleet.router import PREFIXES, REQUESTS, STATE, Replica, RoutedRequest, Router
from ifbbench.progress import Progress
from ifbbench.replay.client import make_client
from ifbbench.replay.fleet_changes import Changes
from ifbbench.replay.replica_processes import FirstToken, KvPart, move_kv, process_of
from ifbbench.replay.requests import request_maker
from ifbbench.replay.served import ServedClient
from ifbbench.replay.side_replica import SideReplica
from ifbbench.replay.stepped_fleet import SHOWN_EVERY, arriving, final_response
from ifbbench.rundir.disaggregated import Passage
from ifbbench.rundir.line_types import RequestLine
from ifbbench.rundir.lines import value_of
from ifbbench.rundir.request_metrics import RequestMetrics
from ifbbench.settings.config import RunConfig
from ifbbench.settings.engines import VLLM
from ifbbench.virtual_clock import VirtualClock, tick, to_seconds
from ifbbench.workload.load import session_numbers
from ifbbench.workload.trace import Trace, columns_of


class SteppedSides:
    """The routers, the replicas of both sides and the client in front of them, which has the whole trace.

    Events at the same time are taken in this order: changes of the fleet, what routers read, arrivals, answers, ends of
    transfers, and then iterations.

    reserves_first: whether a request goes to its prefill replica only once it has blocks of its decode replica.
    layers: number of layers of the model, where they are sent one by one; None if transfers begin when prompts are
        complete.
    prefill, decode: the replicas; the numbers of the latter go on from those of the former.
    lines: lines of the requests that have ended, in order of time.
    outputs: the tokens of each, by id, where clients keep them.
    views: what the router sees of the replicas that take requests.
    waiting: always empty: no request waits for a replica, as none will start.
    """

    def __init__(
        self,
        trace: Trace,
        config: RunConfig,
        routers: tuple[Router, Router],
        sides: tuple[Sequence[SideReplica], Sequence[SideReplica]],
        links: Links | None,
        changes: Changes,
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
        self.outputs: dict[int, IntArray] = {}
        self.views, self.waiting = [one.view for one in self.replicas], list[int]()
        self._retries, self._earlier = config.request_retries, dict[int, EarlierAttempts]()
        engine = self.prefill[0].engine
        self._make_request = request_maker(engine)
        self._failures = RequestMetrics(0, self._columns.class_at, engine.config.as_dict(), ())
        self.changes = changes
        changes.begin(self)

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
            known_s = min(self._read_s(event_s), answered_s, self._links.next_s, self.changes.next_s)
            if self._read_before(min(known_s, next_s)):
                continue
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
            # Iterations in flight of no outstanding request may be left.
            while not one.has_failed and (one.loop.is_held or one.loop.step()):
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
        one.loop.interrupt(self._next_ns(one))
        return one

    def _next_ns(self, one: SideReplica) -> int:
        """When the next iteration of this replica may begin."""
        return self._now_ns + (one.view.number <= self._begun)

    def _read_s(self, event_s: float) -> float:
        """When states are read for an arrival at `event_s`; or then, if they need not be read before."""
        if event_s == inf or STATE not in self._looks_at:
            return event_s
        read_ns = read_at_ns(event_s, self._age_ns)
        return event_s if read_ns == self._read_ns else read_ns / NANOSECONDS

    def _take_event(self, now_s: float, event_s: float, answered_s: float, answering: int) -> None:
        if self.changes.next_s == now_s:
            self._clock.wait_until(now_s)
            self.changes.apply(now_s)
            return
        if self._read_s(event_s) == now_s and (STATE in self._looks_at and self._take_states(event_s)):
            return
        if event_s == now_s:
            self._clock.wait_until(event_s)
            for request in self.front.get_requests(NO_LIMIT):
                submitted_s = self.front.held_until_s(request)
                self._route(request.index, self.front.arrival_s(request), submitted_s, submitted_s)
        elif answered_s == now_s:
            self._take_answer(self.replicas[answering])
        else:
            for index in self._links.take(now_s):
                self._receive(self._passages[index], now_s)

    def _take_states(self, event_s: float) -> bool:
        """Read the states of all replicas, if they are to be read now; whether they were."""
        read_ns = read_at_ns(event_s, self._age_ns)
        if read_ns == self._read_ns:
            return False
        self._read_ns = read_ns
        for one in self.replicas:
            one.view.state = one.state_before(self._next_ns(one))
        return True

    def _read_before(self, next_s: float) -> bool:
        """Read the states if they are to be read before `next_s`; whether they were."""
        sees_answers = STATE in self._looks_at and not self.front.is_open_loop
        if not sees_answers or not is_to_be_read(next_s, self._age_ns, self._read_ns):
            return False
        self._come_to(read_at_ns(next_s, self._age_ns) / NANOSECONDS)
        return self._take_states(next_s)

    def _step(self, one: SideReplica, now_s: float, known_s: float) -> None:
        one.known_s = now_s
        if one.engine.tiers is not None:  # others may write to a store: a queue looks there in each iteration
            one.engine.tiers.others_s = to_seconds(self._now_ns + 1)
        try:
            if not one.advance():  # once a request has got blocks, another one may at once
                one.known_s = known_s
                one.advance()
        except EngineLost as error:
            self.changes.fail(one.view.number, one.clock.now(), str(error))
            return
        mail = one.mail
        reservations, mail.reservations = mail.reservations, []
        for now_s, request in reservations:
            if (passage := self._at(one, request.index)) is not None:
                self._reserve(passage, request, now_s)
        completions, mail.completions = mail.completions, []
        for now_s, request in completions if self._reserves_first else ():
            if (passage := self._at(one, request.index)) is None:
                continue
            if _has_ended(request):
                self._end_with_first_token(passage, now_s)
            else:
                self._send_rest(passage, now_s)

    def _at(self, one: SideReplica, own: int) -> Passage | None:
        """The passage of the request with this index in the trace of a replica; None if it has ended, or was sent to
        another replica."""
        passage = self._passages.get(one.members[own])
        if passage is None:
            return None
        there = passage.prefill if one.is_prefill else passage.decode
        its = passage.of_prefill if one.is_prefill else passage.of_decode
        return passage if there == one.view.number and its == own else None

    # The way of a request.

    def _route(self, index: int, arrival_s: float, submitted_s: float, sent_s: float) -> None:
        """Send a request to replicas of both sides at `sent_s`."""
        columns = self._columns
        passage = Passage(index, arrival_s, submitted_s, self._reserves_first)
        passage.sent_s = sent_s
        if (earlier := self._earlier.get(index)) is not None:
            passage.retries, passage.lost_tokens = earlier.retries, earlier.lost_tokens
        open_views = self._open(0), self._open(1)
        if not all(open_views):
            side = "decode" if open_views[0] else "prefill"
            self._lose(passage, f"no {side} replica takes requests", None)
            return
        self._passages[index] = passage
        pieces: Pieces = prompt_pieces(columns[index], self._beginnings) if self._has_prefixes else ()
        routed = self._request_for(1, index, arrival_s, pieces)
        self._note(index, routed)
        decode = self._chosen(1, routed)
        held = decode.view.expected_hit(routed) if decode.engine.limits.reuse.enabled else 0
        is_remote = routed.prompt_len - held >= self._least_remote
        # What ends with its first token, also because nothing else fits behind the prompt, is not sent.
        is_sent = min(columns.output_len[index], decode.engine.limits.max_seq_len - routed.prompt_len) != 1
        if is_remote:
            prefill = self._chosen(0, self._request_for(0, index, arrival_s, pieces))
            passage.prefill = prefill.view.number
            self._count(prefill.view, 0, routed)
        if not is_remote or is_sent:
            passage.decode = decode.view.number
            self._count(decode.view, 1, routed)
        if is_remote and not (is_sent and self._reserves_first):
            self._offer_to_prefill(passage, sent_s)
        else:
            self._offer_to_decode(passage, sent_s)

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

    def _open(self, side: int) -> list[Replica]:
        """The replicas of a side that take requests."""
        count = len(self.prefill)
        return [view for view in self.views if (view.number >= count) == bool(side)]

    def _chosen(self, side: int, routed: RoutedRequest) -> SideReplica:
        return self.replicas[self._routers[side].choose(routed, self._open(side)).number]

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
        """Keep what the routers see: None of replicas that take no requests."""
        takes_requests = {view.number for view in self.views}
        views = [one.view if one.view.number in takes_requests else None for one in self.replicas]
        offers = dict[str, list[float | None]]()
        if REQUESTS in self._looks_at:
            offers["requests"] = [None if one is None else one.requests for one in views]
            offers["tokens"] = [None if one is None else one.tokens for one in views]
        if PREFIXES in self._looks_at:
            offers["hit_tokens"] = [None if one is None else one.expected_hit(routed) for one in views]
        if STATE in self._looks_at:
            offers["queued"] = [None if one is None else one.state.queued for one in views]
            offers["kv_use"] = [None if one is None else one.state.kv_use for one in views]
        if offers:
            self._offers[index] = offers

    def _take_answer(self, one: SideReplica) -> None:
        answered_s, own = one.client.answers.popleft()
        index = one.members[own]
        one.latest_answer_s = answered_s
        self._uncount(one.view, index)
        passage = self._at(one, own)
        if passage is None:  # its decode replica has answered, or it was sent to another replica
            one.lines.pop(own, None)
            return
        if one.is_prefill and passage.decode is not None:
            if passage.reserved_s >= 0:
                if passage.prefilled_s < 0:  # it failed
                    decode = self._interrupt(self._decode_of(passage))
                    decode.stop(passage.of_decode, one.lines[own].error or "its prefill failed", answered_s)
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
        own, offered_s = passage.of_decode, passage.sent_s if self._reserves_first else passage.prefilled_s
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

    def _end_with_first_token(self, passage: Passage, now_s: float) -> None:
        """The first token has ended the request, for which the decode replica has blocks: it leaves that."""
        self._release(passage, now_s)
        decode, own = self._interrupt(self._decode_of(passage)), passage.of_decode
        passage.decode, passage.of_decode = None, -1
        decode.withdraw(own, now_s)

    def _send(self, passage: Passage, tokens: float, now_s: float) -> None:
        passage.transfer_s = now_s
        try:
            self._links.send(passage.index, *self._ends_of(passage), tokens, now_s)
        except EngineLost as error:
            prefill, decode = self._prefill_of(passage), self._decode_of(passage)
            lost = prefill if process_of(prefill.engine).has_ended else decode
            self.changes.fail(lost.view.number, now_s, str(error))

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
        ended_at = self._prefill_of(passage) if passage.decode is None else self._decode_of(passage)
        tokens = ended_at.client.outputs.pop(line.request_id, None)
        if tokens is not None:
            self.outputs[line.request_id] = tokens
        self._add_line(passage, line, answered_s)

    def _add_line(self, passage: Passage, line: RequestLine, ended_s: float, error: str | None = None) -> None:
        if passage.index in self._offers:
            line.offers = self._offers.pop(passage.index)
        self.lines.append(line)
        self._passages.pop(passage.index, None)
        self._clock.wait_until(ended_s)
        self.front.send_response(final_response(passage.index, error))

    # Replicas that fail.

    def route_waiting(self, time_s: float) -> None:
        """See Fleet. No request waits for a replica."""

    def fail(self, one: SideReplica, time_s: float) -> dict[str, int]:
        """The replica is lost. Requests that need what it has are sent to other replicas, or have failed if that was
        done too often; those that have not come to it get another replica of its side. Returns how many were sent
        again, and lost, and the tokens that were computed for nothing."""
        for other in self.replicas:
            if not other.has_failed:
                self._interrupt(other)
        one.lose(time_s)
        ending, moving = list[Passage](), list[Passage]()
        for passage in self._passages.values():
            if not self._needs(passage, one):
                continue
            its = passage.of_prefill if one.is_prefill else passage.of_decode
            (moving if its < 0 and self._open(0 if one.is_prefill else 1) else ending).append(passage)
        errors, again = dict[int, str](), list[int]()
        computed = {passage.index: self._computed(passage) for passage in ending}
        for passage in ending:
            index, retries = passage.index, passage.retries
            if retries < self._retries:
                again.append(index)
            else:
                after = f", after {retries} retries" * bool(retries)
                errors[index] = f"replica {one.view.number} failed at {time_s:g} s{after}"
        one.leave_open(errors.get)
        for passage in ending:
            self._withdraw(passage, one, time_s)
            index, lost_tokens = passage.index, passage.lost_tokens + computed[passage.index]
            passage.lost_tokens = lost_tokens
            self._earlier[index] = EarlierAttempts(passage.retries + 1, passage.arrival_s, lost_tokens)
            if index in errors:
                self._lose(passage, errors[index], one)
        for passage in moving:
            self._move_to_another(passage, one)
        for index in again:
            passage = self._passages.pop(index)
            self._route(index, passage.arrival_s, passage.submitted_s, time_s)
        return {"retried": len(again), "lost": len(errors), "lost_tokens": sum(computed.values())}

    def _needs(self, passage: Passage, one: SideReplica) -> bool:
        """Whether the request is at a replica, or will come to it."""
        if passage.decode == one.view.number:
            return passage.of_decode < 0 or passage.of_decode in one.client.open
        if passage.prefill != one.view.number or passage.received_s >= 0:
            return False
        own, decode = passage.of_prefill, passage.decode
        if decode is not None and passage.of_decode >= 0 and passage.of_decode not in self.replicas[decode].client.open:
            return False  # the decode replica has refused it
        held = one.held.get(own)
        return own < 0 or own in one.client.open or (held is not None and not _has_ended(held))

    def _computed(self, passage: Passage) -> int:
        """Tokens that both replicas have computed for a request."""
        tokens = 0
        if passage.of_prefill >= 0:
            prefill = self._prefill_of(passage)
            if (line := prefill.lines.get(passage.of_prefill)) is not None:
                tokens = line.prompt_len - line.reused_tokens + line.output_len
            elif (request := prefill.client.fetched.get(passage.of_prefill)) is not None:  # type: ignore[union-attr]
                tokens = computed_tokens(request)
        if passage.of_decode >= 0:
            request = self._decode_of(passage).client.fetched.get(passage.of_decode)  # type: ignore[union-attr]
            if request is not None and request.table is not None:
                is_remote = passage.prefill is not None
                tokens += request.num_outputs if is_remote else computed_tokens(request)
        return tokens

    def _withdraw(self, passage: Passage, lost: SideReplica, now_s: float) -> None:
        """The request leaves the replica that is not lost; nothing is sent to there, or from there."""
        if passage.transfer_s >= 0 and passage.received_s < 0:
            self._links.cancel(passage.index, now_s)
        if lost.is_prefill and passage.decode is not None:
            other, own = self._decode_of(passage), passage.of_decode
        elif not lost.is_prefill and passage.prefill is not None:
            other, own = self._prefill_of(passage), passage.of_prefill
        else:
            return
        if own < 0:
            self._uncount(other.view, passage.index)
        elif own in other.mail.held:
            self._release(passage, now_s)
        elif own in other.client.open:
            self._interrupt(other).withdraw(own, now_s)

    def _move_to_another(self, passage: Passage, lost: SideReplica) -> None:
        """The request has not come to the replica that is lost: it will come to another one."""
        side, index = (0 if lost.is_prefill else 1), passage.index
        pieces: Pieces = prompt_pieces(self._columns[index], self._beginnings) if self._has_prefixes else ()
        routed = self._request_for(side, index, passage.arrival_s, pieces)
        view = self._chosen(side, routed).view
        self._count(view, side, routed)
        if lost.is_prefill:
            passage.prefill = view.number
        else:
            passage.decode = view.number

    def _lose(self, passage: Passage, error: str, at: SideReplica | None) -> None:
        """A request has failed, with a replica or because there is none."""
        request = self._make_request(passage.index, self._columns[passage.index])
        line = self._failures.add_failure(request, passage.arrival_s, error)
        if at is not None:
            line = passage.failed(line, at.view.number)
        elif passage.retries:
            line.retries, line.lost_tokens = passage.retries, passage.lost_tokens
        self._add_line(passage, line, self._clock.now(), error)

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
