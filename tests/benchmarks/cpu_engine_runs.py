"""One engine on the CPU over one checkpoint.

`python -m tests.benchmarks.cpu_engine_runs ENGINE DIRECTORY DTYPE THREADS RUNS` prints one line of JSON for each
run: wall and CPU seconds, and a digest of all output tokens. `cpu_engines` runs it in a process of its own, so that no
engine sees another's threads and memory.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

NUM_REQUESTS = 64
MAX_BATCH_SIZE = 16
MAX_NUM_TOKENS = 512
Prompts = list[list[int]]
Outputs = list[list[int]]
Run = Callable[[], Outputs]


def workload(vocab_size: int) -> tuple[Prompts, list[int]]:
    """Prompts of 16 to 256 tokens, and output lengths of 16 to 128."""
    random = np.random.default_rng(0)
    prompt_lens, output_lens = random.integers(16, 257, NUM_REQUESTS), random.integers(16, 129, NUM_REQUESTS)
    return [random.integers(0, vocab_size, length).tolist() for length in prompt_lens], output_lens.tolist()


def ifbbench(directory: str, dtype: str, prompts: Prompts, lengths: list[int]) -> Run:
    from ifbbench.api.engine import build_engine, warm_up
    from ifbbench.batching.manager import BatchManager
    from ifbbench.batching.request import Request
    from ifbbench.clock import WallClock
    from ifbbench.config import RunConfig

    engine = build_engine(RunConfig(
        model=directory, device="cpu", dtype={"float32": "float32", "bfloat16": "bf16"}[dtype],
        max_batch_size=MAX_BATCH_SIZE, max_num_tokens=MAX_NUM_TOKENS, enable_chunked_context=True, max_seq_len=512,
    ))  # fmt: skip
    warm_up(engine)

    def run() -> Outputs:
        waiting = [Request(index, len(prompt), length, index=index, prompt_tokens=np.array(prompt, np.int32))
                   for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))]
        outputs: dict[int, list[int]] = {}

        def get_requests(count: int) -> list[Request]:
            taken = waiting[:count]
            del waiting[:count]
            return taken

        def send_response(response: Any) -> None:
            outputs[response.request.request_id] = response.output_tokens.tolist()

        manager = BatchManager(engine.limits, engine.executor, WallClock(), get_requests, send_response)
        while manager.step():
            pass
        return [outputs[index] for index in range(len(prompts))]

    return run


def transformers_generate(directory: str, dtype: str, prompts: Prompts, lengths: list[int]) -> Run:
    """Batches of 16, padded on the left, each as long as its longest output."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()

    def run() -> Outputs:
        outputs: Outputs = []
        for first in range(0, len(prompts), MAX_BATCH_SIZE):
            part = prompts[first : first + MAX_BATCH_SIZE]
            wanted = lengths[first : first + MAX_BATCH_SIZE]
            width = max(map(len, part))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in part])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in part])
            with torch.inference_mode():
                made = model.generate(
                    input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=max(wanted),
                    min_new_tokens=max(wanted), pad_token_id=0, eos_token_id=None,
                )[:, width:]  # fmt: skip
            outputs += [tokens[:length].tolist() for tokens, length in zip(made, wanted, strict=True)]
        return outputs

    return run


def vllm(directory: str, dtype: str, prompts: Prompts, lengths: list[int]) -> Run:
    from vllm import LLM, SamplingParams

    engine = LLM(directory, skip_tokenizer_init=True, dtype=dtype, max_model_len=512, max_num_seqs=MAX_BATCH_SIZE,
                 max_num_batched_tokens=MAX_NUM_TOKENS)  # fmt: skip
    params = [SamplingParams(ignore_eos=True, detokenize=False, max_tokens=length, temperature=0) for length in lengths]

    def run() -> Outputs:
        made = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in made]

    return run


ENGINES = {"ifbbench": ifbbench, "transformers": transformers_generate, "vllm": vllm}


def main() -> None:
    """Print a line of JSON for each run; the first one, not printed, is to warm up."""
    engine, directory, dtype, threads, runs = sys.argv[1:]
    if engine != "vllm":  # which binds its threads itself, by OMP_NUM_THREADS
        import torch

        torch.set_num_threads(int(threads))
    vocab_size = json.loads((Path(directory) / "config.json").read_text())["vocab_size"]
    prompts, lengths = workload(vocab_size)
    run = ENGINES[engine](directory, dtype, prompts, lengths)
    run()
    for _ in range(int(runs)):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        outputs = run()
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        digest = hashlib.sha256(json.dumps(outputs).encode()).hexdigest()[:12]
        print("RUN " + json.dumps({"wall_s": wall_s, "cpu_s": cpu_s, "tokens": digest}), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    main()
