"""Admission fetches every request as soon as there is room for it, however many others are refused."""

from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ifbbench.clock import WallClock
from ifbbench.engine.passes import NullExecutor
from ifbbench.engine.records import IterationRecord
from ifbbench.engine.request import Request
from ifbbench.engine.stretch import Stretch
from ifbbench.models.named_models import load_model_config
from ifbbench.replay.client import ReplayClient
from ifbbench.schedulers.engines import make_loop
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.simulated.cost_model import CostModel
from ifbbench.simulated.executor import SimulatedExecutor
from ifbbench.simulated.hardware import load_hardware
from ifbbench.simulated.shard import Shard
from ifbbench.virtual_clock import VirtualClock
from ifbbench.workload.trace import Trace, TraceRequest
from tests.engine.engine import scheduler_of

COST_MODEL = CostModel(Shard(load_model_config("tiny"), "bf16", "bf16"), load_hardware("h100-sxm"))
MAX_INPUT_LEN = 60
REFUSED = MAX_INPUT_LEN + 1
CONFIG = BatchingConfig(
    "guaranteed_no_evict",
    max_batch_size=4,
    max_num_tokens=MAX_INPUT_LEN,
    max_seq_len=20_000,
    max_input_len=MAX_INPUT_LEN,
    tokens_per_block=16,
    num_blocks=10_000,
)
MAX_STEPS = 20_000


class Served:
    """An observer of a run, and the run: `decisions` has the time and the requests of each iteration."""

    def __init__(
        self,
        rows: list[tuple[float, int, int]],
        config: BatchingConfig,
        *,
        concurrency: int | None = None,
        knows_arrivals: bool = True,
        clock: VirtualClock | WallClock | None = None,
        keeps_arrivals: bool = True,
    ) -> None:
        trace = Trace("t", [TraceRequest(i, at, prompt, new, new) for i, (at, prompt, new) in enumerate(rows)], "", "")
        clock = clock or VirtualClock()
        self.decisions: list[tuple[Any, ...]] = []
        self.errors: dict[int, str | None] = {}
        self.responses: list[int] = []
        client = ReplayClient(trace, clock, self._request, concurrency=concurrency, keeps_arrivals=keeps_arrivals)

        def send_response(response: Any) -> None:
            self.responses.append(response.request.request_id)
            client.send_response(response)

        executor = SimulatedExecutor(COST_MODEL, clock) if isinstance(clock, VirtualClock) else NullExecutor()
        manager = make_loop(
            config,
            executor,
            clock,
            client.get_requests,
            send_response,
            self,
            client.queued,
            next_change=client.next_arrival_s if knows_arrivals else None,
        )
        for _ in range(MAX_STEPS):
            if client.done:
                break
            if not manager.step():
                client.wait()
        assert client.done, f"{len(rows) - client.answered} requests were never answered"
        assert sorted(self.responses) == list(range(len(rows)))
        assert scheduler_of(manager).kv_cache.free_blocks == config.num_blocks

    @staticmethod
    def _request(index: int, row: TraceRequest) -> Request:
        return Request(row.request_id, row.prompt_len, row.max_new_tokens, output_len=row.output_len, index=index)

    def iteration(self, record: IterationRecord) -> None:
        activated = [request.request_id for request in record.activated]
        ran = [(chunk.request.request_id, chunk.length) for chunk in record.context]
        self.decisions.append((record.iteration, record.start_s, record.end_s, activated, ran, record.queued))

    def stretch(self, stretch: Stretch) -> None:
        for record in stretch.records():
            self.iteration(record)

    def left(self, request: Request, error: str | None) -> None:
        self.errors[request.request_id] = error

    def first_token_s(self, request_id: int) -> float:
        return next(end for _, _, end, _, ran, _ in self.decisions if request_id in dict(ran))


def test_refused_requests_do_not_delay_those_behind_them():
    """1 long request, 11 refused ones, 3 short ones: the look-ahead is full of requests that leave at once."""
    long, short = (0.0, 10, 15_000), (0.0, 10, 2)
    with_refused = Served([long, *[(0.0, REFUSED, 2)] * 11, *[short] * 3], CONFIG)
    without = Served([long, *[short] * 3], CONFIG)
    assert len(with_refused.errors) == 11
    assert [with_refused.first_token_s(i) for i in (12, 13, 14)] == [without.first_token_s(i) for i in (1, 2, 3)]
    assert with_refused.first_token_s(14) < 0.01


@pytest.mark.parametrize("clock", [VirtualClock, WallClock])
def test_a_closed_loop_ends_when_all_outstanding_requests_are_refused(clock):
    rows = [(0.0, REFUSED, 2)] * 9 + [(0.0, 10, 2)] * 3 + [(0.0, REFUSED, 2)] * 5
    served = Served(rows, CONFIG, concurrency=4, clock=clock())
    assert len(served.errors) == 14


rows = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 0.00001, 0.0005, 0.001, 0.0301]),
        st.one_of(st.just(REFUSED), st.integers(1, MAX_INPUT_LEN)),
        st.sampled_from([1, 2, 9, 70]),
    ),
    min_size=1,
    max_size=30,
).map(sorted)


@settings(max_examples=120, deadline=None)
@given(
    rows=rows,
    concurrency=st.sampled_from([None, None, 1, 3, 6]),
    keeps_arrivals=st.booleans(),
    batch_size=st.integers(1, 4),
    policy=st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
    num_blocks=st.sampled_from([10, 25, 1000]),
    is_virtual=st.sampled_from([True, True, False]),
)
def test_as_if_arrivals_were_looked_for_in_every_iteration(
    rows, concurrency, keeps_arrivals, batch_size, policy, num_blocks, is_virtual
):
    """Virtual clock: the schedule and all times are those of a loop that neither advances iterations together nor
    skips the look for arrivals. Wall clock: every request is answered once."""
    config = BatchingConfig(policy, batch_size, MAX_INPUT_LEN, 140, MAX_INPUT_LEN, 16, num_blocks)
    options = {"concurrency": concurrency, "keeps_arrivals": keeps_arrivals}
    if not is_virtual:
        Served(rows, config, clock=WallClock(), **options)
        return
    served, slow = Served(rows, config, **options), Served(rows, config, knows_arrivals=False, **options)
    event(f"refused: {bool(served.errors)}")
    assert served.decisions == slow.decisions
    assert served.errors == slow.errors
