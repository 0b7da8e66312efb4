"""The overhead of the client of `ifbbench run --endpoint`: how late it sends, what it adds to TTFT, and its CPU time.

The server is a minimal one in a process of its own: it sends a chunk of each stream in each tick of 10 ms, as an engine
does in each iteration. Client and server run on a core each where there are two.

Run: `python -m benchmarks.endpoint [--rate 2000] [--duration 10] [--tokens 10] [--runs 1]`, with `chrt -f 50`
before it (as root) where other work wants the same cores. Prints one JSON object.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
import urllib.request
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ifbbench.endpoint.loop import new_event_loop
from ifbbench.replay.run import run_trace
from ifbbench.rundir.run_directory import hardware
from ifbbench.settings.config import RunConfig

TICK_S = 0.01
PROMPT_LEN = 128
BAR_S = 0.005
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = b'{"object":"list","data":[{"id":"mock","object":"model"}]}'


def chunk(fields: str) -> bytes:
    data = f'data: {{"id":"cmpl-0123456789abcdef","object":"text_completion","created":1,"model":"mock",{fields}}}\n\n'
    return f"{len(data):x}\r\n{data}\r\n".encode()


TOKEN = chunk('"choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":null}]')
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class MockServer(asyncio.Protocol):
    """One connection of the server. active: the connections with a stream, each with the tokens that are left.

    ttft_s: of each request, from its last byte to its first token.
    """

    active: "dict[MockServer, int]" = {}  # noqa: RUF012 - shared by all connections
    ttft_s: list[float] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.transport: Any = None
        self.received = b""
        self.tokens = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.active.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, end, body = self.received.partition(b"\r\n\r\n")
        if not end:
            return
        if head.startswith(b"GET"):
            self.received = b""
            content = MODELS
            if head.startswith(b"GET /ttft "):
                content = json.dumps(self.ttft_s).encode()
                self.ttft_s.clear()
            self.transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                % (len(content), content)
            )
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        if len(body) < length:
            return
        self.received = b""
        self.tokens = self.active[self] = int(body.partition(b'"max_tokens":')[2].partition(b",")[0])
        self.received_s = time.perf_counter()
        self.transport.write(HEAD)

    def advance(self) -> None:
        """Send the next token of the stream."""
        left = self.active[self] = self.active[self] - 1
        if left == self.tokens - 1:
            self.ttft_s.append(time.perf_counter() - self.received_s)
        if left:
            self.transport.write(TOKEN)
            return
        del self.active[self]
        usage = f'"prompt_tokens":{PROMPT_LEN},"completion_tokens":{self.tokens}'
        last = chunk('"choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":"length"}]')
        self.transport.write(last + chunk(f'"choices":[],"usage":{{{usage}}}') + END)


async def serve(connection: Connection) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(MockServer, "127.0.0.1", 0, backlog=4096)
    connection.send(server.sockets[0].getsockname()[1])
    tick = loop.time()
    while True:
        tick = max(tick + TICK_S, loop.time())
        await asyncio.sleep(max(tick - loop.time(), 0))
        for stream in list(MockServer.active):
            stream.advance()


def run_server(connection: Connection, core: int) -> None:
    os.sched_setaffinity(0, {core})
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serve(connection))


def run_once(port: int, count: int, rate: float, tokens: int, **settings: Any) -> dict[str, Any]:
    """The summary of a run; with the share of the requests that were sent later than the bar, and the mean time between
    a first token's write in the server and its arrival in the client, less the way of the request."""
    ask = f"http://127.0.0.1:{port}/ttft"
    with tempfile.TemporaryDirectory() as folder:
        trace, run = Path(folder) / "trace.jsonl", Path(folder) / "run"
        rows = (
            {
                "request_id": index,
                "arrival_s": index / rate,
                "prompt_len": PROMPT_LEN,
                "output_len": tokens,
                "max_new_tokens": tokens,
            }
            for index in range(count)
        )
        trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
        urllib.request.urlopen(ask).close()
        config = RunConfig(endpoint=f"http://127.0.0.1:{port}", output=str(run), warm_up=0, **settings)
        summary = run_trace(str(trace), config).summary
        with urllib.request.urlopen(ask) as answer:
            server_s = json.load(answer)
        lines = list(map(json.loads, (run / "requests.jsonl").read_text().splitlines()))
    late = sum(line["sent_s"] - line["arrival_s"] > BAR_S for line in lines)
    client_s = [line["first_token_s"] - line["sent_s"] for line in lines if line["outcome"] == "completed"]
    added_s = sum(client_s) / len(client_s) - sum(server_s) / len(server_s)
    return summary | {"late_share": late / count, "added_s": added_s}


def measure(rate: float, duration_s: float, tokens: int, runs: int) -> dict[str, Any]:
    """Open loops at `rate`, and a closed loop of as many streams, in which the client never waits for a time."""
    cores = sorted(os.sched_getaffinity(0))
    here, there = multiprocessing.Pipe()
    server = multiprocessing.Process(target=run_server, args=(there, cores[-1]), daemon=True)
    server.start()
    os.sched_setaffinity(0, {cores[0]})
    count = round(rate * duration_s)
    try:
        port = here.recv()
        opened = [_open_loop(run_once(port, count, rate, tokens), count * tokens) for _ in range(runs)]
        closed = run_once(port, count, rate, tokens, concurrency=round(rate * tokens * TICK_S))
    finally:
        server.terminate()
        server.join()
    return {
        "open_loops": opened,
        "bar_met": sum(one["bar_met"] for one in opened),
        "closed_loop": {
            "rate_per_s": closed["request_throughput_per_s"],
            "cpu_us_per_request": closed["endpoint"]["client_cpu_s_per_request"] * 1e6,
            "cpu_share": closed["endpoint"]["client_cpu_share"],
        },
        "load_average": os.getloadavg()[0],
        "machine": hardware(),
    }


def _open_loop(summary: dict[str, Any], chunks: int) -> dict[str, Any]:
    delay_s = summary["endpoint"]["send_delay_s"]
    return {
        "requests": summary["requests"],
        "rate_per_s": summary["arrivals"]["achieved_rate_per_s"],
        "chunks_per_s": chunks / summary["duration_s"],
        "send_delay_ms": {name: delay_s[name] * 1000 for name in ("p50", "p99", "p99_9", "max")},
        "later_than_5_ms": summary["late_share"],
        "bar_met": delay_s["max"] <= BAR_S and not summary["requests"]["failed"],
        # Means: until a request is sent, and until its first token is read that the server has written.
        "added_to_ttft_ms": {"sending": delay_s["mean"] * 1000, "network_and_reading": summary["added_s"] * 1000},
        "cpu_share": summary["endpoint"]["client_cpu_share"],
        "connections": summary["endpoint"]["connections"],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=2000.0)
    parser.add_argument("--duration", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=10)
    parser.add_argument("--runs", type=int, default=1)
    given = parser.parse_args()
    print(json.dumps(measure(given.rate, given.duration, given.tokens, given.runs), indent=2))
