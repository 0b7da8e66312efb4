"""`ifbbench run --endpoint` and `vllm bench serve` against the same server, in turns: do they measure the same?

Both send the same prompts as text, at constant intervals, greedy and streamed, after one request to warm up. The server
runs already. It is not as fast in one turn as in the next, so that each client is also held against itself (its odd
turns against its even ones), and against the packets on the loopback device, where this process may capture them
(Linux, CAP_NET_RAW). `vllm` is on the PATH.

Run: `python -m benchmarks.foreign_clients --url URL --model NAME --tokenizer DIRECTORY [--chat] [--turns 10]
[--requests 30] [--rate 1.5] [--prompt_len 128] [--output_len 16]`. Prints the mean and the median of each turn in
milliseconds, then the medians of them over all turns, and where the time to the first token is spent.
"""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median
from typing import Any
from urllib.parse import urlsplit

from tokenizers import Tokenizer

NAMES = {"ttft_s": "ttft", "itl_s": "itl", "e2e_s": "e2el"}
STATISTICS = {"mean": "mean", "p50": "median"}
BEFORE, BETWEEN, AFTER = "start to last packet sent", "to first packet with a token", "to the client's time stamp"
PARTS = (BEFORE, BETWEEN, AFTER)
# From Linux: time stamps of packets in nanoseconds, and the type of one that leaves (each is seen twice on loopback).
SO_TIMESTAMPNS, PACKET_OUTGOING, ALL_PROTOCOLS = 35, 4, 3
# Milliseconds by the name of a figure and of a statistic; of PARTS, the figure is the time to the first token.
Seen = dict[tuple[str, str], float]


class Packets:
    """Notes the packets of streams to a port. posts: of each request, when its last packet was sent, and when the first
    one with an event of its answer was; in seconds of `time.perf_counter`, which all processes share."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
        self._socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**26)
        self._socket.bind(("lo", 0))
        self._socket.settimeout(0.1)
        self._offset_s = time.time() - time.perf_counter()
        self._open: dict[int, list[float]] = {}
        self.posts: list[list[float]] = []

    def read(self) -> None:
        """Take in what has come, for a tenth of a second without any at most."""
        with suppress(TimeoutError):
            while True:
                frame, extra, _, address = self._socket.recvmsg(2**17, 64)
                if address[2] != PACKET_OUTGOING and frame[12:14] == b"\x08\x00":
                    stamp = extra[0][2]
                    seconds = (
                        int.from_bytes(stamp[:8], sys.byteorder) + int.from_bytes(stamp[8:16], sys.byteorder) / 1e9
                    )
                    self._take(frame[14:], seconds - self._offset_s)

    def _take(self, packet: bytes, at_s: float) -> None:
        segment = packet[(packet[0] & 15) * 4 :]
        source, target = int.from_bytes(segment[:2], "big"), int.from_bytes(segment[2:4], "big")
        content = segment[(segment[12] >> 4) * 4 : int.from_bytes(packet[2:4], "big") - (packet[0] & 15) * 4]
        if not content:
            return
        if target == self._port:
            if content.startswith(b"POST "):
                self.posts.append([at_s, 0.0])
                self._open[source] = self.posts[-1]
            elif source in self._open:
                self._open[source][0] = at_s
        elif source == self._port and target in self._open and b"data: " in content:
            self._open.pop(target)[1] = at_s

    def close(self) -> None:
        self._socket.close()


def capture(url: str) -> Packets | None:
    """Packets to `url`; None where they cannot be captured."""
    try:
        return Packets(urlsplit(url).port or 80)
    except (OSError, AttributeError):
        return None


def run(command: list[str], folder: Path, packets: Packets | None, environment: dict[str, str] | None = None) -> None:
    """Run a client to its end."""
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        while process.poll() is None:
            if packets is None:
                process.wait()
            else:
                packets.read()
    assert process.returncode == 0, (folder / "log.txt").read_text()


def own_client(folder: Path, given: argparse.Namespace, packets: Packets | None) -> Seen:
    """What `run --endpoint` measures."""
    file, prompts = str(tokenizer_file(given)), prompts_of(given)
    rows: list[dict[str, Any]] = [
        {
            "request_id": index,
            "arrival_s": index / given.rate,
            "prompt_tokens": prompts[index],
            "output_len": given.output_len,
            "max_new_tokens": given.output_len,
        }
        for index in range(given.requests)
    ]
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    api = ["openai-chat"] if given.chat else ["openai", "--endpoint_prompts", "text"]
    command = [sys.executable, "-m", "ifbbench", "run", "trace.jsonl", "--endpoint", given.url, "--endpoint_type", *api]
    run([*command, "--tokenizer", file, "--warm_up", "1", "--output", "run"], folder, packets)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["requests"]["completed"] == given.requests, summary["requests"]
    seen = {(name, one): summary[name][one] * 1000 for name in NAMES for one in STATISTICS}
    lines = [json.loads(line) for line in (folder / "run" / "requests.jsonl").read_text().splitlines()]
    lines.sort(key=lambda line: line["arrival_s"])
    return seen | parts(
        [line["sent_s"] - line["arrival_s"] for line in lines], [line["ttft_s"] for line in lines], packets
    )


def vllm_client(folder: Path, given: argparse.Namespace, packets: Packets | None) -> Seen:
    """What `vllm bench serve` measures."""
    api = ["openai-chat", "/v1/chat/completions"] if given.chat else ["openai", "/v1/completions"]
    options = {
        "backend": api[0],
        "endpoint": api[1],
        "base-url": given.url,
        "model": given.model,
        "tokenizer": str(Path(given.tokenizer).resolve()),
        "dataset-name": "sharegpt",
        "dataset-path": "prompts.json",
        "sharegpt-output-len": given.output_len,
        "num-warmups": 1,
        "num-prompts": given.requests,
        "request-rate": given.rate,
        "burstiness": 1000,
        "temperature": 0,
        "percentile-metrics": "ttft,itl,e2el",
        "result-filename": "result.json",
    }
    decode = Tokenizer.from_file(str(tokenizer_file(given))).decode
    prompts = [decode(ids, skip_special_tokens=False) for ids in prompts_of(given)]
    # Conversations of a question and an answer, of which the question is sent.
    talks = [{"conversations": [{"value": prompt}, {"value": prompt}]} for prompt in prompts]
    (folder / "prompts.json").write_text(json.dumps(talks))
    command = [
        "vllm",
        "bench",
        "serve",
        *(text for name, value in options.items() for text in (f"--{name}", str(value))),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | offline
    flags = ("ignore-eos", "disable-tqdm", "save-result", "save-detailed", "disable-shuffle")
    run([*command, *(f"--{flag}" for flag in flags)], folder, packets, environment)
    found = json.loads((folder / "result.json").read_text())
    assert found["completed"] == given.requests, found["completed"]
    seen = {(own, one): found[f"{their}_{name}_ms"] for own, name in NAMES.items() for one, their in STATISTICS.items()}
    pairs = sorted(zip(found["start_times"], found["ttfts"], strict=True))
    posts = [] if packets is None else packets.posts[-len(pairs) :]
    before_s = [sent_s - start_s for (start_s, _), (sent_s, _) in zip(pairs, posts, strict=False)]
    return seen | parts(before_s, [ttft_s for _, ttft_s in pairs], packets)


def parts(before_s: list[float], ttft_s: list[float], packets: Packets | None) -> Seen:
    """The mean of each part of the time to the first token of requests in the order in which they were sent. Where the
    packets are not known, nothing."""
    if packets is None:
        return {}
    between_s = [first_s - sent_s for sent_s, first_s in packets.posts[-len(ttft_s) :]]
    after_s = [whole - one - other for whole, one, other in zip(ttft_s, before_s, between_s, strict=True)]
    means = zip(PARTS, map(fmean, (before_s, between_s, after_s)), strict=True)
    return {("ttft_s", name): mean * 1000 for name, mean in means}


def prompts_of(given: argparse.Namespace) -> list[list[int]]:
    """The token ids of each prompt, which are the same after they were text: half a character would become several
    others."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file(given)))
    texts = tokenizer.decode_batch([[one] for one in range(tokenizer.get_vocab_size())])
    found = tokenizer.encode_batch(texts, add_special_tokens=False)
    kept = [one for one, encoding in enumerate(found) if encoding.ids == [one]]
    draw = random.Random(0)
    return [draw.choices(kept, k=given.prompt_len) for _ in range(given.requests)]


