"""Routers: each chooses the replica of a request from what a router in front of servers knows."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from ifbbench.errors import IfbbenchError, InputError
from ifbbench.fleet.prefix_index import Pieces, PrefixIndex
from ifbbench.schedulers.plugins import check_parameters, describe_failure, find_plugin
from ifbbench.settings.fields import shown
from ifbbench.settings.groups.fleet import ROUTERS, WEIGHTED_ROUTERS

ENTRY_POINT_GROUP = "ifbbench.routers"
# What a router may look at: its own counts of requests and tokens, the state that replicas report, expected hits, and
# prompts without a first token.
REQUESTS, STATE, PREFIXES, PREFILLS = "requests", "state", "prefixes", "prefills"
EVERYTHING = frozenset((REQUESTS, STATE, PREFIXES, PREFILLS))


class RouterFailed(IfbbenchError):
    """A user's router raised, or chose no replica."""


class RoutedRequest(NamedTuple):
    """What a router knows of a request.

    number: number of requests routed before it.
    session: number of its session, in the order in which sessions start; `number` where the trace has none.
    pieces: see `Pieces`; empty where the router looks at no prefixes.
    """

    number: int
    request_id: int
    arrival_s: float
    prompt_len: int
    session: int
    pieces: Pieces = ()


class ReplicaState(NamedTuple):
    """What a replica reports: waiting and running requests, and the share of its KV cache that is in use."""

    queued: int = 0
    running: int = 0
    kv_use: float = 0.0


IDLE = ReplicaState()


@dataclass(slots=True)
class Replica:
    """A replica as the router sees it.

    prefixes: prompts that were sent there.
    requests, tokens: those sent there and not answered yet, and the tokens of their prompts: the router's own counts.
    state: the latest report, at most `--router_state_age` old.
    prefill_tokens: tokens of the prompts without a first token that the replica was not expected to hold.
    """

    number: int
    prefixes: PrefixIndex
    requests: int = 0
    tokens: int = 0
    state: ReplicaState = IDLE
    prefill_tokens: int = 0

    def expected_hit(self, request: RoutedRequest) -> int:
        """Prompt tokens that the replica is expected to hold."""
        return self.prefixes.expected_hit(request.pieces)


class Router:
    """Chooses the replica of each request. Derive from it, and give `choose`.

    looks_at: which of REQUESTS, STATE and PREFIXES it reads of replicas; the others have their initial values. One that
    looks at nothing decides alike however quick replicas are, so that these can run as processes of their own.
    """

    looks_at: Collection[str] = EVERYTHING

    def __init__(self, num_replicas: int, seed: int) -> None:
        self._num_replicas = num_replicas

    def choose(self, request: RoutedRequest, replicas: Sequence[Replica]) -> Replica:
        """One of `replicas`, those that take requests, of which there is at least one."""
        raise NotImplementedError


class RoundRobin(Router):
    """Each replica in turn."""

    looks_at = frozenset[str]()

    def choose(self, request: RoutedRequest, replicas: Sequence[Replica]) -> Replica:
        return replicas[request.number % len(replicas)]


class RandomChoice(Router):
    """Any replica, with equal probability."""

    looks_at = frozenset[str]()

    def __init__(self, num_replicas: int, seed: int) -> None:
        super().__init__(num_replicas, seed)
        self._random = Random(f"router {seed}")

    def choose(self, request: RoutedRequest, replicas: Sequence[Replica]) -> Replica:
        return self._random.choice(replicas)


class Session(Router):
    """The replica of the session. Sessions go to replicas in turn; those of one that takes no more requests are divided
    among the others."""

    looks_at = frozenset[str]()

    def __init__(self, num_replicas: int, seed: int) -> None:
        super().__init__(num_replicas, seed)
        # The latest session before replicas changed, and the replicas of sessions since then.
        self._latest, self._has_changed = -1, False
        self._of_session: dict[int, int] = {}

    def choose(self, request: RoutedRequest, replicas: Sequence[Replica]) -> Replica:
        session, count = request.session, self._num_replicas
        self._has_changed |= len(replicas) != count or replicas[-1].number != count - 1
        if not self._has_changed:
            self._latest = max(self._latest, session)
            return replicas[session % count]
        known = self._of_session.get(session, session % count if session <= self._latest else None)
        chosen = next((one for one in replicas if one.number == known), None)
        if chosen is None:
            chosen = replicas[session % len(replicas)]
            self._of_session[session] = chosen.number
        return chosen


