"""Reuse of KV cache blocks as a client sees it: the same tokens, and which requests share blocks."""

from typing import Any

import pytest

from ifbbench import BatchManager, InferenceRequest, Retention, RetentionRange
from ifbbench.errors import InputError
from ifbbench.serving.library.client import Tensors

pytestmark = pytest.mark.usefixtures("small_model")

PROMPT = [*range(20, 60)]
UNHASHABLE: Any = []
PARAMS = {
    "device": "cpu",
    "tokens_per_block": 8,
    "max_num_tokens": 512,
    "kv_cache_config": {"enable_block_reuse": True, "max_tokens": 1024},
}


def serve_in_turn(
    requests: list[InferenceRequest], max_beam_width: int = 1, **changes: Any
) -> tuple[list[list[int]], BatchManager, list[str]]:
    """Serve one after the other; the output of each, and what went wrong."""
    outputs: list[list[int]] = []
    errors: list[str] = []
    waiting: list[InferenceRequest] = []

    def get(count: int) -> list[InferenceRequest]:
        return [waiting.pop()] if waiting else []

    def send(request_id: int, tensors: Tensors, is_final: bool, error: str) -> None:
        errors.append(error)
        outputs.append([] if error else tensors["output_ids"][0, 0].tolist())

    params = {**PARAMS, **changes}
    manager = BatchManager(
        "tiny", "IFB", max_beam_width, "max_utilization", get, send, optional_params=params, start=False
    )
    for request in requests:
        waiting.append(request)
        while manager.step():
            pass
    manager.close()
    return outputs, manager, errors


def reused_blocks(manager: BatchManager) -> int:
    return manager.kv_cache.counters.reused


def test_a_repeated_prompt_gets_the_same_tokens_from_fewer_computed_ones():
    requests = [InferenceRequest(index, PROMPT, 10) for index in range(3)]
    outputs, manager, _ = serve_in_turn(requests)
    assert outputs[0] == outputs[1] == outputs[2]
    # The second and the third find all 5 blocks of the 39 tokens before the last, the fifth of them in part.
    assert reused_blocks(manager) == 2 * 5


@pytest.mark.parametrize(
    "other",
    [{"cache_salt": "tenant"}, {"lora_task_id": 3}, {"token_extra_ids": [1] * len(PROMPT)}],
)
def test_what_makes_keys_and_values_differ_keeps_requests_apart(other: dict[str, Any]):
    alone = InferenceRequest(0, PROMPT, 4)
    _, manager, _ = serve_in_turn([alone, InferenceRequest(1, PROMPT, 4, **other)])
    assert reused_blocks(manager) == 0
    _, manager, _ = serve_in_turn([InferenceRequest(0, PROMPT, 4, **other), InferenceRequest(1, PROMPT, 4, **other)])
    assert reused_blocks(manager) == 5


def test_a_conversation_worth_keeping_outlives_many_others():
    keep = Retention([RetentionRange(0, None, priority=90)])
    others = [InferenceRequest(index, [index] * 100, 4) for index in range(1, 20)]
    again = InferenceRequest(99, PROMPT, 4)
    found = []
    for retention in (Retention(), keep):
        first = InferenceRequest(0, PROMPT, 4, retention=retention)
        small: dict[str, Any] = {"kv_cache_config": {"enable_block_reuse": True, "max_tokens": 256}}
        _, manager, _ = serve_in_turn([first, *others, again], **small)
        found.append(reused_blocks(manager))
    assert found == [0, 5]


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (InferenceRequest(0, PROMPT, 4, token_extra_ids=[1, 2]), "2 for 40 input_ids"),
        (InferenceRequest(0, PROMPT, 4, cache_salt=UNHASHABLE), "hashable"),
        (InferenceRequest(0, PROMPT, 4, retention=Retention([RetentionRange(5, 5, 10)])), "positive length"),
        (InferenceRequest(0, PROMPT, 4, retention=Retention(decode_priority=101)), "0 to 100"),
    ],
)
def test_what_cannot_be_read_is_refused(request_: InferenceRequest, named: str):
    _, _, errors = serve_in_turn([request_])
    assert named in errors[0]


@pytest.mark.parametrize("length", [15, 16, 17, 32])
def test_beams_with_reuse_fit_the_smallest_pool_that_admission_lets_them_into(length: int):
    """A full last block is each beam's own then, so a prompt takes more than its tokens need."""
    for blocks in range(1, 20):
        sizes: dict[str, Any] = {"kv_cache_config": {"enable_block_reuse": True, "max_tokens": 8 * blocks}}
        requests = [InferenceRequest(index, [7] * length, 6, beam_width=3) for index in range(2)]
        outputs, manager, errors = serve_in_turn(requests, max_beam_width=3, **sizes)
        assert manager.kv_cache.free_blocks == blocks
        if errors == ["", ""]:
            assert outputs[0] == outputs[1]
            return
        assert all("KV cache blocks" in error for error in errors)
    raise AssertionError("none of the pools was large enough")


def test_a_truncated_conversation_is_found_up_to_where_it_was_cut():
    request = InferenceRequest(0, PROMPT, 4)
    waiting = [request]
    said: list[list[int]] = []

    def get(count: int) -> list[InferenceRequest]:
        return [waiting.pop()] if waiting else []

    def send(request_id: int, tensors: Tensors, is_final: bool, error: str) -> None:
        said.append(tensors["output_ids"][0, 0].tolist())

    manager = BatchManager("tiny", "IFB", 1, "max_utilization", get, send, optional_params=PARAMS, start=False)
    found = []
    for keep in (None, 16, 0):
        if keep is not None:
            manager.truncate_blocks(InferenceRequest(1, said[-1], 1), keep)
            waiting.append(request)
        before = reused_blocks(manager)
        while manager.step():
            pass
        found.append(reused_blocks(manager) - before)
    with pytest.raises(InputError, match="-1"):
        manager.truncate_blocks(request, -1)
    manager.close()
    # Nothing at first; then the two blocks of 8 tokens that were kept; then none.
    assert found == [0, 2, 0]
