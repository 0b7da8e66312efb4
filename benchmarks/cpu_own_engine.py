"""The requests of `cpu_engines` through this project's own loop, with whatever executor."""

import numpy as np

from benchmarks.cpu_task import MAX_BATCH_SIZE, MAX_NUM_TOKENS, MAX_SEQ_LEN, Task, Tokens
from ifbbench.clock import WallClock
from ifbbench.engine.interfaces import Executor
from ifbbench.engine.request import Request
from ifbbench.engine.responses import Response
from ifbbench.schedulers.engines import make_loop
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.settings.config import RunConfig

DTYPE_NAMES = {"float32": "float32", "bfloat16": "bf16"}


def settings(task: Task, device: str) -> RunConfig:
    """16 requests at once, 512 tokens an iteration."""
    return RunConfig(
        model=str(task.directory),
        device=device,
        dtype=DTYPE_NAMES[task.dtype],
        max_batch_size=MAX_BATCH_SIZE,
        max_num_tokens=MAX_NUM_TOKENS,
        enable_chunked_context=True,
        max_seq_len=MAX_SEQ_LEN,
    )


def serve(task: Task, limits: BatchingConfig, executor: Executor) -> Tokens:
    """The tokens of each request; none where the executor makes none."""
    waiting = [
        Request(index, len(prompt), length, index=index, prompt_tokens=np.array(prompt, np.int32))
        for index, (prompt, length) in enumerate(zip(task.prompts, task.lengths, strict=True))
    ]
    outputs: Tokens = [[] for _ in waiting]

    def get_requests(count: int) -> list[Request]:
        taken = waiting[:count]
        del waiting[:count]
        return taken

    def send_response(response: Response) -> None:
        if response.output_tokens is not None:
            outputs[response.request.request_id] = response.output_tokens.tolist()

    manager = make_loop(limits, executor, WallClock(), get_requests, send_response)
    while manager.step():
        pass
    return outputs
