"""One engine on the CPU over one checkpoint.

`python -m benchmarks.cpu_engine_runs ENGINE DIRECTORY DTYPE THREADS RUNS` prints one line of JSON for each
run: wall and CPU seconds, the engine's version and all output tokens. `cpu_engines` runs it in a process of its own, so
that no engine sees another's threads and memory.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cpu_llama_cpp import llama_cpp
from benchmarks.cpu_task import MAX_BATCH_SIZE, MAX_NUM_TOKENS, MAX_SEQ_LEN, Run, Task, Tokens

TOKENS_PER_PAGE = 32


@contextmanager
def ifbbench(task: Task) -> Iterator[Run]:
    """This project's own."""
    import torch

    from benchmarks.cpu_own_engine import serve, settings
    from ifbbench.build.engine import build_engine, warm_up

    torch.set_num_threads(task.threads)
    engine = build_engine(settings(task, "cpu"), owns_process=True)
    warm_up(engine)
    yield lambda: serve(task, engine.limits, engine.executor)
    engine.executor.close()


@contextmanager
def transformers_generate(task: Task) -> Iterator[Run]:
    """Batches of 16, padded on the left, each as long as its longest output."""
    import torch

    model = _transformers_model(task)

    def run_batch(prompts: Tokens, lengths: list[int]) -> Tokens:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            made = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max(lengths),
                min_new_tokens=max(lengths),
                pad_token_id=0,
                eos_token_id=None,
            )[:, width:]
        return [tokens[:length].tolist() for tokens, length in zip(made, lengths, strict=True)]

    def run() -> Tokens:
        outputs: Tokens = []
        for first in range(0, len(task.prompts), MAX_BATCH_SIZE):
            part = slice(first, first + MAX_BATCH_SIZE)
            outputs += run_batch(task.prompts[part], task.lengths[part])
        return outputs

    yield run


@contextmanager
def transformers_continuous(task: Task) -> Iterator[Run]:
    """Its continuous batching, without its prefix cache, for every run has the same prompts."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        page_size=TOKENS_PER_PAGE,
        num_blocks=MAX_BATCH_SIZE * MAX_SEQ_LEN // TOKENS_PER_PAGE,
        max_batch_tokens=MAX_NUM_TOKENS,
        max_requests_per_batch=MAX_BATCH_SIZE,
        allow_block_sharing=False,
    )
    model = _transformers_model(task)
    # Stopping its thread takes up to a tenth of a second, so it goes on from run to run.
    with model.continuous_batching_context_manager(greedy, continuous_batching_config=batching) as manager:

        def run() -> Tokens:
            names = [
                manager.add_request(prompt, max_new_tokens=length)
                for prompt, length in zip(task.prompts, task.lengths, strict=True)
            ]
            outputs: dict[str, list[int]] = {}
            while len(outputs) < len(names):
                answer = manager.get_result()
                if answer is None or answer.error is not None:
                    raise RuntimeError(f"continuous batching ended: {answer and answer.error}")
                outputs[answer.request_id] = answer.generated_tokens
            return [outputs[name] for name in names]

        yield run


def _transformers_model(task: Task) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(task.threads)
    return AutoModelForCausalLM.from_pretrained(task.directory, dtype=getattr(torch, task.dtype)).eval()


@contextmanager
def vllm(task: Task) -> Iterator[Run]:
    """It binds its threads itself, by OMP_NUM_THREADS. Without its prefix cache, for every run has the same prompts."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(task.directory),
        skip_tokenizer_init=True,
        dtype=task.dtype,
        max_model_len=MAX_SEQ_LEN,
        max_num_seqs=MAX_BATCH_SIZE,
        max_num_batched_tokens=MAX_NUM_TOKENS,
        enable_prefix_caching=False,
    )
    parameters = [
        SamplingParams(ignore_eos=True, detokenize=False, max_tokens=length, temperature=0) for length in task.lengths
    ]

    def run() -> Tokens:
        made = engine.generate([{"prompt_token_ids": prompt} for prompt in task.prompts], parameters, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in made]

    yield run


# Each with the module that tells its version.
ENGINES: dict[str, tuple[str, Callable[[Task], AbstractContextManager[Run]]]] = {
    "ifbbench": ("ifbbench", ifbbench),
    "transformers": ("transformers", transformers_generate),
    "transformers_continuous": ("transformers", transformers_continuous),
    "llama.cpp": ("llama_cpp", llama_cpp),
    "llama.cpp_exact": ("llama_cpp", partial(llama_cpp, flash_attention=False)),
    "vllm": ("vllm", vllm),
}


def main() -> None:
    """Print a line of JSON for each run; the first one, not printed, is to warm up."""
    name, directory, dtype, threads, runs = sys.argv[1:]
    task = Task.of_checkpoint(Path(directory), dtype, int(threads))
    module, engine = ENGINES[name]
    with engine(task) as run:
        version = importlib.import_module(module).__version__
        run()
        for _ in range(int(runs)):
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            outputs = run()
            wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
            if list(map(len, outputs)) != task.lengths:
                raise RuntimeError(f"{name}: the outputs do not have the lengths that were asked for")
            line = {"wall_s": wall_s, "cpu_s": cpu_s, "version": version, "outputs": outputs}
            print("RUN " + json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
