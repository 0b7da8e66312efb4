"""vLLM itself, serving a small model with random weights, and `ifbbench run --engine vllm` on the same requests.

All requests are there before the first iteration, so that no time decides anything. docs/engines.md has the commands.
`python -m benchmarks.vllm_end_to_end serve DIRECTORY`, where vLLM is installed, writes the requests, vLLM's iteration
log and its batches for each of SETTINGS. `python -m benchmarks.vllm_end_to_end compare DIRECTORY`, in the environment
of this project, runs the same and prints one JSON object; exit status 1 unless every iteration has the same batch.
"""

import json
import logging
import os
import random
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
COMMON = {"max_model_len": 256, "block_size": 32}
SETTINGS: dict[str, dict[str, Any]] = {
    "ample": {"max_num_seqs": 8, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 30},
    "short": {"max_num_seqs": 16, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 12},
    "capped": {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 12,
        "long_prefill_token_threshold": 48,
        "scheduler_reserve_full_isl": False,
    },
    "watermark": {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": 20,
        "enable_chunked_prefill": False,
        "watermark": 0.1,
    },
}
LOG_LINE = re.compile(
    r"Iteration\(\d+\): (\d+) context requests, (\d+) context tokens, "
    r"(\d+) generation requests, (\d+) generation tokens"
)


def draw_requests() -> list[dict[str, Any]]:
    """Lines of a trace; every third prompt begins with the same 64 tokens."""
    rng = random.Random(5)
    shared, rows = [rng.randrange(10, 900) for _ in range(64)], list[dict[str, Any]]()
    for number in range(40):
        prompt = shared if number % 3 == 0 else []
        prompt = prompt + [rng.randrange(10, 900) for _ in range(rng.choice([5, 20, 40, 90, 150]))]
        length = rng.randint(3, 40)
        row = {"request_id": number, "arrival_s": 0.0, "prompt_len": len(prompt), "prompt_tokens": prompt}
        rows.append({**row, "output_len": length, "max_new_tokens": length})
    return rows


def serve(directory: Path) -> None:
    """vLLM's answers for each of SETTINGS, each in a process of its own."""
    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(MODEL))
    requests = draw_requests()
    (directory / "trace.jsonl").write_text("".join(json.dumps(request) + "\n" for request in requests))
    batches, lines, schedule = list[dict[str, int]](), list[str](), Scheduler.schedule

    def recorded(self: Scheduler, *arguments: Any) -> Any:
        output = schedule(self, *arguments)
        if output.num_scheduled_tokens:
            # Ids are the number of the request and a random suffix.
            batches.append({name.split("-")[0]: count for name, count in output.num_scheduled_tokens.items()})
        return output

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "Iteration(" in (message := record.getMessage()):
                lines.append(message)

    Scheduler.schedule = recorded
    for name, settings in SETTINGS.items():
        if (child := os.fork()) == 0:
            model = LLM(
                model=str(directory),
                skip_tokenizer_init=True,
                load_format="dummy",
                dtype="float32",
                enforce_eager=True,
                disable_log_stats=False,
                enable_logging_iteration_details=True,
                **COMMON,
                **settings,
            )
            # Only now, since vLLM configures its loggers anew when it starts an engine.
            logging.getLogger("vllm.v1.metrics.loggers").addHandler(Lines())
            model.generate(
                [{"prompt_token_ids": request["prompt_tokens"]} for request in requests],
                [
                    SamplingParams(max_tokens=request["output_len"], ignore_eos=True, detokenize=False)
                    for request in requests
                ],
                use_tqdm=False,
            )
            (directory / f"{name}.json").write_text(json.dumps({"batches": batches, "lines": lines}))
            os._exit(0)
        os.waitpid(child, 0)


def run(directory: Path, name: str) -> list[dict[str, int]]:
    """The batches of our run with one of SETTINGS: tokens by request, for each iteration; and writes its directory."""
    from click.testing import CliRunner

    from ifbbench.cli.main import main as cli

    arguments = ["run", str(directory / "trace.jsonl"), "--engine", "vllm", "--device", "null", "--model", "tiny"]
    for option, value in {**COMMON, "async_scheduling": False, **SETTINGS[name]}.items():
        switch = "--" if value is not False else "--no_"
        arguments += [f"{switch}{option}"] if isinstance(value, bool) else [f"--{option}", str(value)]
    result = CliRunner().invoke(cli, [*arguments, "--output", str(directory / f"run-{name}"), "--overwrite"])
    if result.exit_code:
        raise SystemExit(f"{' '.join(arguments)}: {result.output}")
    batches: dict[int, dict[str, int]] = defaultdict(dict)
    for span in read_spans(directory, name):
        if span["phase"] in ("context", "recompute", "generation"):
            iterations = range(span["first_iteration"], span["last_iteration"] + 1)
            counts = span.get("chunks") or [1] * len(iterations)
            for iteration, count in zip(iterations, counts, strict=True):
                batches[iteration][str(span["request_id"])] = count
    return [batches[iteration] for iteration in sorted(batches)]


def read_spans(directory: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / f"run-{name}" / "spans.jsonl").read_text().splitlines()]


def log_counts(directory: Path, name: str, batches: list[dict[str, int]]) -> list[list[int]]:
    """What vLLM's log says of each batch: a request is in its context while it has no output."""
    first_output: dict[str, int] = {}
    for span in read_spans(directory, name):
        if span["phase"] in ("context", "recompute") and span.get("produced"):
            first_output.setdefault(str(span["request_id"]), span["last_iteration"])
    found = []
    for iteration, batch in enumerate(batches):
        contexts = [count for request, count in batch.items() if iteration <= first_output[request]]
        found.append([len(contexts), sum(contexts), len(batch) - len(contexts), sum(batch.values()) - sum(contexts)])
    return found


def compare(directory: Path) -> int:
    report, is_equal = dict[str, Any](), True
    for name in SETTINGS:
        original = json.loads((directory / f"{name}.json").read_text())
        batches = run(directory, name)
        lines = [list(map(int, match.groups())) for line in original["lines"] if (match := LOG_LINE.search(line))]
        counts = log_counts(directory, name, batches)
        pairs = list(zip(original["batches"], batches, strict=False))
        report[name] = {
            "iterations of vLLM": len(original["batches"]),
            "iterations": len(batches),
            "equal batches": sum(one == other for one, other in pairs),
            "lines of vLLM's log": len(lines),
            "equal lines": sum(one == other for one, other in zip(lines, counts, strict=False)),
            "first different": next((str(pair) for pair in pairs if pair[0] != pair[1]), None),
            "pre-emptions": sum(span["phase"] == "paused" for span in read_spans(directory, name)),
        }
        is_equal &= original["batches"] == batches and lines == counts
    print(json.dumps(report, indent=1))
    return 0 if is_equal else 1


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] not in ("serve", "compare"):
        print("usage: python -m benchmarks.vllm_end_to_end serve|compare DIRECTORY", file=sys.stderr)
        return 2
    if arguments[0] == "serve":
        # The engine runs in this process and thread, so that its scheduler can be read.
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
        serve(Path(arguments[1]).absolute())
        return 0
    return compare(Path(arguments[1]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
