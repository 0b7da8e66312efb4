"""Tries of the library: requests with fields of wrong types, settings of a manager, and policies that misbehave."""

import random
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from ifbbench import BatchManager, InferenceRequest, SamplingParams
from ifbbench.engine.retention import Retention
from ifbbench.errors import InputError
from tests.attack import hostile
from tests.attack.commands import Outcomes, fresh
from tests.attack.inputs import ROWS, SIMULATED, json_lines
from tests.engine.engine import CheckingExecutor
from tests.library.client import Client
from tests.library.managers import SMALL, TOKENS_PER_BLOCK, request_of, tiny_manager_of

# What callers hand over in the place of numbers and lists.
OBJECTS: tuple[Any, ...] = (
    object(), len, int, b"\xff", 1j, {1}, {}, range(3), iter([1]), np.array(3), np.zeros((2, 2)), np.array(["a"]),
    np.array([np.nan]), np.array([], np.int32), np.int64(3), np.float32("nan"), np.array([None]), np.array([2**63],
    np.uint64), [[1], [2, 3]], [None], [1.5], [True], ["1"], [2**70], (), Retention(), SamplingParams(), Exception(),
)  # fmt: skip


def _object(draw: random.Random) -> Any:
    return draw.choice(OBJECTS) if draw.random() < 0.4 else hostile.value(draw)


def request_try(outcomes: Outcomes, folder: Path, draw: random.Random) -> None:
    """A manager with good requests before and after one with a hostile field, and the tensors of one. Each request has
    one final response, and the good ones their tokens."""
    names = [one.name for one in fields(InferenceRequest)]
    values: dict[str, Any] = {"request_id": 5, "input_ids": [1, 2, 3], "max_new_tokens": 3}
    for name in draw.sample(names, draw.choice((1, 1, 2))):
        values[name] = _object(draw)
    if draw.random() < 0.3:
        sampling = draw.choice([one.name for one in fields(SamplingParams)])
        values["sampling"] = SamplingParams(**{sampling: _object(draw)})
    tensors = {"input_ids": np.array([[1, 2]]), "request_output_len": np.array([[2]])}
    changed: Any = (
        hostile.changed(tensors, draw)
        if draw.random() < 0.5
        else tensors
        | {
            draw.choice(
                (
                    "beam_width",
                    "end_id",
                    "bad_words_list",
                    "runtime_top_k",
                    "streaming",
                    "lora_config",
                    "embedding_bias",
                )
            ): _object(draw)
        }
    )
    outcomes.call(lambda: _served(values, changed, draw.random() < 0.5), f"InferenceRequest({values!r:.600}) {changed}")


def _served(values: dict[str, Any], tensors: Any, streams: bool) -> int:
    # Ids that no hostile request has: of two requests with one id, an error does not say which it is of.
    requests = [request_of(1_234_567), request_of(1_234_568, streaming=streams)]
    for make in (lambda: InferenceRequest(**values), lambda: InferenceRequest.from_tensors(7, tensors)):
        try:
            requests.insert(1, make())
        except InputError:
            continue
    client = Client(requests)
    with tiny_manager_of(client, max_beam_width=2, cpu_threads=1):
        for answer in client.answers:
            answer.wait()
    assert [answer.finals for answer in client.answers] == [1] * len(requests), [one.error for one in client.answers]
    for answer in (client.answers[0], client.answers[-1]):
        assert answer.error == "", answer.error
        assert len(answer.tokens) == 4
    return 0


def manager_try(outcomes: Outcomes, folder: Path, draw: random.Random) -> None:
    """The arguments and optional parameters of a manager."""
    arguments: list[Any] = ["inflight_fused", 1, "guaranteed_no_evict"]
    if draw.random() < 0.4:
        arguments[draw.randrange(3)] = _object(draw)
    parameters: Any = SMALL | {"max_queue_size": 5, "enable_trt_overlap": False}
    parameters = (
        hostile.changed(parameters, draw)
        if draw.random() < 0.6
        else parameters
        | {
            draw.choice(("maxBatchSize", "max_attention_window", "slo", "kvCacheConfig", "seed", "policy")): _object(
                draw
            )
        }
    )
    outcomes.call(lambda: _managed(arguments, parameters), f"BatchManager {arguments} {parameters!r:.600}")


