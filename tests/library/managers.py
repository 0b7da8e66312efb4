"""Batch managers for tests: small limits, and executors with known tokens or failures."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ifbbench import BatchManager, InferenceRequest
from ifbbench.engine.batch import Batch, StepOutputs
from ifbbench.engine.interfaces import Executor
from ifbbench.engine.request import Request
from tests.engine.engine import CheckingExecutor, token_of
from tests.library.client import PATIENCE_S, Client

TOKENS_PER_BLOCK = 4
SMALL = {
    "max_batch_size": 4,
    "max_num_tokens": 32,
    "max_seq_len": 40,
    "tokens_per_block": TOKENS_PER_BLOCK,
    "kv_cache_config": {"max_tokens": 160},
}


def prompt_of(request_id: int, length: int) -> list[int]:
    """The prompt that `CheckingExecutor` expects of this id."""
    request = Request(request_id, 1, 1)
    return [token_of(request, position) for position in range(length)]


def output_of(request_id: int, prompt_len: int, length: int) -> list[int]:
    """The output that `CheckingExecutor` makes for it."""
    request = Request(request_id, 1, 1)
    return [token_of(request, prompt_len + position) for position in range(length)]


def request_of(request_id: int, prompt_len: int = 5, max_new_tokens: int = 4, **fields: Any) -> InferenceRequest:
    """A request with the prompt of `prompt_of`."""
    return InferenceRequest(request_id, prompt_of(request_id, prompt_len), max_new_tokens, **fields)


class FailingExecutor:
    """A CheckingExecutor that raises in steps of some numbers, when submitted or when collected."""

    def __init__(self, fails: Callable[[int], bool], at: str) -> None:
        self._inner = CheckingExecutor(TOKENS_PER_BLOCK)
        self._fails = fails
        self._at = at
        self._submitted = self._collected = 0

    def submit(self, batch: Batch) -> None:
        self._submitted += 1
        if self._at == "submit" and self._fails(self._submitted):
            raise RuntimeError("out of luck")
        self._inner.submit(batch)

    def collect(self) -> StepOutputs:
        self._collected += 1
        outputs = self._inner.collect()
        if self._at == "collect" and self._fails(self._collected):
            raise RuntimeError("out of luck")
        return outputs

    def close(self) -> None:
        self._inner.close()


class CountingExecutor:
    """Makes the tokens 0, 1, 2 …, whatever the prompts are, one number for all outputs of a step."""

    def __init__(self) -> None:
        self._answers: list[int] = []
        self.steps = 0

    def submit(self, batch: Batch) -> None:
        self._answers.append(sum(chunk.is_last for chunk in batch.context) + len(batch.slots))

    def collect(self) -> StepOutputs:
        self.steps += 1
        return StepOutputs(np.full(self._answers.pop(0), self.steps - 1, np.int32))

    def close(self) -> None:
        """Nothing to give back."""


def manager_of(
    client: Client,
    executor: Executor | str | None = None,
    model_type: str = "InflightFusedBatching",
    policy: str = "guaranteed_no_evict",
    start: bool = True,
    max_beam_width: int = 1,
    callbacks: dict[str, Any] | None = None,
    **options: Any,
) -> BatchManager:
    """A manager with the limits of SMALL; `options` go before them, and `callbacks` before the client's."""
    return BatchManager(
        executor or CheckingExecutor(TOKENS_PER_BLOCK),
        model_type,
        max_beam_width,
        policy,
        start=start,
        optional_params={**SMALL, **options},
        **{**client.callbacks, **(callbacks or {})},
    )


def tiny_manager_of(client: Client, **options: Any) -> BatchManager:
    """The same with the built-in model on the CPU."""
    return manager_of(client, "tiny", device="cpu", **options)


def check_nothing_leaked(manager: BatchManager) -> None:
    """All blocks are back."""
    manager.kv_cache.check_consistency()
    assert manager.kv_cache.free_blocks == manager.kv_cache.num_blocks


def close_when_ended(manager: BatchManager) -> None:
    """Close the manager once its loop has ended by itself."""
    deadline = time.monotonic() + PATIENCE_S
    while manager.is_running:
        assert time.monotonic() < deadline, "the loop does not end"
        time.sleep(0.001)
    manager.close()
