"""Workload specifications: a workload as distributions, read from a YAML or TOML file; `draw` draws its requests.

datasets/README.md documents the keys.
"""

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ifbbench.compressed import read_text
from ifbbench.errors import InputError
from ifbbench.settings import fields
from ifbbench.settings.fields import located
from ifbbench.workload.arrival_processes import ARRIVALS, AllAtOnce, ArrivalProcess
from ifbbench.workload.distributions import (
    DURATIONS,
    LENGTHS,
    DurationDistribution,
    Histogram,
    LengthDistribution,
    Limited,
    NotNegative,
    Positive,
    Quantiles,
)
from ifbbench.workload.trace import MAX_ID, Reserve

CLASS_KEYS = ("prompt_len", "output_len", "reserve", "shared_prefix", "sessions", "priority", "lora_task_id")
KEYS = ("name", "num_requests", *CLASS_KEYS[:2], "arrival", *CLASS_KEYS[2:], "classes")
REQUIRED_KEYS = ("num_requests",)
LENGTH_KEYS = ("prompt_len", "output_len")
KIND_NAMES: dict[Any, str] = {kind: name for kinds in (LENGTHS, DURATIONS, ARRIVALS) for name, kind in kinds.items()}
MAX_POOLS = 10_000_000
MAX_REQUESTS = 1_000_000_000
FROM_ARRIVAL, FROM_ANSWER = "arrival", "answer"
SYSTEM_PROMPT, CONVERSATION = "system_prompt", "conversation"
ALL_AT_ONCE = AllAtOnce()


@dataclass(frozen=True)
class SharedPrefix(Limited):
    """`pools` system prompts of lengths drawn from `len`; a prompt begins with one of them with probability `share`.

    The k-th pool, from 1, is chosen in proportion to k to the power of -`skew` (Zipf's law; 0: all equally likely).
    """

    pools: Annotated[int, {"minimum": 1, "maximum": MAX_POOLS}]
    len: LengthDistribution
    share: Annotated[float, {"minimum": 0, "maximum": 1}] = 1.0
    skew: NotNegative = 0.0


@dataclass(frozen=True)
class SubRequests(Limited):
    """Requests that a turn of an agent's conversation starts at once when it is answered; the next turn waits for them.

    count: number of sub-requests of a turn.
    prompt_len: what each adds to the context that it begins with.
    share: share of the turns that start any; the last turn of a conversation starts none.
    context: None, the system prompt alone; or CONVERSATION, the whole prompt of the turn.
    """

    count: LengthDistribution
    prompt_len: LengthDistribution
    output_len: LengthDistribution
    share: Annotated[float, {"minimum": 0, "maximum": 1}] = 1.0
    context: str | None = None


@dataclass(frozen=True)
class Sessions:
    """Conversations of `turns` turns, `think_time` seconds apart.

    think_from: what the think time of a turn follows: None, the arrival of the turn before it, answered or not; or
        FROM_ANSWER, the end of its answer, which only the replay knows (`after` and `think_s` of TraceRequest).
    sub_requests: with FROM_ANSWER only.
    """

    turns: LengthDistribution
    think_time: DurationDistribution
    think_from: str | None = None
    sub_requests: SubRequests | None = None


@dataclass(frozen=True)
class TaskIds(Limited):
    """LoRA task ids from `min` to `max`, all equally likely."""

    ascending = ("min", "max")
    min: Annotated[int, {"minimum": 0, "maximum": MAX_ID}]
    max: Annotated[int, {"minimum": 0, "maximum": MAX_ID}]


@dataclass(frozen=True)
class RequestClass(Limited):
    """Requests of one kind.

    prompt_len: length of the whole prompt, but at least one token more than a shared prefix that it begins with; with
        `sessions`, of each turn's new message.
    reserve: sets `max_new_tokens` from the output length drawn; see Reserve.
    weight: the class's share of arrivals (requests, or conversations), relative to the other classes.
    name: None for the only class of a workload without `classes`.
    """

    prompt_len: LengthDistribution
    output_len: LengthDistribution
    reserve: str = "actual"
    shared_prefix: SharedPrefix | None = None
    sessions: Sessions | None = None
    priority: Annotated[float | None, {"minimum": 0, "maximum": 1}] = None
    lora_task_id: TaskIds | None = None
    name: str | None = None
    weight: Positive = 1.0