class LeastLoad(Router):
    """The replica with the lowest `load`; of several, the first one after that of the request before."""

    def __init__(self, num_replicas: int, seed: int) -> None:
        super().__init__(num_replicas, seed)
        self._latest = -1

    def load(self, request: RoutedRequest, replica: Replica) -> float:
        raise NotImplementedError

    def choose(self, request: RoutedRequest, replicas: Sequence[Replica]) -> Replica:
        best, best_load = replicas[0], float("inf")
        first = next((at for at, one in enumerate(replicas) if one.number > self._latest), 0)
        for one in (*replicas[first:], *replicas[:first]):
            if (load := self.load(request, one)) < best_load:
                best, best_load = one, load
        self._latest = best.number
        return best


class LeastRequests(LeastLoad):
    """The replica with the fewest requests that are not answered."""

    looks_at = frozenset((REQUESTS,))

    def load(self, request: RoutedRequest, replica: Replica) -> float:
        return replica.requests


class LeastTokens(LeastLoad):
    """The replica with the fewest prompt tokens in requests that are not answered."""

    looks_at = frozenset((REQUESTS,))

    def load(self, request: RoutedRequest, replica: Replica) -> float:
        return replica.tokens


class LeastKv(LeastLoad):
    """The replica that reports the smallest share of its KV cache in use."""

    looks_at = frozenset((STATE,))

    def load(self, request: RoutedRequest, replica: Replica) -> float:
        return replica.state.kv_use


class PrefixAffinity(LeastLoad):
    """The replica with the least work for the request: prompt tokens that it does not hold, `weight` times, and the
    prompt tokens of the requests before it that are not answered."""

    looks_at = frozenset((REQUESTS, PREFIXES))

    def __init__(self, num_replicas: int, seed: int, weight: float = 1.0) -> None:
        super().__init__(num_replicas, seed)
        self._weight = weight

    def load(self, request: RoutedRequest, replica: Replica) -> float:
        return self._weight * (request.prompt_len - replica.expected_hit(request)) + replica.tokens


class Dynamo(PrefixAffinity):
    """As PrefixAffinity, and the prompts before it without a first token count `weight` times, too, as far as the
    replica does not hold them: the cost that Dynamo's KV router minimises (only read), in tokens of prompts in place of
    blocks of prompts and outputs."""

    looks_at = frozenset((REQUESTS, PREFIXES, PREFILLS))

    def load(self, request: RoutedRequest, replica: Replica) -> float:
        return super().load(request, replica) + self._weight * replica.prefill_tokens


BUILT_IN: dict[str, Callable[..., Router]] = dict(
    zip(
        ROUTERS,
        (RoundRobin, RandomChoice, LeastRequests, LeastTokens, LeastKv, Session, PrefixAffinity, Dynamo),
        strict=True,
    )
)


def make_router(name: str, num_replicas: int, seed: int) -> Router:
    """The router of the setting `router`: built in, or `package.module:ClassName`. InputError if it cannot be made."""
    built_in, _, weight = name.partition(":")
    if built_in in WEIGHTED_ROUTERS and weight:
        return BUILT_IN[built_in](num_replicas, seed, float(weight))
    if name in BUILT_IN:
        return BUILT_IN[name](num_replicas, seed)
    target = find_plugin("router", name, ENTRY_POINT_GROUP, ROUTERS)
    if not isinstance(target, type) or not callable(getattr(target, "choose", None)):
        raise InputError(
            f"--router: {name!r} is no class with a method 'choose'; expected one that derives from "
            "ifbbench.fleet.router.Router. Name the class."
        )
    check_parameters("router", name, target, "a number of replicas and a seed", "num_replicas", "seed")
    try:
        router: Router = target(num_replicas, seed)
        looks_at = frozenset(getattr(router, "looks_at", EVERYTHING))
    except (Exception, SystemExit) as error:  # a user's class may raise anything
        raise InputError(
            f"--router: {name!r} cannot be made: {describe_failure(error)}. Correct its __init__, or looks_at."
        ) from error
    if unknown := looks_at - EVERYTHING:
        raise InputError(
            f"--router: {name!r} looks at {sorted(unknown)[0]!r}; expected some of {', '.join(sorted(EVERYTHING))}."
        )
    return _CheckedRouter(name, router, looks_at)


class _CheckedRouter(Router):
    """A user's router. RouterFailed if it raises, with file and line, or chooses what is no replica that takes
    requests."""

    def __init__(self, name: str, router: Router, looks_at: frozenset[str]) -> None:
        self._name, self._router, self.looks_at = name, router, looks_at

    def choose(self, request: RoutedRequest, replicas: Sequence[Replica]) -> Replica:
        try:
            chosen = self._router.choose(request, replicas)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # it may raise anything, such as SystemExit
            raise RouterFailed(f"router {self._name} failed in choose: {describe_failure(error)}") from error
        if not any(chosen is one for one in replicas):
            raise RouterFailed(
                f"router {self._name}: choose() returned {shown(chosen)}; expected one of the {len(replicas)} replicas "
                "that it was given."
            )
        return chosen
