"""The same requests in `transformers`' continuous batching."""

import time
from typing import Any

import torch

from benchmarks.gpu_engine import DIGITS, Workload


def run_transformers(checkpoint: str, workload: Workload, device: str = "cuda") -> dict[str, Any]:
    """Output tokens a second of `workload` on `checkpoint` in bfloat16.

    Its cache and its CUDA graphs are made by a first run, and kept for the one that counts. That one's prompts are
    others, of the same lengths, so it finds nothing of them in the cache.

    ImportError without transformers, RuntimeError if a request gets no answer.
    """
    import transformers
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.to(device).eval()
    greedy = GenerationConfig(max_new_tokens=workload.output_len, do_sample=False, eos_token_id=-1, pad_token_id=0)
    generator = torch.Generator().manual_seed(0)
    shape = (2, workload.requests, workload.prompt_len)
    others, prompts = torch.randint(model.config.vocab_size, shape, generator=generator).tolist()
    model.generate_batch(others, generation_config=greedy, persistent_manager=True)
    start_s = time.perf_counter()
    answers = model.generate_batch(prompts, generation_config=greedy, persistent_manager=True)
    duration_s = time.perf_counter() - start_s
    model.destroy_cached_continuous_batching_manager()
    tokens = sum(len(answer.generated_tokens) for answer in answers.values())
    if tokens != workload.requests * workload.output_len:
        raise RuntimeError(f"{tokens} tokens came, not {workload.requests} times {workload.output_len}")
    return {
        "version": transformers.__version__,
        "requests": workload.requests,
        "duration_s": round(duration_s, DIGITS),
        "output_tokens_per_s": round(tokens / duration_s, 1),
    }
