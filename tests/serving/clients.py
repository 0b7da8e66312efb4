"""Clients of a server: raw connections for many streams, and a server in a process of its own."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# A KV cache of 64 MiB with the model `tiny`. The default has 2 GiB, which a server on the CPU clears as it starts.
SMALL_POOL = ("--max_tokens_in_paged_kvcache", "8192")


@dataclass
class ServerProcess:
    """`ifbbench serve` in a process. log: what it printed until it took requests."""

    process: subprocess.Popen[str]
    url: str
    log: str = ""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def end(self, how: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Exit status, and the rest of what it printed."""
        self.process.send_signal(how)
        rest, _ = self.process.communicate(timeout=300)
        return self.process.returncode, self.log + rest


@contextmanager
def server_process(*options: str) -> Iterator[ServerProcess]:
    command = [sys.executable, "-m", "ifbbench", "serve", *options, "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    with announced(process, r" at (http://\S+);") as (found, text):
        yield ServerProcess(process, found[1], text)


@contextmanager
def announced(process: subprocess.Popen[str], pattern: str) -> Iterator[tuple[re.Match[str], str]]:
    """The match of `pattern` in the first line of a server's output that has it, and all output up to there; at the end
    of the block the server is killed. AssertionError if the server ends before."""
    lines = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if found := re.search(pattern, line):
                yield found, "".join(lines)
                break
        else:
            raise AssertionError("".join(lines))
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


@dataclass
class Stream:
    """What a client saw of one request. Times are seconds of `time.perf_counter`; chunk_s: of chunks with text."""

    status: int = 0
    start_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.chunk_s[0] - self.start_s


async def stream_completion(
    port: int,
    body: dict[str, Any],
    *,
    leave_after: int | None = None,
    pause_s: float = 0.0,
    begun: asyncio.Event | threading.Event | None = None,
) -> Stream:
    """Stream one completion. leave_after: close the connection after so many chunks. pause_s: wait before each read.
    begun: is set with the first chunk."""
    content = json.dumps({"stream": True, **body}).encode()
    seen = Stream(start_s=time.perf_counter())
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    try:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()
        seen.status = int((await reader.readline()).split()[1])
        while (line := await reader.readline()) not in (b"\r\n", b""):
            pass
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            if begun is not None:
                begun.set()
            chunk = json.loads(line[6:])
            if "error" in chunk:
                seen.error = chunk["error"]["message"]
            if usage := chunk.get("usage"):
                seen.tokens = usage["completion_tokens"]
            if chunk.get("choices") and chunk["choices"][0]["text"]:
                seen.chunk_s.append(time.perf_counter())
                seen.text += chunk["choices"][0]["text"]
            if leave_after is not None and len(seen.chunk_s) >= leave_after:
                break
            if pause_s:
                await asyncio.sleep(pause_s)
    finally:
        writer.close()
    return seen
