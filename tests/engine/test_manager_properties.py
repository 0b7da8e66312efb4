"""What holds for every run of the batch manager, whatever the requests, limits and policy."""

from collections import Counter

import numpy as np
from hypothesis import event
from hypothesis import strategies as st

from ifbbench.schedulers.limits import BatchingConfig
from tests.drawing import holds
from tests.engine.engine import CheckingExecutor, Run, run, scheduler_of
from tests.engine.strategies import Wish, configs, expected_outputs, is_possible, wishes


def check_iteration(manager, record):
    config = scheduler_of(manager).config
    scheduler_of(manager).kv_cache.check_consistency()
    assert record.budget_used <= config.max_num_tokens
    assert len(record.context) + record.num_generation <= config.max_batch_size
    assert record.context or record.num_generation or record.paused
    if config.policy != "max_utilization":
        assert record.paused == []


def check_run(config: BatchingConfig, wanted: list[Wish]) -> Run:
    requests = [wish.request(request_id) for request_id, wish in enumerate(wanted)]
    possible = {request.request_id for request in requests if is_possible(request, config)}
    executor = CheckingExecutor(config.tokens_per_block)
    result = run(config, list(zip((wish.at for wish in wanted), requests, strict=True)), executor, check_iteration)
    assert Counter(response.request.request_id for response in result.responses) == Counter(range(len(requests)))
    assert {request.request_id for request in result.completed} == possible
    for response in result.responses:
        if response.output_tokens is not None:
            wish = wanted[response.request.request_id]
            assert response.output_tokens.tolist() == expected_outputs(wish, response.request, config)
    assert scheduler_of(result.manager).kv_cache.free_blocks == config.num_blocks
    assert len(scheduler_of(result.manager).active) == 0
    check_totals(result, executor)
    return result


def check_totals(result: Run, executor: CheckingExecutor) -> None:
    """Each token of prompt and output but the last is computed once, and once more for each that is recomputed."""
    lengths = {
        response.request.request_id: response.request.original_prompt_len + len(response.output_tokens)
        for response in result.responses
        if response.output_tokens is not None
    }
    assert set(executor.computed) == {(key, index) for key, length in lengths.items() for index in range(length - 1)}
    again: Counter[int] = Counter()
    for (request_id, _), count in executor.computed.items():
        again[request_id] += count - 1
    assert again == Counter({request.request_id: request.recomputed_tokens for request in result.completed})
    assert sum(record.recomputed for record in result.records) == again.total()
    assert sum(record.budget_used for record in result.records) == executor.computed.total()
    once = sum(length - 1 for length in lengths.values())
    assert executor.computed.total() == once + again.total()


@holds(120, 10_000, config=configs(), wanted=st.lists(wishes(), min_size=1, max_size=14))
def test_every_run_ends_well_within_its_limits(config, wanted):
    result = check_run(config, wanted)
    event(f"{config.policy}, pauses: {any(record.paused for record in result.records)}")


@holds(50, 1000, config=configs(), wanted=st.lists(wishes(), min_size=2, max_size=10))
def test_equal_priorities_start_first_come_first_served(config, wanted):
    limits = {name: getattr(config, name) for name in ("max_batch_size", "max_num_tokens", "max_seq_len")}
    whole_prompts = BatchingConfig(
        policy="guaranteed_no_evict",
        max_input_len=min(config.max_seq_len - 1, config.max_num_tokens),
        tokens_per_block=config.tokens_per_block,
        num_blocks=config.num_blocks,
        **limits,
    )
    result = check_run(whole_prompts, wanted)
    started: dict[int, int] = {}
    arrived: dict[float, list[int]] = {}
    for record in result.records:
        for request in record.activated:
            arrived.setdefault(request.priority, []).append(request.request_id)
        for chunk in record.context:
            started[chunk.request.request_id] = record.iteration
    for request_ids in arrived.values():
        order = [started[request_id] for request_id in request_ids]
        assert order == sorted(order)


def test_a_crowd_under_pressure_is_paused_many_times_and_still_served():
    rng = np.random.default_rng(5)
    wanted = [
        Wish(int(at), int(prompt), int(new), int(new), 0.5, None)
        for at, prompt, new in zip(
            rng.integers(0, 60, 80), rng.integers(1, 25, 80), rng.integers(5, 20, 80), strict=True
        )
    ]
    config = BatchingConfig("max_utilization", 16, 64, 45, 44, 4, 30, chunk_unit=4)
    result = check_run(config, wanted)
    assert sum(len(record.paused) for record in result.records) > 20
