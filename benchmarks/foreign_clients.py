"""`ifbbench run --endpoint` and `vllm bench serve` against the same server, in turns: do they measure the same?

Both send prompts of the same length at constant intervals, and stream. The server runs already, and has the metrics of
vLLM: on a busy machine it is not as fast in one turn as in the next, so that each client is also held against what the
server itself measured meanwhile. `vllm` is on the PATH.

Run: `python -m benchmarks.foreign_clients --url URL --tokenizer DIRECTORY [--chat] [--turns 5] [--requests 40]
[--rate 2] [--prompt_len 256] [--output_len 64]`. Prints means and medians of each turn in milliseconds as a table, and
their means over all turns.
"""

import argparse
import json
import os
import random
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig

NAMES = {"ttft_s": "ttft", "itl_s": "itl", "e2e_s": "e2el"}
STATISTICS = {"mean": "mean", "p50": "median"}
HISTOGRAMS = {"ttft_s": "time_to_first_token", "itl_s": "inter_token_latency", "e2e_s": "e2e_request_latency"}
SERVER, BEYOND = "mean of the server", "mean less that of the server"
# Milliseconds by the name of a figure and of a statistic.
Seen = dict[tuple[str, str], float]


def own_client(folder: Path, given: argparse.Namespace) -> Seen:
    """What `run --endpoint` measures."""
    trace = folder / "trace.jsonl"
    rows: list[dict[str, Any]] = [
        {
            "request_id": index,
            "arrival_s": index / given.rate,
            "prompt_len": given.prompt_len,
            "output_len": given.output_len,
            "max_new_tokens": given.output_len,
        }
        for index in range(given.requests)
    ]
    file = str(Path(given.tokenizer) / "tokenizer.json")
    if given.chat:
        draw, ids = random.Random(0), kept_ids(file)
        for one in rows:
            one["prompt_tokens"] = draw.choices(ids, k=given.prompt_len)
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RunConfig(
        endpoint=given.url,
        endpoint_type="openai-chat" if given.chat else "openai",
        output=str(folder / "run"),
        tokenizer=file if given.chat else None,
        endpoint_vocab_size=given.vocab_size,
        warm_up=0,
    )
    summary = run_trace(str(trace), config).summary
    assert summary["requests"]["completed"] == given.requests, summary["requests"]
    return {(name, one): summary[name][one] * 1000 for name in NAMES for one in STATISTICS}


def kept_ids(file: str) -> list[int]:
    """Token ids that are the same after they were text, as those of a chat are: half a character would become several
    others, and a prompt longer than the other client's."""
    tokenizer = Tokenizer.from_file(file)
    texts = tokenizer.decode_batch([[one] for one in range(tokenizer.get_vocab_size())])
    found = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [one for one, encoding in enumerate(found) if encoding.ids == [one]]


def vllm_client(folder: Path, given: argparse.Namespace) -> Seen:
    """What `vllm bench serve` measures."""
    api = ["openai-chat", "/v1/chat/completions"] if given.chat else ["openai", "/v1/completions"]
    command = [
        "vllm",
        "bench",
        "serve",
        "--backend",
        api[0],
        "--endpoint",
        api[1],
        "--base-url",
        given.url,
        "--tokenizer",
        given.tokenizer,
        "--dataset-name",
        "random",
        "--random-input-len",
        str(given.prompt_len),
        "--random-output-len",
        str(given.output_len),
        "--num-prompts",
        str(given.requests),
        "--request-rate",
        str(given.rate),
        "--burstiness",
        "1000",
        "--ignore-eos",
        "--disable-tqdm",
        "--percentile-metrics",
        "ttft,itl,e2el",
        "--save-result",
        "--result-filename",
        "result.json",
        "--model",
        given.model,
    ]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | offline
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True, timeout=600)
    found = json.loads((folder / "result.json").read_text())
    assert found["completed"] == given.requests, found["completed"]
    return {(own, one): found[f"{their}_{name}_ms"] for own, name in NAMES.items() for one, their in STATISTICS.items()}


def sums(url: str) -> dict[str, float]:
    """The sums and counts of the server's histograms by name."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {sample.name: sample.value for family in families for sample in family.samples}


def measured(client: Callable[[Path, argparse.Namespace], Seen], given: argparse.Namespace) -> Seen:
    """What a client measures, and what the server does meanwhile. The one other request that `vllm bench serve` sends
    before its own is among the server's."""
    before = sums(given.url)
    with tempfile.TemporaryDirectory() as folder:
        seen = client(Path(folder), given)
    after = sums(given.url)
    for figure, name in HISTOGRAMS.items():
        total, count = (after[key] - before[key] for key in (f"vllm:{name}_seconds_sum", f"vllm:{name}_seconds_count"))
        seen[figure, SERVER] = total / count * 1000
        seen[figure, BEYOND] = seen[figure, "mean"] - seen[figure, SERVER]
    return seen


def measure(given: argparse.Namespace) -> None:
    seen: list[tuple[Seen, Seen]] = []
    print("| turn | TTFT ms | | ITL ms | | E2E ms | |\n|---|---:|---:|---:|---:|---:|---:|")
    for turn in range(given.turns):
        if turn % 2:  # neither is always the first
            theirs = measured(vllm_client, given)
            ours = measured(own_client, given)
        else:
            ours = measured(own_client, given)
            theirs = measured(vllm_client, given)
        seen.append((ours, theirs))
        print(rows(str(turn + 1), ours, theirs), flush=True)
    print(rows("all", *({key: fmean(one[of][key] for one in seen) for key in seen[0][0]} for of in (0, 1))))


def rows(turn: str, ours: Seen, theirs: Seen) -> str:
    """A row of each statistic."""
    lines = []
    for one, name in {**STATISTICS, SERVER: SERVER, BEYOND: BEYOND}.items():
        pairs = [(ours[figure, one], theirs[figure, one]) for figure in NAMES]
        # A share of what is near 0 says nothing.
        changes = [
            f"{own - other:+.2f} ms" if one == BEYOND else f"{(own / other - 1) * 100:+.1f} %" for own, other in pairs
        ]
        cells = [f"{own:.2f} / {other:.2f} | {change}" for (own, other), change in zip(pairs, changes, strict=True)]
        lines.append(f"| {turn}, {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="name of the served model")
    parser.add_argument("--tokenizer", required=True, help="directory of its tokenizer")
    parser.add_argument("--vocab_size", type=int, default=256, help="prompts have token ids below it")
    parser.add_argument("--chat", action="store_true", help="chats in the place of completions")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--prompt_len", type=int, default=256)
    parser.add_argument("--output_len", type=int, default=64)
    measure(parser.parse_args())
