"""The JSON schema (draft 2020-12) of each file of a run directory.

A schema is made from the type that the file is written from. `run.json`, `summary.json` and `trace.jsonl` are written
from dictionaries: their types are here. A field that may be UNSET need not be there.
"""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from msgspec import Struct, UnsetType, field
from msgspec.json import schema_components
from msgspec.structs import fields

from ifbbench.compressed import content_path
from ifbbench.config import settings
from ifbbench.errors import InputError
from ifbbench.fields import Setting
from ifbbench.recording.iteration_lines import ExecutorLine, InflightLine, StaticLine
from ifbbench.recording.lines import RequestLine, SpanLine
from ifbbench.recording.run_directory import OPEN_SPANS

DRAFT = "https://json-schema.org/draft/2020-12/schema"
JSON_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}


class Distribution(Struct):
    """Statistics of a figure over requests, or over gaps between tokens; None if there are none."""

    mean: float | None
    min: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    p99_9: float | None
    max: float | None


class RequestCounts(Struct):
    """Requests of the trace, those with all their tokens, and those that were refused or failed."""

    total: int
    completed: int
    failed: int


class KvBlocks(Struct):
    """Blocks of the paged KV cache; None for a contiguous one."""

    max: int | None
    peak_used: int | None
    tokens_per_block: int | None


class KvTokens(Struct):
    """Token positions of the KV cache: in all, the largest number that requests held, and with a token in them."""

    max: int
    peak_held: int
    peak_filled: int


class Objective(Struct):
    """A service level objective. share: of the completed requests that met it, if it is one of each request."""

    target: float
    value: float | None
    met: bool
    share: float | UnsetType


class Arrivals(Struct):
    """The rate at which requests were to arrive, the one at which they were submitted, and how late that was."""

    requested_rate_per_s: float | None
    achieved_rate_per_s: float | None
    lateness_s: Distribution


class Window(Struct):
    """The steady state, on the run's clock."""

    start_s: float
    end_s: float


class Burst(Struct):
    """A stretch of arrivals above the mean rate in which slow requests arrived. rate_over_mean: its rate over that."""

    start_s: float
    duration_s: float
    requests: int
    slow_requests: int
    rate_per_s: float
    rate_over_mean: float


class RequestFigures(Struct):
    """The figures of requests: of all, of a class, or of a priority."""

    requests: RequestCounts
    request_throughput_per_s: float
    output_throughput_tokens_per_s: float
    total_throughput_tokens_per_s: float
    queue_time_s: Distribution
    ttft_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    itl_s: Distribution
    prefix_hit_rate: float
    prompt_tokens: int
    output_tokens: int
    per_user_output_speed_tokens_per_s: Distribution | UnsetType
    goodput_requests_per_s: float | UnsetType | None
    goodput_share: float | UnsetType | None
    slo: dict[str, Objective] | UnsetType


class GroupFigures(RequestFigures):
    """The figures of a class or of a priority."""

    output_tokens_per_request_s: float


class ExpectedError(Struct):
    """How far figures of a simulated run may be from a real server's: [low, high], relative, of each. reason: why
    nothing is known, if `compared` is false. coverage: share of the `rows` measurements that are within."""

    compared: bool
    reason: str | UnsetType
    rows: int | UnsetType
    coverage: float | UnsetType
    load: str | UnsetType
    ttft_s: list[float] | UnsetType
    itl_s: list[float] | UnsetType
    output_throughput_tokens_per_s: list[float] | UnsetType


class Summary(RequestFigures):
    """Every figure of a run."""

    duration_s: float
    iterations: int
    pauses: int
    recomputed_tokens: int
    recomputed_share: float
    empty_generation_slots: int
    padding_waste: float
    kv_blocks: KvBlocks
    kv_tokens: KvTokens
    peak_scheduled_requests: int
    bound_by: dict[str, float]
    schedule_digest: str
    partial: bool
    bound_by_time: dict[str, float] | UnsetType
    waiting_by_limit: dict[str, float] | UnsetType
    arrivals: Arrivals | UnsetType
    by_class: dict[str, GroupFigures] | UnsetType
    by_priority: dict[str, GroupFigures] | UnsetType
    fairness_index: float | UnsetType
    overloaded: bool | UnsetType
    queue_growth_requests_per_s: float | UnsetType
    bursts: list[Burst] | UnsetType
    slow_requests: int | UnsetType
    slow_ttft_s: float | UnsetType
    steady_state: Window | UnsetType
    expected_error: ExpectedError | UnsetType


