"""The overhead of the client of `ifbbench run --endpoint`: how late it sends, and its CPU time for each request.

The server is a minimal one in a process of its own: it sends a chunk of each stream in each tick of 10 ms, as an engine
does in each iteration. Client and server run on a core each where there are two.

Run: `python -m tests.benchmarks.endpoint [--rate 2000] [--duration 10] [--tokens 10]`. Prints one JSON object.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ifbbench.config import RunConfig
from ifbbench.recording.run_directory import hardware
from ifbbench.replay.endpoint_http import new_event_loop
from ifbbench.replay.run import run_trace

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
    """One connection of the server. active: the connections with a stream, each with the tokens that are left."""

    active: "dict[MockServer, int]" = {}  # noqa: RUF012 - shared by all connections

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
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                                 % (len(MODELS), MODELS))  # fmt: skip
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        if len(body) < length:
            return
        self.received = b""
        self.tokens = self.active[self] = int(body.partition(b'"max_tokens":')[2].partition(b",")[0])
        self.transport.write(HEAD)

    def advance(self) -> None:
        """Send the next token of the stream."""
        left = self.active[self] = self.active[self] - 1
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
    """The summary of a run, with the share of the requests that were sent later than the bar."""
    with tempfile.TemporaryDirectory() as folder:
        trace, run = Path(folder) / "trace.jsonl", Path(folder) / "run"
        rows = ({"request_id": index, "arrival_s": index / rate, "prompt_len": PROMPT_LEN, "output_len": tokens,
                 "max_new_tokens": tokens} for index in range(count))  # fmt: skip
        trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = RunConfig(endpoint=f"http://127.0.0.1:{port}", output=str(run), **settings)
        summary = run_trace(str(trace), config).summary
        lines = map(json.loads, (run / "requests.jsonl").read_text().splitlines())
        late = sum(line["sent_s"] - line["arrival_s"] > BAR_S for line in lines)
    return summary | {"late_share": late / count}


def measure(rate: float, duration_s: float, tokens: int) -> dict[str, Any]:
    """An open loop at `rate`, and a closed loop of as many streams, in which the client never waits for a time."""
    cores = sorted(os.sched_getaffinity(0))
    here, there = multiprocessing.Pipe()
    server = multiprocessing.Process(target=run_server, args=(there, cores[-1]), daemon=True)
    server.start()
    os.sched_setaffinity(0, {cores[0]})
    count = round(rate * duration_s)
    try:
        port = here.recv()
        opened = run_once(port, count, rate, tokens)
        closed = run_once(port, count, rate, tokens, concurrency=round(rate * tokens * TICK_S))
    finally:
        server.terminate()
        server.join()
    delay_s, is_complete = opened["endpoint"]["send_delay_s"], not opened["requests"]["failed"]
    return {
        "requests": opened["requests"],
        "rate_per_s": opened["arrivals"]["achieved_rate_per_s"],
        "chunks_per_s": count * tokens / opened["duration_s"],
        "send_delay_ms": {name: delay_s[name] * 1000 for name in ("p50", "p99", "p99_9", "max")},
        "later_than_5_ms": opened["late_share"],
        "bar_met": delay_s["max"] <= BAR_S and is_complete,
        "connections": opened["endpoint"]["connections"],
        "closed_loop": {
            "rate_per_s": closed["request_throughput_per_s"],
            "cpu_us_per_request": closed["endpoint"]["client_cpu_s_per_request"] * 1e6,
            "cpu_share": closed["endpoint"]["client_cpu_share"],
        },
        "load_average": os.getloadavg()[0],
        "machine": hardware(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=2000.0)
    parser.add_argument("--duration", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=10)
    given = parser.parse_args()
    print(json.dumps(measure(given.rate, given.duration, given.tokens), indent=2))
