"""What every engine of `cpu_engines` is given to do. Imports no engine, for each may be installed elsewhere."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

NUM_REQUESTS = 64
MAX_BATCH_SIZE = 16
MAX_NUM_TOKENS = 512
MAX_SEQ_LEN = 512
DTYPES = ("float32", "bfloat16")
# Token ids, a list for each request; and what answers all requests of a task.
Tokens = list[list[int]]
Run = Callable[[], Tokens]


@dataclass(frozen=True, slots=True)
class Task:
    """Requests that are all there at once.

    directory: a Llama checkpoint of Hugging Face. dtype: one of `DTYPES`. threads: to compute with.
    prompts: of 16 to 256 token ids. lengths: how many tokens each is to be answered with, 16 to 128.
    """

    directory: Path
    dtype: str
    threads: int
    prompts: Tokens
    lengths: list[int]

    @classmethod
    def of_checkpoint(cls, directory: Path, dtype: str, threads: int) -> "Task":
        """The same requests for every engine."""
        vocab_size = json.loads((directory / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        random = np.random.default_rng(0)
        prompt_lens, lengths = random.integers(16, 257, NUM_REQUESTS), random.integers(16, 129, NUM_REQUESTS)
        prompts = [random.integers(0, vocab_size, length).tolist() for length in prompt_lens]
        return cls(directory, dtype, threads, prompts, lengths.tolist())


def gguf_path(directory: Path, dtype: str) -> Path:
    """Where a checkpoint lies as a GGUF file, for llama.cpp."""
    return directory / f"{dtype}.gguf"
