"""The micro-batch scheduler, one small story each. See `scenario.py` for how to read a timeline."""

import pytest

from ifbbench.engine.request import Request
from ifbbench.kv.attention_window import UNLIMITED
from ifbbench.schedulers.tensorrt_llm.chunks import ChunkLimits
from ifbbench.schedulers.tensorrt_llm.micro_batch import MicroBatchScheduler
from tests.conformance.micro_batch_loop import MicroBatchLoop
from tests.engine.scenario import asks, micro_batch_timeline

FCFS, EQUAL = "first_come_first_served", "equal_progress"


def chunked(batch_size, num_tokens, unit, longest=UNLIMITED, policy=FCFS):
    return MicroBatchScheduler(batch_size, num_tokens, policy, ChunkLimits(unit, longest))


@pytest.mark.parametrize(
    ("scheduler", "requests", "timeline"),
    [
        pytest.param(
            MicroBatchScheduler(2), [asks(10, 80)] * 4, "1:a10b10 79:AB 1:c10d10 79:CD 10:.", id="batch size binds"
        ),
        pytest.param(
            MicroBatchScheduler(4, 12),
            [asks(10, 10)] * 4,
            "1:a10 1:b10A 1:c10AB 7:ABC 1:d10BC 1:CD 8:D 1:.",
            id="token budget lets one prompt in at a time",
        ),
        pytest.param(
            MicroBatchScheduler(4, 12),
            [asks(10, 4, beam_width=4)] * 2,
            "1:a10 3:A 1:b10 3:B 1:.",
            id="each beam costs a token",
        ),
        pytest.param(
            MicroBatchScheduler(4, 12),
            [asks(2, 4, beam_width=width) for width in (1, 2, 1)],
            "1:a2b2c2 3:AC 3:B 1:.",
            id="another beam width is passed over",
        ),
        pytest.param(
            MicroBatchScheduler(4, 5),
            [asks(1, 3, beam_width=width) for width in (2, 4, 2)],
            "1:a1b1c1 2:A 2:B 2:C 1:.",
            id="another beam width above the token budget ends the batch",
        ),
        pytest.param(
            MicroBatchScheduler(64, 4096),
            [asks(1024, 10, num_draft_tokens=17)] * 4,
            "1:a1024b1024c1024 1:d1024ABC 8:ABCD 1:D 1:.",
            id="drafts count in whole prompts",
        ),
        pytest.param(
            chunked(2, UNLIMITED, 5, longest=12, policy=EQUAL),
            [asks(10, 5)] * 3 + [asks(17, 5)],
            "1:a10b10 4:AB 1:c10d10 1:d7C 3:CD 1:D 1:.",
            id="longest context cuts a prompt",
        ),
        pytest.param(
            chunked(4, 10, 4), [asks(11, 2), asks(2, 2)], "1:a8b2 1:a3B 1:A 1:.", id="a short prompt uses the rest"
        ),
        pytest.param(
            chunked(4, 5, 2),
            [asks(2, 6), asks(9, 2), asks(1, 3)],
            "1:a2b2c1 2:b2AC 1:b3A 1:AB 1:A 1:.",
            id="generation takes its tokens before chunks",
        ),
        pytest.param(
            chunked(2, 4, 4),
            [asks(8, 2), asks(8, 2), asks(1, 2)],
            "2:a4 1:A 2:b4 1:c1B 1:C 1:.",
            id="a candidate without a chunk still counts in the batch size",
        ),
    ],
)
def test_timeline(scheduler, requests, timeline):
    iterations = sum(int(run.split(":")[0]) for run in timeline.split())
    assert micro_batch_timeline(scheduler, requests, iterations) == timeline


def test_micro_batches_take_turns_and_keep_their_requests():
    two = micro_batch_timeline(MicroBatchScheduler(2), [asks(10, 4)] * 4, iterations=9, num_micro_batches=2)
    assert two == "1:a10b10 1:c10d10 1:AB 1:CD 1:AB 1:CD 1:AB 1:CD 1:."
    chunks = [asks(8, 2), asks(8, 2), asks(1, 2)]
    assert micro_batch_timeline(chunked(2, 4, 4), chunks, 8, num_micro_batches=2) == (
        "1:a4 1:b4 1:a4 1:b4 1:c1A 1:B 1:C 1:."
    )


@pytest.mark.parametrize(
    ("scheduler", "prompt", "drafts", "kept"),
    [
        # Cost of prompt and drafts just above the budget: the chunk leaves 7 places in its last unit of 64.
        (chunked(64, 8192, 64), 2041, [8, 8, 8, 8], [7, 7, 7, 7]),
        # Whole units of drafts do not fit; the last request gets what the budget leaves.
        (chunked(64, 40, 16, longest=64), 3, [17, 17, 17], [13, 13, 5]),
        # All fit: nothing is cut, though the chunk fills its unit.
        (chunked(64, 40, 4), 8, [8, 8], [8, 8]),
    ],
)
def test_drafts_are_cut_to_the_last_unit_and_stay_cut(scheduler, prompt, drafts, kept):
    requests = [Request(index, prompt, 9, num_draft_tokens=count) for index, count in enumerate(drafts)]
    loop = MicroBatchLoop(scheduler, requests)
    for _ in range(3):
        loop.step()
        assert [request.num_draft_tokens for request in requests] == kept


def test_drafts_set_again_count_in_the_next_step():
    requests = [Request(0, 1, 9), Request(1, 1, 9)]
    loop = MicroBatchLoop(MicroBatchScheduler(4, 6), requests)
    assert loop.step().ids == [0, 1]
    requests[0].set_draft_tokens(5)
    assert loop.step().ids == [0]
    requests[0].set_draft_tokens(4)
    assert loop.step().ids == [0, 1]
