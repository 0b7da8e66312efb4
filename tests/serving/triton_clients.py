"""Clients of Triton Inference Server: a server in a process of its own, streams of gRPC, and its metrics."""

import os
import queue
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from tests.serving.clients import announced

ROOT = Path(__file__).parents[2]
MODEL = "tensorrt_llm"


@dataclass
class Triton:
    """`ifbbench triton` in a process."""

    process: subprocess.Popen[str]
    http: int
    grpc: int
    metrics: int

    def end(self, how: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Exit status, and what it printed since it took requests."""
        self.process.send_signal(how)
        rest, _ = self.process.communicate(timeout=300)
        return self.process.returncode, rest


def start(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ifbbench", "triton", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


@contextmanager
def triton(*options: str) -> Iterator[Triton]:
    process = start(*options, "--http_port", "0", "--grpc_port", "0", "--metrics_port", "0")
    pattern = r" at http://\S+:(\d+) \(HTTP\), gRPC on port (\d+), metrics on port (\d+);"
    with announced(process, pattern) as (found, _):
        yield Triton(process, *map(int, found.groups()))


@dataclass
class Answer:
    """The responses to one request: tensors by name of each, and the error."""

    responses: list[dict[str, Any]] = field(default_factory=list)
    error: Any = None

    @property
    def ids(self) -> list[int]:
        """Of the first prompt and beam, in all responses."""
        return [token for one in self.responses for token in one["output_ids"][0, 0].tolist()]


def inputs(client: Any, prompt: Any, output_len: int, tensors: dict[str, Any]) -> list[Any]:
    """The inputs of a request; values without a dimension have the shape [prompts, 1]."""
    from tritonclient.utils import np_to_triton_dtype

    ids = np.atleast_2d(np.array(prompt, np.int32))
    values = {
        "input_ids": ids,
        "input_lengths": np.full((len(ids), 1), ids.shape[1], np.int32),
        "request_output_len": np.full((len(ids), 1), output_len, np.int32),
    }
    values |= {name: np.full((len(ids), 1), value) if np.ndim(value) == 0 else value for name, value in tensors.items()}
    made = []
    for name, array in values.items():
        made.append(client.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        made[-1].set_data_from_numpy(array)
    return made


class Stream:
    """A stream of gRPC: requests and their responses."""

    all_open: ClassVar[list["Stream"]] = []

    def __init__(self, server: Triton) -> None:
        import tritonclient.grpc

        self._module = tritonclient.grpc
        self._client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}")
        self._arrived: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client.start_stream(lambda result, error: self._arrived.put((result, error)))
        self.all_open.append(self)

    def send(self, prompt: Any, output_len: int, request_id: str = "", **tensors: Any) -> None:
        made = inputs(self._module, prompt, output_len, tensors)
        self._client.async_stream_infer(MODEL, made, request_id=request_id, enable_empty_final_response=True)

    def receive(self, count: int = 1) -> dict[str, Answer]:
        """The answers to `count` requests, by id, when they are complete; those with an error as ''."""
        answers: dict[str, Answer] = {}
        while count:
            result, error = self._arrived.get(timeout=300)
            if error is not None:
                answers.setdefault("", Answer()).error = error
                count -= 1
                continue
            message = result.get_response()
            answer = answers.setdefault(message.id, Answer())
            if len(message.outputs):
                answer.responses.append({one.name: result.as_numpy(one.name) for one in message.outputs})
            count -= message.parameters["triton_final_response"].bool_param
        return answers

    def one(self, prompt: Any, output_len: int, **tensors: Any) -> Answer:
        """The answer to one request, while no other is open."""
        self.send(prompt, output_len, "one", **tensors)
        (answer,) = self.receive().values()
        return answer

    def cancel(self) -> None:
        """End all of its requests."""
        self._client.stop_stream(cancel_requests=True)
        self._client.close()
        self.all_open.remove(self)


def scrape(server: Triton) -> dict[str, float]:
    """Each sample of the model by its name and the values of its labels other than the model's."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics}/metrics") as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    found = {}
    for sample in [one for family in families for one in family.samples]:
        own = sorted(set(sample.labels) - {"model", "version"})
        found[" ".join([sample.name, *(sample.labels[label] for label in own)])] = sample.value
    return found


def wait_for(server: Triton, name: str, value: float) -> dict[str, float]:
    for _ in range(6000):
        found = scrape(server)
        if found.get(name) == value:
            return found
        time.sleep(0.05)
    raise AssertionError(found)
