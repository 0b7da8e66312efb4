"""The model in Triton's Python backend: the service behind the tensors of TensorRT-LLM's backend.

Runs in a process that Triton starts. Triton calls `execute` in one thread; an event loop in another has the service.
"""

import asyncio
import ctypes
import json
import logging
import math
import os
import signal
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import triton_python_backend_utils as pb  # of Triton, which adds most names only after this import
from numpy.typing import NDArray
from prometheus_client.core import GaugeMetricFamily

from ifbbench.build.engine import Engine
from ifbbench.errors import IfbbenchError, InputError
from ifbbench.replay.rank_processes import WRITE_S, Ranks, other_ranks
from ifbbench.serving.library.client import Tensors
from ifbbench.serving.library.request import InferenceRequest
from ifbbench.serving.metrics import ServerMetrics
from ifbbench.serving.server import WATCH_INTERVAL_S, running_service, serving_engine
from ifbbench.serving.service import Generation, QueueFull, Service, ServiceEnded
from ifbbench.serving.statistics import TOKENS
from ifbbench.serving.triton_repository import (
    FIFO_VARIABLE,
    MAX_SEQUENCES,
    NUM_SEQUENCES,
    OUTPUTS,
    PIPE_VARIABLE,
    STOP,
    TritonConfig,
    read_parameters,
)
from ifbbench.settings.config import RunConfig

GAUGES_PREFIX = "nv_trt_llm_"
_log = logging.getLogger("ifbbench")
USED_CAPSULE = ctypes.c_char_p(b"used_dltensor")