def tokenizer_file(given: argparse.Namespace) -> Path:
    return (Path(given.tokenizer) / "tokenizer.json").resolve()


def measure(given: argparse.Namespace) -> None:
    seen: tuple[list[Seen], list[Seen]] = ([], [])
    print("| turn | TTFT ms | | ITL ms | | E2E ms | |\n|---|---:|---:|---:|---:|---:|---:|")
    for turn in range(given.turns):
        # Neither is always the first.
        for which in (0, 1) if turn % 2 else (1, 0):
            packets = capture(given.url)
            with tempfile.TemporaryDirectory() as folder:
                seen[which].append((own_client, vllm_client)[which](Path(folder), given, packets))
            if packets is not None:
                packets.close()
        print(rows(str(turn + 1), seen[0][-1], seen[1][-1]), flush=True)
    print(rows("median of turns", *map(middle, seen)))
    for name, turns in zip(("this client", "vllm bench serve"), seen, strict=True):
        print(rows(f"{name}, odd / even turns", middle(turns[::2]), middle(turns[1::2])))
    ours, theirs = map(middle, seen)
    for name in PARTS:
        if ("ttft_s", name) in ours:
            print(f"{name}: {ours['ttft_s', name]:.2f} / {theirs['ttft_s', name]:.2f} ms")


def middle(turns: list[Seen]) -> Seen:
    """The median of each figure over turns."""
    return {key: median(one[key] for one in turns) for key in turns[0]}


def rows(turn: str, ours: Seen, theirs: Seen) -> str:
    """A row of each statistic."""
    lines = []
    for one, name in STATISTICS.items():
        pairs = [(ours[figure, one], theirs[figure, one]) for figure in NAMES]
        cells = [f"{own:.2f} / {other:.2f} | {(own / other - 1) * 100:+.1f} %" for own, other in pairs]
        lines.append(f"| {turn}, {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="name of the served model")
    parser.add_argument("--tokenizer", required=True, help="directory of its tokenizer")
    parser.add_argument("--chat", action="store_true", help="chats in the place of completions")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--rate", type=float, default=1.5)
    parser.add_argument("--prompt_len", type=int, default=128)
    parser.add_argument("--output_len", type=int, default=16)
    measure(parser.parse_args())