@dataclass(frozen=True)
class WorkloadSpec(Limited):
    """Requests to be drawn: those of `classes`, or of the one class that the other fields describe.

    arrival: arrivals of requests; of conversations where a class has sessions.
    """

    name: str
    num_requests: Annotated[int, {"minimum": 1, "maximum": MAX_REQUESTS, "guards": True}]
    prompt_len: LengthDistribution | None = None
    output_len: LengthDistribution | None = None
    arrival: ArrivalProcess = ALL_AT_ONCE
    reserve: str = "actual"
    shared_prefix: SharedPrefix | None = None
    sessions: Sessions | None = None
    priority: float | None = None
    lora_task_id: TaskIds | None = None
    classes: tuple[RequestClass, ...] | None = None

    def request_classes(self) -> tuple[RequestClass, ...]:
        """The classes of the requests, at least one."""
        if self.classes is not None:
            return self.classes
        return (RequestClass(**{key: getattr(self, key) for key in CLASS_KEYS}),)

    def canonical_text(self, seed: int) -> str:
        """One text for equal workloads, however their files are written. The trace's sha256 is taken of it."""
        facts = {key: value for key, value in _plain(self).items() if key != "name"}
        if self.classes is not None:
            del facts["reserve"]  # each class has its own
        return json.dumps(facts | {"seed": seed}, sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """`value` with dataclasses as dictionaries of what is set, and with the name of its kind in each distribution."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    kind = {"kind": KIND_NAMES[type(value)]} if type(value) in KIND_NAMES else {}
    given = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return kind | {name: _plain(item) for name, item in given.items() if item is not None}


# Reading.


def read_spec(path: Path) -> WorkloadSpec:
    """The specification in the file at `path`; InputError names the file and the key that is wrong."""
    from yaml import YAMLError

    from ifbbench.settings.yaml_text import parse_yaml

    with located(str(path), "See datasets/README.md for what a workload specification holds."):
        try:
            text = read_text(path)
            document = tomllib.loads(text) if path.suffix.lower() == ".toml" else parse_yaml(text)
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}.") from error
        except (ValueError, RecursionError, YAMLError) as error:
            raise InputError(f"not valid {path.suffix[1:].upper()}: {' '.join(str(error).split())[:300]}.") from error
        return parse_spec(document, default_name=path.stem)


def parse_spec(document: Any, default_name: str) -> WorkloadSpec:
    """The specification in a mapping with `num_requests`, lengths or classes, and optional others of KEYS."""
    given = fields.table(document, "the specification", KEYS)
    required = REQUIRED_KEYS if "classes" in given else (*REQUIRED_KEYS, *LENGTH_KEYS)
    values = {"name": default_name} | fields.table(given, "the specification", None, required)
    return WorkloadSpec(
        name=fields.file_name(values["name"], "name"),
        num_requests=values["num_requests"],
        arrival=_chosen(values["arrival"], ARRIVALS, "arrival", "process") if "arrival" in values else ALL_AT_ONCE,
        **({"classes": _classes(values)} if "classes" in values else _class_facts(values)),
    )


def _classes(values: Mapping[str, Any]) -> tuple[RequestClass, ...]:
    """The classes of a specification. Keys beside `classes` are the defaults of every class."""
    listed, common = values["classes"], {key: values[key] for key in CLASS_KEYS if key in values}
    if not isinstance(listed, list) or not listed:
        raise fields.unexpected("classes", listed, "a list of at least one class")
    classes = [_request_class(entry, f"classes[{number}]", common) for number, entry in enumerate(listed)]
    names = [one.name for one in classes]
    if len(set(names)) < len(names):
        raise InputError(f"classes have the names {', '.join(map(str, names))}; expected each name once.")
    return tuple(classes)


def _request_class(entry: Any, place: str, common: Mapping[str, Any]) -> RequestClass:
    known = ("name", "weight", *CLASS_KEYS)
    values = {**common, **fields.table(entry, place, known)}
    fields.table(values, place, known, ("name", *LENGTH_KEYS))
    with located(place):
        name = fields.text(values["name"], "name")
        return RequestClass(**_class_facts(values), name=name, weight=values.get("weight", 1.0))


def _class_facts(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a class that a specification gives."""
    facts: dict[str, Any] = {key: _chosen(values[key], LENGTHS, key) for key in LENGTH_KEYS}
    facts["reserve"] = fields.text(values.get("reserve", "actual"), "reserve")
    Reserve(facts["reserve"])
    if "shared_prefix" in values:
        facts["shared_prefix"] = _shared_prefix(values["shared_prefix"])
    if "sessions" in values:
        facts["sessions"] = _sessions(values["sessions"])
    if "priority" in values:
        facts["priority"] = fields.number(values["priority"], "priority", 0, 1)
    if "lora_task_id" in values:
        facts["lora_task_id"] = _task_ids(values["lora_task_id"])
    return facts


def _shared_prefix(value: Any) -> SharedPrefix:
    values = _arguments(SharedPrefix, value, "shared_prefix")
    length = values["len"] if isinstance(values["len"], dict) else {"distribution": "fixed", "value": values["len"]}
    values = values | {"len": _chosen(length, LENGTHS, "shared_prefix.len")}
    with located("shared_prefix"):
        return SharedPrefix(**values)


def _sessions(value: Any) -> Sessions:
    values = _arguments(Sessions, value, "sessions")
    start = fields.choice(values.get("think_from", FROM_ARRIVAL), "sessions.think_from", (FROM_ARRIVAL, FROM_ANSWER))
    return Sessions(
        _chosen(values["turns"], LENGTHS, "sessions.turns"),
        _chosen(values["think_time"], DURATIONS, "sessions.think_time"),
        # As None, the default stays out of the canonical text.
        None if start == FROM_ARRIVAL else start,
        _sub_requests(values["sub_requests"], start) if "sub_requests" in values else None,
    )


def _sub_requests(value: Any, think_from: str) -> SubRequests:
    name = "sessions.sub_requests"
    values = _arguments(SubRequests, value, name)
    if think_from != FROM_ANSWER:
        raise InputError(f"{name}: the next turn waits for their answers; expected sessions.think_from {FROM_ANSWER}.")
    context = fields.choice(values.get("context", SYSTEM_PROMPT), f"{name}.context", (SYSTEM_PROMPT, CONVERSATION))
    lengths = {key: _chosen(values[key], LENGTHS, f"{name}.{key}") for key in ("count", "prompt_len", "output_len")}
    with located(name):
        return SubRequests(
            **lengths, share=values.get("share", 1.0), context=None if context == SYSTEM_PROMPT else context
        )


def _task_ids(value: Any) -> TaskIds:
    """One id, or a table of `min` and `max`."""
    values = _arguments(TaskIds, value, "lora_task_id") if isinstance(value, dict) else {"min": value, "max": value}
    with located("lora_task_id"):
        return TaskIds(**values)


def _chosen(value: Any, kinds: Mapping[str, type], name: str, tag: str = "distribution") -> Any:
    """The kind that `value[tag]` names, made from the other keys of `value`."""
    numbers = dict(fields.table(value, name))
    kind = kinds[fields.choice(numbers.pop(tag, None), f"{name}.{tag}", kinds)]
    if kind is Quantiles:
        with located(name):
            points = (
                (fields.number(key.removeprefix("p"), key, 0, 100, from_text=True), fields.number(length, key, 1))
                for key, length in numbers.items()
            )
            return Quantiles(tuple(sorted(points)))
    _arguments(kind, numbers, name)
    with located(name):
        if kind is Histogram:
            numbers = {key: tuple(item) if isinstance(item, list) else item for key, item in numbers.items()}
        return kind(**numbers)


def _arguments(kind: Any, value: Any, name: str) -> dict[str, Any]:
    """`value`, checked to hold the fields of the dataclass `kind`, at least those without a default, and no others."""
    known = dataclasses.fields(kind)
    required = [field.name for field in known if field.default is dataclasses.MISSING]
    return fields.table(value, name, [field.name for field in known], required)
