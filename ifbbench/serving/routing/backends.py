"""The servers behind a router: their connections, whether they answer, and the state that they report."""

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence

from ifbbench.clock import WallClock
from ifbbench.endpoint.connections import Address, Connections
from ifbbench.endpoint.http import RequestFailed
from ifbbench.endpoint.loop import Alarm
from ifbbench.endpoint.server import listed_models, metrics_of
from ifbbench.fleet.prefix_index import PrefixIndex
from ifbbench.fleet.router import Replica, ReplicaState
from ifbbench.serving.routing.config import RouterConfig

# No answer takes longer.
LONGEST_ANSWER_S = 24 * 3600.0
# How long a health check, a look at the metrics and a new connection may take.
CHECK_S = 5.0
# The state of a backend by the names of vLLM, SGLang and this server: waiting and running requests, and the share of
# the KV cache in use. A name ends where its labels begin, or has one of them.
WAITING = ("vllm:num_requests_waiting{", "sglang:num_queue_reqs{", 'request_type="waiting"')
RUNNING = ("vllm:num_requests_running{", "sglang:num_running_reqs{", 'request_type="active"')
KV_USE = ("vllm:kv_cache_usage_perc{", "vllm:gpu_cache_usage_perc{", "sglang:token_usage{", 'type="fraction"')
# The tokens that its KV cache holds.
CACHE_LABELS = re.compile(r'\b(block_size|num_gpu_blocks)="(\d+)"')
CACHE_INFO, MAX_TOKENS = "vllm:cache_config_info{", "sglang:max_total_num_tokens{"
BLOCKS, BLOCK_SIZE = 'kv_cache_block_type="max"', 'kv_cache_block_type="tokens_per"'
_log = logging.getLogger("ifbbench")


class Backend:
    """A server.

    view: what the router sees of it.
    connections: connections for requests.
    is_up: whether it takes requests; one that does not is asked again with each health check.
    sent, failed: number of attempts, and of those without an answer.
    """

    def __init__(self, number: int, url: str, config: RouterConfig, clock: WallClock, alarm: Alarm) -> None:
        self.number, self.url = number, url
        address = Address.of(url, "--backend")
        self.view = Replica(number, PrefixIndex(config.backend_kv_tokens))
        self.connections = Connections(
            address, {}, config.backend_timeout, LONGEST_ANSWER_S, clock, alarm, connect_timeout_s=CHECK_S
        )
        self._checks = Connections(address, {}, CHECK_S, CHECK_S, clock, alarm)
        self.is_up = True
        self.sent = self.failed = 0
        self._problem, self._has_no_metrics = "", False

    @property
    def problem(self) -> str:
        """Why it takes no requests; empty if it does."""
        return "" if self.is_up else self._problem

    def mark(self, problem: str) -> None:
        """It has not answered: it gets no further requests until a health check succeeds."""
        if self.is_up:
            _log.warning("backend %s takes no requests: %s", self.url, problem)
        self.is_up, self._problem = False, problem

    async def check(self) -> None:
        """Ask whether it is healthy. A server without /health is, if it answers."""
        try:
            status = (await self._checks.get("/health")).status
        except RequestFailed as error:
            self.mark(f"its health check failed: {error}")
            return
        if status >= 500:
            self.mark(f"its health check has status {status}")
            return
        if not self.is_up:
            _log.warning("backend %s takes requests again", self.url)
        self.is_up = True

    async def scrape(self) -> None:
        """Read its state from its metrics."""
        try:
            answer = await self._checks.get("/metrics")
            values = metrics_of(answer.body).get("values") or {}
            state = state_of(values) if answer.status == 200 else None
        except (RequestFailed, ValueError, RecursionError):
            return  # the health check says what is wrong
        if state is None:
            if not self._has_no_metrics:
                _log.warning("backend %s: /metrics has no queue and KV use that the router knows", self.url)
            self._has_no_metrics = True
            return
        self.view.state = state
        if tokens := kv_tokens_of(values):
            self.view.prefixes.resize(tokens)

    async def models(self) -> list[str]:
        """The models that it lists."""
        try:
            answer = await self._checks.get("/v1/models")
        except RequestFailed:
            return []
        return listed_models(answer.body.decode(errors="replace")) if answer.status == 200 else []

    def close(self) -> None:
        """End all connections."""
        self.connections.close()
        self._checks.close()


def state_of(values: Mapping[str, float]) -> ReplicaState | None:
    """The state of a server by its metrics; None if they do not have it. Of several engines behind one address requests
    are added, and the share of the fullest KV cache counts."""
    waiting, running, used = (_named(values, names) for names in (WAITING, RUNNING, KV_USE))
    if not waiting or not running:
        return None
    return ReplicaState(round(sum(waiting)), round(sum(running)), max(used, default=0.0))


def kv_tokens_of(values: Mapping[str, float]) -> int:
    """The tokens that the KV cache of a server holds; 0 if its metrics do not say."""
    for name, value in values.items():
        if name.startswith(CACHE_INFO):
            found = {label: int(number) for label, number in CACHE_LABELS.findall(name)}
            return found.get("block_size", 0) * found.get("num_gpu_blocks", 0)
        if name.startswith(MAX_TOKENS):
            return round(value)
    blocks, sizes = _named(values, (BLOCKS,)), _named(values, (BLOCK_SIZE,))
    return round(sum(blocks) * max(sizes)) if blocks and sizes else 0


def _named(values: Mapping[str, float], names: Sequence[str]) -> list[float]:
    """The values of the first of `names` that is there."""
    for name in names:
        if found := [value for sample, value in values.items() if name in sample]:
            return found
    return []


async def watch(backends: Sequence[Backend], every_s: float, *, scrapes: bool) -> None:
    """Check all backends, or with `scrapes` read their state, in such intervals without end."""
    while True:
        await asyncio.gather(*(one.scrape() if scrapes else one.check() for one in backends))
        await asyncio.sleep(every_s)