def _managed(arguments: list[Any], parameters: Any) -> int:
    client = Client([request_of(1)])
    callbacks: dict[str, Any] = client.callbacks | {"optional_params": parameters}
    BatchManager(CheckingExecutor(TOKENS_PER_BLOCK), *arguments, **callbacks, start=False).abort()
    return 0


POLICY = """
import asyncio
from ifbbench.schedulers.tensorrt_llm.policies import CapacityDecision, GuaranteedNoEvict, LeftOut, Limit, Pause
from ifbbench.engine.request import Request

class Policy(GuaranteedNoEvict):
    {facts}
    count = 0
    def __init__(self, max_num_requests):
        super().__init__(max_num_requests)
        {beginning}
    def schedule(self, active, kv_cache):
        self.count += 1
        decision = super().schedule(active, kv_cache)
        requests = list(active)
        if self.count >= {turn}:
            {action}
        return decision
"""
ACTIONS = (
    "raise ValueError('x')", "raise SystemExit(0)", "raise SystemExit", "raise KeyboardInterrupt",
    "raise GeneratorExit", "raise asyncio.CancelledError", "raise MemoryError", "raise RecursionError",
    "raise StopIteration",
    "raise Exception('\\x1b[31m \\ud800')", "return None", "return 5", "return 'all'", "return []", "return object()",
    "return CapacityDecision", "return CapacityDecision()", "return (decision,)", "decision.admitted = None",
    "decision.admitted = requests", "decision.admitted = requests * 2", "decision.admitted = [1, 2]",
    "decision.admitted = [None]", "decision.admitted = [Request(99, 1, 1)]", "decision.held = None",
    "decision.held = requests", "decision.held = requests * 2", "decision.held = [5]", "decision.paused = requests",
    "decision.paused = [Pause(one, one, Limit.KV_BLOCKS) for one in requests]", "decision.paused = [5]",
    "decision.paused = [Pause(one, one, 'mine') for one in requests] * 2", "decision.left_out = requests[0]",
    "decision.left_out = LeftOut(requests[0], None)", "decision.left_out = LeftOut(5, Limit.KV_BLOCKS)",
    "decision.left_out = LeftOut(requests[0], object())", "decision.left_out = LeftOut(requests[0], '\\ud800')",
    "decision.generation_first = 'x'", "decision.stands_until_block = 'yes'", "active.clear()", "del active.context[:]",
    "active.context.append(5)", "decision.admitted = iter(requests)", "decision.admitted = tuple(decision.admitted)",
    "self.schedule(active, kv_cache)", "import os; os.chdir('/')", "kv_cache.free(requests[0])", "1 / 0",
    "decision.paused = [Pause(Request(9, 1, 1), requests[0], Limit.KV_BLOCKS)]",
)  # fmt: skip
BEGINNINGS = ("pass",) * 8 + (
    "raise ValueError('x')",
    "raise SystemExit(3)",
    "self.schedule = None",
    "self.max_num_requests = 'x'",
    "raise KeyboardInterrupt",
)
FACTS = ("may_pause = True",) * 6 + ("may_pause = False", "is_steady = True", "is_steady = 'x'", "may_pause = None")


def policy_try(outcomes: Outcomes, folder: Path, draw: random.Random) -> None:
    """A run with a policy that raises, answers nonsense or changes what it may not."""
    trace = folder / "trace.jsonl"
    trace.write_bytes(json_lines(ROWS))
    module = f"policy_{folder.name}_{draw.randrange(10**9)}"
    text = POLICY.format(
        facts=draw.choice(FACTS),
        beginning=draw.choice(BEGINNINGS),
        turn=draw.choice((1, 1, 2, 5)),
        action=draw.choice(ACTIONS),
    )
    (folder / f"{module}.py").write_text(text)
    options = draw.choice(
        (
            (),
            (),
            ("--enable_kv_cache_reuse",),
            ("--enable_chunked_context",),
            ("--type", "v1"),
            ("--max_batch_size", "2"),
            ("--enable_trt_overlap",),
        )
    )
    outcomes.attack(
        [
            "run",
            str(trace),
            *SIMULATED,
            *options,
            "--policy",
            f"{module}:Policy",
            "--output",
            str(fresh(folder, "run")),
        ],
        text,
    )