class TritonPythonModel:
    """What Triton makes one of, when it loads the model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine and start the service. This process is rank 0, and starts the other ranks that the settings
        need."""
        if fifo := os.environ.get(FIFO_VARIABLE):
            os.open(fifo, os.O_WRONLY)  # until this process ends
        self._engine, ranks = ExitStack(), None
        try:
            config, triton = read_parameters(json.loads(args["model_config"]))
            ranks = self._engine.enter_context(other_ranks(config, "the server"))
            engine = self._engine.enter_context(serving_engine(config))
        except IfbbenchError as error:
            explained = error if ranks is None else ranks.explanation(error)
            if ranks is not None:
                ranks.kill()
            raise pb.TritonModelException(str(explained)) from error
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ifbbench-service", daemon=True)
        self._thread.start()
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._door = self._run(FrontDoor.open(engine, config, triton, labels, ranks))

    def execute(self, requests: list[Any]) -> None:
        """Take in requests. Their tensors are copied, because Triton's memory is free when this returns."""
        taken = [
            (
                request.request_id(),
                {tensor.name(): copied(tensor) for tensor in request.inputs()},
                request.get_response_sender(),
            )
            for request in requests
        ]
        self._loop.call_soon_threadsafe(self._door.take, taken)

    def finalize(self) -> None:
        """End the service, and the recording."""
        self._run(self._door.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._engine.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class Sequence(NamedTuple):
    """What a request of Triton asks of the engine for one prompt: a sequence, or the beams of one search.

    prompt, sequence: its indices.
    num_beams: how many of its beams are returned, all for None.
    """

    request: InferenceRequest
    prompt: int
    sequence: int
    num_beams: int | None


class Call:
    """One request of Triton, for one sequence or several.

    num_open: number of those that have no final response yet. Triton keeps a request until its last response, the one
        with the flag FINAL.
    """

    def __init__(self, request_id: str, sender: Any, sequences: list[Sequence]) -> None:
        self.request_id = request_id
        self.sender = sender
        self.num_open = len(sequences)
        self.generations: list[Generation] = []
        self._has_prompts = sequences[-1].prompt > 0
        self._has_sequences = any(one.sequence for one in sequences)

    def respond(self, sequence: Sequence, tensors: Tensors, is_final: bool, error: str) -> None:
        """Send what has been generated of `sequence`. Logits that were not asked for are left out."""
        self.num_open -= is_final
        if error:
            send(self.sender, failure(error, pb.TritonError.INTERNAL), not self.num_open)
            return
        outputs = {
            name: array if name == "context_logits" else array[:, : sequence.num_beams]
            for name, array in tensors.items()
            if name in OUTPUTS and getattr(sequence.request, f"return_{name}", True)
        }
        if self._has_prompts:
            outputs["batch_index"] = np.array([[sequence.prompt]], np.int32)
        if self._has_sequences:
            outputs["sequence_index"] = np.array([[sequence.sequence]], np.int32)
        response = pb.InferenceResponse([triton_tensor(name, array) for name, array in outputs.items()])
        send(self.sender, response, not self.num_open)


class Reply(Generation):
    """A generation whose responses go to a call of Triton as they are."""

    __slots__ = ("_call", "_door", "_sequence")

    def __init__(self, door: "FrontDoor", call: Call, sequence: Sequence, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._door, self._call, self._sequence = door, call, sequence

    def respond(self, tensors: Tensors, is_final: bool, error: str) -> None:
        self.is_done, self.error = is_final, error
        if tensors:
            has_prompt = not (self.request.streaming or self.request.exclude_input_from_output)
            self.num_outputs += int(tensors["sequence_length"][0, 0]) - has_prompt * len(self.request.input_ids)
        self._call.respond(self._sequence, tensors, is_final, error)
        if is_final:
            self._door.ended(self, self._call)


class FrontDoor:
    """Takes in Triton's requests, ends those that are stopped or cancelled, and updates Triton's metrics. All in the
    event loop."""

    def __init__(
        self,
        service: Service,
        triton: TritonConfig,
        labels: dict[str, str],
        ranks: Ranks | None,
        ending: AsyncExitStack,
    ) -> None:
        self._service = service
        self._triton = triton
        self._ranks = ranks
        self._calls: dict[Call, None] = {}
        self._metrics = TritonMetrics(service, labels)
        self._ending = ending
        self._triton_pid = os.getppid()
        self._tasks = {asyncio.create_task(one) for one in (self._watch(), self._update(), self._end_with_engine())}
        if pipe := os.environ.get(PIPE_VARIABLE):
            asyncio.get_running_loop().add_reader(int(pipe), self._end_early, int(pipe))

    @classmethod
    async def open(
        cls, engine: Engine, config: RunConfig, triton: TritonConfig, labels: dict[str, str], ranks: Ranks | None
    ) -> "FrontDoor":
        """The front door of `engine`, once it takes requests."""
        async with AsyncExitStack() as stack:
            service = await stack.enter_async_context(running_service(engine, config, triton))
            return cls(service, triton, labels, ranks, stack.pop_all())

    def _end_early(self, pipe: int) -> None:
        """`ifbbench triton` has ended, or waits no longer for Triton."""
        asyncio.get_running_loop().remove_reader(pipe)
        ending = asyncio.create_task(self._end_process())
        self._tasks.add(ending)

    async def _end_process(self) -> None:
        """End the service, the other ranks, and Triton if `ifbbench triton` started it. For a task of its own."""
        self._tasks.discard(asyncio.current_task())  # `close` ends all others
        closing = asyncio.ensure_future(self.close())
        await asyncio.wait({closing}, timeout=None if self._ranks is None else WRITE_S)  # a rank may hang
        if self._ranks is not None:
            self._ranks.kill()
        if PIPE_VARIABLE in os.environ and os.getppid() == self._triton_pid:
            os.kill(self._triton_pid, signal.SIGKILL)
        os._exit(0)

    async def _end_with_engine(self) -> None:
        """End all when the engine or a rank has failed, and report why."""
        ranks = self._ranks
        while not (self._service.has_failed or (ranks is not None and ranks.have_failed())):
            await asyncio.sleep(WATCH_INTERVAL_S)
        self._tasks.discard(asyncio.current_task())
        closing = asyncio.ensure_future(self.close())
        await asyncio.wait({closing}, timeout=WRITE_S)
        error = (closing.done() and closing.exception()) or IfbbenchError("a rank has failed")
        if ranks is not None:
            error = await asyncio.to_thread(ranks.explanation, error)
        pb.Logger.log_error(str(error))
        if fifo := os.environ.get(FIFO_VARIABLE):
            Path(fifo).write_text(str(error), encoding="utf-8")
        await self._end_process()

    async def close(self) -> None:
        """End the service, and its engine."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._ending.aclose()

    def take(self, requests: list[tuple[str, Tensors, Any]]) -> None:
        """Hand requests to the service: id, tensors and sender of each."""
        for request_id, tensors, sender in requests:
            try:
                if tensors.pop(STOP, np.zeros(1, bool)).any():
                    self._stop(request_id, sender)
                else:
                    self._submit(request_id, tensors, sender)
            except InputError as error:
                send(sender, failure(str(error), pb.TritonError.INVALID_ARG), is_final=True)
            except (QueueFull, ServiceEnded) as error:
                send(sender, failure(str(error), pb.TritonError.UNAVAILABLE), is_final=True)
            except Exception as error:  # a defect; without a response the client would wait for ever
                _log.exception("request %s", request_id)
                send(sender, failure(f"the server has failed: {error}", pb.TritonError.INTERNAL), is_final=True)

    def _submit(self, request_id: str, tensors: Tensors, sender: Any) -> None:
        sequences = self._sequences(tensors)
        if len(sequences) > (limit := self._service.max_requests):
            raise InputError(
                f"the request has {len(sequences)} sequences, and this server takes {limit} at a time "
                "(--max_queue_size); send fewer."
            )
        for one in sequences:
            self._service.check(one.request)
        call = Call(request_id, sender, sequences)
        next_sequence = iter(sequences)

        def make(*arguments: Any) -> Generation:
            return Reply(self, call, next(next_sequence), *arguments)

        call.generations = self._service.submit([one.request for one in sequences], make)
        self._calls[call] = None

    def _sequences(self, tensors: Tensors) -> list[Sequence]:
        """The tensors of each prompt, out of those that have the prompts as their first dimension."""
        tensors = {name: array for name, array in tensors.items() if array.size or name == "input_ids"}
        num_prompts = len(tensors["input_ids"])
        tensors.setdefault("exclude_input_in_output", np.full((num_prompts, 1), self._triton.exclude_input_in_output))
        if not self._triton.decoupled_mode:
            if num_prompts > 1:
                raise InputError(
                    f"input_ids: {num_prompts} prompts in a request need several responses; start the "
                    "server with --decoupled_mode, or send them one by one."
                )
            if tensors.get("streaming", np.zeros(1, bool)).any():
                raise InputError("streaming: needs several responses; start the server with --decoupled_mode.")
        numbers = tensors.pop(NUM_SEQUENCES, None)
        sequences = []
        for prompt in range(num_prompts):
            request = InferenceRequest.from_tensors(0, {name: array[prompt] for name, array in tensors.items()})
            sequences += sequences_of(request, prompt, None if numbers is None else int(numbers[prompt, 0]))
        if len(sequences) > 1 and not self._triton.decoupled_mode:
            raise InputError(
                f"{NUM_SEQUENCES}: {len(sequences)} need several responses; start the server with --decoupled_mode."
            )
        return sequences

    def _stop(self, request_id: str, sender: Any) -> None:
        """The request `stop`: ends those of the same id, and has an empty response."""
        if not request_id:
            raise InputError("stop: the request has no id; give that of the request to be stopped.")
        for call in self._calls:
            if call.request_id == request_id:
                self._service.cancel(call.generations)
        send(sender, pb.InferenceResponse([]), is_final=True)

    def ended(self, generation: Generation, call: Call) -> None:
        """A generation has had its final response."""
        if not call.num_open:
            del self._calls[call]
        self._metrics.ended(generation)

    async def _watch(self) -> None:
        """End the requests that their clients have cancelled."""
        while True:
            await asyncio.sleep(self._triton.cancellation_check_period_ms / 1e3)
            for call in list(self._calls):
                if call.sender.is_cancelled():
                    self._service.cancel(call.generations)

    async def _update(self) -> None:
        while True:
            self._metrics.update()
            await asyncio.sleep(self._triton.stats_check_period_ms / 1e3)


def sequences_of(request: InferenceRequest, prompt: int, number: int | None) -> list[Sequence]:
    """The `number` sequences of a prompt: the best beams of a beam search, else one for each of as many seeds."""
    limit = request.beam_width if request.beam_width > 1 else MAX_SEQUENCES
    if number is not None and not 1 <= number <= limit:
        raise InputError(f"{NUM_SEQUENCES}: {number}; expected 1 to {limit}.")
    if request.beam_width > 1:
        return [Sequence(request, prompt, 0, number)]
    sampling, found = request.sampling, []
    for index in range(number or 1):
        seeded = replace(request, sampling=replace(sampling, seed=sampling.seed + index))
        found.append(Sequence(seeded, prompt, index, None))
    return found


class TritonMetrics:
    """The statistics of the batch manager as metrics of Triton."""

    def __init__(self, service: Service, labels: dict[str, str]) -> None:
        self._source = ServerMetrics(
            service.engine,
            service.statistics,
            labels["model"],
            "trtllm",
            lambda: service.num_live,
            lambda: service.num_queued,
        )
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, ...], Any] = {}
        self._values: dict[tuple[str, ...], float] = {}
        # Kept, because a family that Python releases leaves Triton's metrics.
        has_histograms = hasattr(pb.MetricFamily, "HISTOGRAM")
        self._lengths = [_histogram(name, labels) for name in ("input", "output")] if has_histograms else []

    def ended(self, generation: Generation) -> None:
        """Count the tokens of a request that has ended."""
        counts = len(generation.request.input_ids), generation.num_outputs
        for (_, metric), count in zip(self._lengths, counts, strict=False):
            metric.observe(float(count))

    def update(self) -> None:
        """Set those that have changed."""
        for gauge in self._source.collect():
            if not isinstance(gauge, GaugeMetricFamily) or not gauge.name.startswith(GAUGES_PREFIX):
                continue
            for sample in gauge.samples:
                key = (sample.name, *sample.labels.values())
                if self._values.get(key) != sample.value:
                    self._metric(key, gauge, sample.labels).set(sample.value)
                    self._values[key] = sample.value

    def _metric(self, key: tuple[str, ...], gauge: GaugeMetricFamily, labels: dict[str, str]) -> Any:
        if gauge.name not in self._families:
            self._families[gauge.name] = pb.MetricFamily(gauge.name, gauge.documentation, pb.MetricFamily.GAUGE)
        if key not in self._metrics:
            self._metrics[key] = self._families[gauge.name].Metric(labels=labels)
        return self._metrics[key]


def _histogram(name: str, labels: dict[str, str]) -> tuple[Any, Any]:
    """A family for the lengths of inputs or outputs, and its metric."""
    family = pb.MetricFamily(f"nv_llm_{name}_token_len", f"Lengths of {name}s in tokens.", pb.MetricFamily.HISTOGRAM)
    labels = {"response_metric_type": f"total_{name}_tokens", **labels}
    return family, family.Metric(labels=labels, buckets=list(TOKENS))


def send(sender: Any, response: Any, is_final: bool) -> None:
    """Send a response of a call, or its last one."""
    sender.send(response, pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_final else 0)


def failure(message: str, code: Any) -> Any:
    """A response with an error instead of tensors."""
    return pb.InferenceResponse(error=pb.TritonError(message, code))


# Tensors are exchanged by DLPack, because some versions of Triton misread the arrays of NumPy 2.


def copied(tensor: Any) -> NDArray[Any]:
    """A copy of a tensor of Triton."""
    shape = tensor.shape()
    return np.from_dlpack(tensor).copy() if math.prod(shape) else np.zeros(shape, tensor.as_numpy().dtype)


def triton_tensor(name: str, array: NDArray[Any]) -> Any:
    """`array` as a tensor of Triton."""
    if not array.size:
        return pb.Tensor(name, array)
    capsule = np.ascontiguousarray(array).__dlpack__()
    tensor = pb.Tensor.from_dlpack(name, capsule)
    # Triton takes over the memory, but gives the capsule a name that NumPy does not know.
    ctypes.pythonapi.PyCapsule_SetName(ctypes.py_object(capsule), USED_CAPSULE)
    return tensor
