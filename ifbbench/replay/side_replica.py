"""The replicas of a fleet with prefill and decode apart: their clients, and what they exchange with the fleet."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from ifbbench.build.engine import Engine
from ifbbench.engine.interfaces import KvScheduler
from ifbbench.engine.request import EarlierAttempts, Request
from ifbbench.engine.responses import Response
from ifbbench.kv.tiers import KvTiers
from ifbbench.replay.routed import RoutedClient, RoutedServedClient
from ifbbench.replay.stepped_fleet import MakeRecorder, SteppedReplica
from ifbbench.rundir.line_types import RequestLine
from ifbbench.workload.trace import RequestColumns, Trace


class KvMailbox:
    """The `KvTransfers` of a replica. Requests are named by their index in its trace.

    tiers: the stores of the engine, from which others of its requests load.
    held: complete requests, while their blocks are kept.
    completions: when the prompts of the held requests were complete, until the fleet takes them.
    reservations: requests that have got blocks for what is sent to them, and when, until the fleet takes them.
    receiving: these requests, until their keys and values have come.
    withdrawn: requests that were sent to another replica.
    """

    def __init__(self, tiers: KvTiers | None = None) -> None:
        self._tiers = tiers
        self.held: dict[int, Request] = {}
        self.completions: list[tuple[float, Request]] = []
        self.reservations: list[tuple[float, Request]] = []
        self.receiving: dict[int, Request] = {}
        self.withdrawn: set[int] = set()
        self._sent: list[Request] = []
        self._received: list[Request] = []
        self._stopped: list[int] = []

    @property
    def has_news(self) -> bool:
        """Whether the loop has something to take."""
        return bool(self._sent or self._received or self._stopped)

    def sent(self, index: int) -> None:
        """What the prefill replica kept is no longer needed."""
        self._sent.append(self.held.pop(index))

    def received(self, index: int) -> None:
        """What the decode replica waited for has come."""
        self._received.append(self.receiving.pop(index))

    def forget(self, index: int) -> None:
        """Nothing is sent to this request."""
        self.receiving.pop(index, None)

    def withdraw(self, index: int, request_id: int) -> None:
        """This request, which the engine has, leaves it."""
        self.withdrawn.add(index)
        self._stopped.append(request_id)

    def clear(self) -> None:
        """The engine is lost."""
        for kept in (self.held, self.receiving):
            kept.clear()
        for news in (self.completions, self.reservations, self._sent, self._received, self._stopped):
            news.clear()

    # Called by the loop.

    def kept(self, request: Request, now_s: float) -> None:
        if request.index in self.withdrawn:  # it was complete before it was stopped
            self._sent.append(request)
            return
        self.held[request.index] = request
        self.completions.append((now_s, request))

    def reserved(self, requests: Sequence[Request], now_s: float) -> None:
        for request in requests:
            if self._tiers is not None and self._tiers.is_loading(request):
                continue
            self.receiving[request.index] = request
            self.reservations.append((now_s, request))

    def take_sent(self) -> Sequence[Request]:
        sent, self._sent = self._sent, []
        return sent

    def take_received(self) -> Sequence[Request]:
        received, self._received = self._received, []
        return received if self._tiers is None else [*received, *self._tiers.take_received()]

    def take_stopped(self) -> Sequence[int]:
        stopped, self._stopped = self._stopped, []
        return stopped


class _Fetching:
    """What the clients of both sides have in common.

    fetched: requests that the engine has got, by index, until they are answered.
    abandoned: indices of requests that it is not to get.
    leave(request): answers one of the fetched requests.
    """

    fetched: dict[int, Request]
    abandoned: set[int]
    leave: Callable[[Request], None]

    def prepare(self, share: RequestColumns) -> None:
        self.fetched, self.abandoned = {}, set()
        super().prepare(share)  # type: ignore[misc]

    def get_requests(self: Any, max_requests: int) -> list[Request]:
        """See ReplayClient. Others come in the place of those that are abandoned."""
        found = list[Request]()
        while True:
            asked = max_requests if max_requests < 0 else max_requests - len(found)
            requests: list[Request] = super().get_requests(asked)  # type: ignore[misc]
            found += [request for request in requests if request.index not in self.abandoned]
            gone = [request for request in requests if request.index in self.abandoned]
            for request in gone:
                self.leave(request)
            if not gone:
                break
        self.fetched.update((request.index, request) for request in found)
        return found

    def send_response(self, response: Response) -> None:
        """See ReplayClient."""
        super().send_response(response)  # type: ignore[misc]
        if response.is_final:
            self.fetched.pop(response.request.index, None)


class _Sending(_Fetching):
    """What the clients of a prefill replica have in common.

    to_send: indices of the requests that go on elsewhere.
    """

    to_send: set[int]

    def prepare(self, share: RequestColumns) -> None:
        self.to_send = set()
        super().prepare(share)

    def get_requests(self: Any, max_requests: int) -> list[Request]:
        """See ReplayClient."""
        requests: list[Request] = super().get_requests(max_requests)
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


class _Receiving(_Fetching):
    """What the clients of a decode replica have in common.

    remote: indices of the requests whose prompts are computed elsewhere.
    taken_s: when the engine took each request.
    received_s: when keys and values of each came, which is when it arrives for the records of this replica.
    """

    remote: set[int]
    taken_s: dict[int, float]
    received_s: dict[int, float]

    def prepare(self, share: RequestColumns) -> None:
        self.remote, self.taken_s, self.received_s = set(), {}, {}
        super().prepare(share)

    def get_requests(self: Any, max_requests: int) -> list[Request]:
        """See ReplayClient."""
        requests: list[Request] = super().get_requests(max_requests)
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
    """A replica that computes prompts, or one that generates.

    reserves_first: see SteppedSides.
    known_s: time until which nothing comes; what comes later interrupts its loop.
    lines: lines of its requests that have ended, by index in its trace.
    held: requests whose blocks it kept when it was lost.
    """

    def __init__(
        self,
        number: int,
        engine: Engine,
        trace: Trace,
        make_recorder: MakeRecorder,
        is_prefill: bool,
        reserves_first: bool,
    ) -> None:
        self.is_prefill, self.mail, self.known_s = is_prefill, KvMailbox(engine.tiers), inf
        clients: tuple[type[RoutedClient], type[RoutedServedClient]] = _ReceivingClient, _ReceivingServedClient
        if is_prefill:
            clients = _SendingClient, _AcceptedClient if reserves_first else _SendingServedClient
        super().__init__(number, engine, trace, make_recorder, clients=clients)
        self.client.leave = self._leave  # type: ignore[union-attr]
        self.loop.transfers, self.loop.may_be_interrupted = self.mail, True
        self.lines: dict[int, RequestLine] = {}
        self.held: dict[int, Request] = {}
        self.recorder.on_request = self._keep_line

    def _keep_line(self, line: RequestLine) -> None:
        self.lines[line.index] = line

    def _leave(self, request: Request) -> None:
        """The engine does not get `request`."""
        self.recorder.left(request, None)
        self.client.send_response(Response(request, is_final=True))

    @property
    def is_busy(self) -> bool:
        return super().is_busy or self.mail.has_news

    @property
    def waits_until_s(self) -> float:
        return self.known_s

    @property
    def next_time_s(self) -> float:
        return self.clock.now() if self.mail.has_news else super().next_time_s

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

    def stop(self, own: int, error: str, now_s: float) -> None:
        """The request with this index in its trace fails, and those that wait for its blocks may start."""
        self.mail.forget(own)
        self.loop.stop(self._columns.request_id[own], error)
        self.wake(now_s)

    def withdraw(self, own: int, now_s: float) -> None:
        """The request with this index in its trace, which is not answered, is sent to other replicas: it leaves, with
        all that it holds."""
        self.mail.forget(own)
        if own in self.client.fetched:  # type: ignore[union-attr]
            self.mail.withdraw(own, self._columns.request_id[own])
        else:
            self.client.abandoned.add(own)  # type: ignore[union-attr]
        self.wake(now_s)

    def lose(self, time_s: float) -> None:
        super().lose(time_s)
        self.held = dict(self.mail.held)
        self.mail.clear()

    def wake(self, now_s: float) -> None:
        """There is something in the mailbox."""
        if self.loop.is_idle:
            self.clock.wait_until(now_s)
        self._idle_at = None
        self.loop.wake()
