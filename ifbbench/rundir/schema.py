"""The JSON schema (draft 2020-12) of each file of a run directory.

A schema is made from the type that the file is written from. `run.json`, `summary.json` and `trace.jsonl` are written
from dictionaries: their types are here and in `summary_schema`. A field that may be UNSET need not be there.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from msgspec import Struct, UnsetType, field
from msgspec.json import schema_components
from msgspec.structs import fields

from ifbbench.compressed import content_path
from ifbbench.errors import InputError
from ifbbench.rundir.client_side import ClientRequestLine, ClientSpanLine
from ifbbench.rundir.line_types import ExecutorLine, InflightLine, RequestLine, SpanLine, StaticLine
from ifbbench.rundir.run_directory import OPEN_SPANS
from ifbbench.rundir.summary_schema import Summary
from ifbbench.settings.config import settings
from ifbbench.settings.config_schema import DRAFT, setting_schema


class TraceIdentity(Struct):
    """The trace that was replayed.

    sha256: hash of its content.
    skipped_rows: bad rows that were left out, with --skip_bad_rows.
    notes: what reading it left out or assumed.
    """

    name: str
    source: str
    sha256: str
    requests: int
    skipped_rows: int
    notes: list[str]


class ModelFacts(Struct):
    """The model and its device.

    missing_kernels: why a run on a CPU was without compiled kernels, and slower.
    quantization: quantization of the checkpoint, where it decided the data type, and how that is known.
    """

    name: str
    parameters: int
    layers: int
    hidden_size: int
    dtype: str | None
    device: str
    missing_kernels: str | UnsetType
    quantization: str | UnsetType


class Gpu(Struct):
    """The GPU that the model ran on."""

    name: str
    memory_bytes: int


class Hardware(Struct):
    """The machine.

    gpu: None unless the model ran on one.
    """

    machine: str
    cpu: str
    cores: int
    memory_bytes: int
    system: str
    gpu: Gpu | None


class DeviceLimits(Struct):
    """What the device can do at most; of a run with --profile."""

    flops_per_s: float | None
    bytes_per_s: float | None


class RankFacts(Struct):
    """A process of a run in several.

    tp_rank: which of those that share the layers of `stage`, a pipeline stage.
    """

    rank: int
    stage: int
    tp_rank: int
    device: str
    host: str
    pid: int


class Endpoint(Struct):
    """The server of a run against an endpoint.

    model: the name that it has there.
    router, backends: name of a router in front of several servers, and their addresses by number.
    """

    url: str
    type: str
    model: str
    router: str | UnsetType
    backends: list[str] | UnsetType


class KvCacheCapacity(Struct):
    """What vLLM says of its KV cache at its start.

    max_concurrency: requests of the longest sequence.
    """

    tokens: int
    max_concurrency: float


class RunFile(Struct):
    """What was run, and where.

    derived: settings that were not given, and were decided by model, device and the other settings; left out by older
        versions.
    replica_settings: settings of each replica that not all have in common, where replicas differ.
    schedule_digest: sha256 of all decisions without times; None until the run has ended.
    wall_s: real time from the start of the recording to its end.
    """

    name: str
    config: dict[str, Any]
    derived: list[str] | UnsetType
    replica_settings: list[dict[str, Any]] | UnsetType
    num_kv_blocks: int | None
    kv_cache_capacity: KvCacheCapacity | UnsetType
    seed: int
    trace: TraceIdentity
    model: ModelFacts | None
    endpoint: Endpoint | UnsetType
    recorded: dict[str, Any] | UnsetType
    imported: dict[str, Any] | UnsetType
    versions: dict[str, str | None]
    hardware: Hardware
    git_revision: str | None
    device_limits: DeviceLimits | UnsetType
    ranks: list[RankFacts] | UnsetType
    schedule_digest: str | None
    partial: bool
    wall_s: float | UnsetType


class TraceLine(Struct):
    """A request of the trace as replayed.

    max_new_tokens: number of output tokens reserved.
    output_len: actual number of output tokens.

    Either `prompt_tokens` or `prompt_len` is there.
    """

    request_id: int
    arrival_s: float
    prompt_len: int | UnsetType
    prompt_tokens: list[int] | UnsetType
    prefix_ids: list[int] | UnsetType
    prefix_lens: list[int] | UnsetType
    max_new_tokens: int
    output_len: int
    priority: float | UnsetType
    beam_width: int | UnsetType
    lora_task_id: int | UnsetType
    stop_ids: list[int] | UnsetType
    request_class: str | UnsetType = field(name="class")
    session_id: int | UnsetType
    added_in: int | UnsetType
    added_with: int | UnsetType
    stopped_in: int | UnsetType


class MetricsLine(Struct):
    """A line of `metrics.jsonl`: the metrics of the server of a run against an endpoint, when they were read. Either
    the samples of a text for Prometheus by name and labels, or the iterations that trtllm-serve lists."""

    at_s: float
    values: dict[str, float] | UnsetType
    iterations: list[dict[str, Any]] | UnsetType


FILES: dict[str, tuple[type[Struct], ...]] = {
    "run.json": (RunFile,),
    "summary.json": (Summary,),
    "iterations.jsonl": (InflightLine, StaticLine, ExecutorLine),
    "steps.jsonl": (StaticLine, ExecutorLine),
    "spans.jsonl": (SpanLine, ClientSpanLine),
    OPEN_SPANS: (SpanLine,),
    "requests.jsonl": (RequestLine, ClientRequestLine),
    "metrics.jsonl": (MetricsLine,),
    "trace.jsonl": (TraceLine,),
}


def schemas() -> dict[str, Any]:
    """File name to its schema. That of a file of lines describes one line."""
    return {name: schema_of(name) for name in FILES}


def schema_of(file: str) -> dict[str, Any]:
    """The schema of a file of a run directory, by name or path; InputError for another file."""
    name = content_path(Path(file)).name
    if name not in FILES:
        raise InputError(f"{file!r} has no schema; expected one of {', '.join(FILES)}.")
    references, components = schema_components(FILES[name], ref_template="#/$defs/{name}")
    for struct in {found for root in FILES[name] for found in _structs(root)}:
        component = components[struct.__name__]
        component["description"] = inspect.cleandoc(component["description"])
        component["required"] = [item.encode_name for item in fields(struct) if UnsetType not in get_args(item.type)]
    if name == "run.json":
        config = {item.name: setting_schema(item) for item in settings()}
        components["RunFile"]["properties"]["config"] = {"type": "object", "properties": config}
    root = references[0] if len(references) == 1 else {"anyOf": list(references)}
    return {"$schema": DRAFT, "title": name, **root, "$defs": components}


def _structs(of: Any) -> Iterator[type[Struct]]:
    """All Structs that a type consists of."""
    if inspect.isclass(of) and issubclass(of, Struct):
        yield of
        for item in fields(of):
            yield from _structs(item.type)
    for part in get_args(of):
        yield from _structs(part)