class TraceIdentity(Struct):
    """The trace that was replayed. sha256: of its content. skipped_rows: bad ones, with --skip_bad_rows. notes: what
    reading it left out or assumed."""

    name: str
    source: str
    sha256: str
    requests: int
    skipped_rows: int
    notes: list[str]


class ModelFacts(Struct):
    """The model and its device. missing_kernels: why a run on a CPU was without compiled kernels, and slower."""

    name: str
    parameters: int
    layers: int
    hidden_size: int
    dtype: str | None
    device: str
    missing_kernels: str | UnsetType


class Gpu(Struct):
    """The GPU that the model ran on."""

    name: str
    memory_bytes: int


class Hardware(Struct):
    """The machine. gpu: None unless the model ran on one."""

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


class RunFile(Struct):
    """What was run, and where. derived: settings that were not given, and were decided by model, device and the other
    settings; left out by older versions. schedule_digest: sha256 of all decisions without times; None until the run has
    ended. wall_s: real time from the start of the recording to its end."""
    name: str
    config: dict[str, Any]
    derived: list[str] | UnsetType
    num_kv_blocks: int | None
    seed: int
    trace: TraceIdentity
    model: ModelFacts
    versions: dict[str, str | None]
    hardware: Hardware
    git_revision: str | None
    device_limits: DeviceLimits | UnsetType
    schedule_digest: str | None
    partial: bool
    wall_s: float | UnsetType


class TraceLine(Struct):
    """A request of the trace as replayed. max_new_tokens: reserved; output_len: actual. Either of prompt_tokens and
    prompt_len is there."""

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


FILES: dict[str, tuple[type[Struct], ...]] = {
    "run.json": (RunFile,),
    "summary.json": (Summary,),
    "iterations.jsonl": (InflightLine, StaticLine, ExecutorLine),
    "steps.jsonl": (StaticLine, ExecutorLine),
    "spans.jsonl": (SpanLine,),
    OPEN_SPANS: (SpanLine,),
    "requests.jsonl": (RequestLine,),
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
        config = {item.name: _setting(item) for item in settings()}
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


def _setting(setting: Setting) -> dict[str, Any]:
    """The schema of a setting's value in `run.json`: as resolved, or null where it has no meaning."""
    json_type = JSON_TYPES[setting.type]
    limits = {"minimum": setting.minimum, "exclusiveMinimum": setting.above, "maximum": setting.maximum}
    schema: dict[str, Any] = {
        "description": setting.help,
        "type": [json_type, "null"] if setting.is_optional else json_type,
        **{name: limit for name, limit in limits.items() if limit is not None},
    }
    if setting.choices and not setting.other_texts:
        choices: list[str | None] = [*setting.choices]
        schema["enum"] = choices + [None] * setting.is_optional
    return schema


def config_schema() -> dict[str, Any]:
    """The schema of a config file: all settings by each of their names, and what commands take besides."""
    properties: dict[str, Any] = {}
    for item in settings():
        found = _setting(replace(item, is_optional=False))
        if item.unit:
            found["description"] += f" [{item.unit}]"
        if item.value_aliases and "enum" in found:
            found["enum"] = [*found["enum"], *item.value_aliases]
        if item.is_list:
            found = {"description": found["description"], "anyOf": [found, {"type": "array", "items": found}]}
        if item.command_line_default is not None:
            found["default"] = item.command_line_default
        properties |= dict.fromkeys((item.name, *item.aliases), found)
    value = {"type": [*JSON_TYPES.values()]}
    values = {"anyOf": [value, {"type": "array", "items": value}]}
    text, count = {"type": "string"}, {"type": "integer", "minimum": 1}
    keys: dict[str, tuple[str, dict[str, Any]]] = {
        "trace": ("The trace, where the command names none.", text),
        "repeat": ("Runs with other seeds: of the command, or of each point of a sweep.", count),
        "over": ("Of a sweep: the swept settings, each with its values: a list, or a text such as 512..16384:x2.",
                 {"anyOf": [{"type": "object", "additionalProperties": values}, {"type": "array", "items": text}]}),
        "zip": ("Of a sweep: pair the values of several settings instead of crossing them.", {"type": "boolean"}),
        "keep": ("Of a sweep: what is kept of each run.", {"enum": ["run", "summary"]}),
        "processes": ("Of a sweep: simulated runs at the same time.", count),
        "executor": ("Of a sweep: where the points run.", {"enum": ["local", "ray"]}),
    }
    for name, (help_text, found) in keys.items():
        properties[name] = {"description": help_text, **found}
    return {"$schema": DRAFT, "title": "Config file of ifbbench", "type": "object", "properties": properties,
            "additionalProperties": False}  # fmt: skip
