"""Workload specifications: a workload as distributions, read from a YAML or TOML file.

datasets/README.md documents the keys.
"""

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from ifbbench import fields
from ifbbench.errors import InputError
from ifbbench.fields import located
from ifbbench.workload.distributions import (
    ARRIVALS,
    DURATIONS,
    LENGTHS,
    AllAtOnce,
    ArrivalProcess,
    DurationDistribution,
    LengthDistribution,
    Limited,
    NotNegative,
    Quantiles,
)
from ifbbench.workload.trace import Reserve

SUFFIXES = (".yaml", ".yml", ".toml")
KEYS = ("name", "num_requests", "prompt_len", "output_len", "arrival", "reserve", "shared_prefix", "sessions")
REQUIRED_KEYS = ("num_requests", "prompt_len", "output_len")
MAX_POOLS = 10_000_000
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
class Sessions:
    """Conversations of `turns` turns. A turn arrives `think_time` seconds after the one before it, answered or not."""

    turns: LengthDistribution
    think_time: DurationDistribution


@dataclass(frozen=True)
class WorkloadSpec(Limited):
    """Requests to be drawn.

    prompt_len: of the whole prompt, but at least one token more than a shared prefix that it begins with; with
        `sessions`, of each turn's new message.
    arrival: with `sessions`, of conversations.
    reserve: sets `max_new_tokens` from the output length drawn; see Reserve.
    """

    name: str
    num_requests: Annotated[int, {"minimum": 1}]
    prompt_len: LengthDistribution
    output_len: LengthDistribution
    arrival: ArrivalProcess = ALL_AT_ONCE
    reserve: str = "actual"
    shared_prefix: SharedPrefix | None = None
    sessions: Sessions | None = None

    def canonical_text(self, seed: int) -> str:
        """One text for equal workloads, however their files are written. The trace's sha256 is taken of it."""
        facts = {
            "arrival": _tagged(self.arrival, ARRIVALS),
            "num_requests": self.num_requests,
            "output_len": _tagged(self.output_len, LENGTHS),
            "prompt_len": _tagged(self.prompt_len, LENGTHS),
            "reserve": self.reserve,
            "seed": seed,
        }
        if self.shared_prefix is not None:
            length = _tagged(self.shared_prefix.len, LENGTHS)
            facts["shared_prefix"] = asdict(self.shared_prefix) | {"len": length}
        if self.sessions is not None:
            facts["sessions"] = {
                "turns": _tagged(self.sessions.turns, LENGTHS),
                "think_time": _tagged(self.sessions.think_time, DURATIONS),
            }
        return json.dumps(facts, sort_keys=True, separators=(",", ":"))


def _tagged(choice: Any, kinds: Mapping[str, type]) -> dict[str, Any]:
    (kind,) = (name for name, candidate in kinds.items() if type(choice) is candidate)
    return {"kind": kind, **asdict(choice)}


# Reading.


def read_spec(path: Path) -> WorkloadSpec:
    """The specification in the file at `path`; InputError names the file and the key that is wrong."""
    with located(str(path), "See datasets/README.md for what a workload specification holds."):
        return parse_spec(_load(path), default_name=path.stem)


def _load(path: Path) -> Any:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text) if path.suffix.lower() == ".toml" else yaml.safe_load(text)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}.") from error
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(f"not valid {path.suffix[1:].upper()}: {' '.join(str(error).split())}.") from error


def parse_spec(document: Any, default_name: str) -> WorkloadSpec:
    """The specification in a mapping with REQUIRED_KEYS and optional others of KEYS."""
    values = fields.table(document, "the specification", KEYS, REQUIRED_KEYS)
    reserve = fields.text(values.get("reserve", "actual"), "reserve")
    Reserve(reserve)
    return WorkloadSpec(
        name=fields.text(values.get("name", default_name), "name"),
        num_requests=values["num_requests"],
        prompt_len=_chosen(values["prompt_len"], "distribution", LENGTHS, "prompt_len"),
        output_len=_chosen(values["output_len"], "distribution", LENGTHS, "output_len"),
        arrival=_chosen(values["arrival"], "process", ARRIVALS, "arrival") if "arrival" in values else ALL_AT_ONCE,
        reserve=reserve,
        shared_prefix=_shared_prefix(values["shared_prefix"]) if "shared_prefix" in values else None,
        sessions=_sessions(values["sessions"]) if "sessions" in values else None,
    )


def _shared_prefix(value: Any) -> SharedPrefix:
    known = [field.name for field in dataclasses.fields(SharedPrefix)]
    values = fields.table(value, "shared_prefix", known, ("pools", "len"))
    length = values["len"]
    if not isinstance(length, dict):
        length = {"distribution": "fixed", "value": length}
    values |= {"len": _chosen(length, "distribution", LENGTHS, "shared_prefix.len")}
    with located("shared_prefix"):
        return SharedPrefix(**values)


def _sessions(value: Any) -> Sessions:
    values = fields.table(value, "sessions", ("turns", "think_time"), ("turns", "think_time"))
    return Sessions(
        _chosen(values["turns"], "distribution", LENGTHS, "sessions.turns"),
        _chosen(values["think_time"], "distribution", DURATIONS, "sessions.think_time"),
    )


def _chosen(value: Any, tag: str, kinds: Mapping[str, type], name: str) -> Any:
    """The kind that `value[tag]` names, made from the other keys of `value`."""
    numbers = dict(fields.table(value, name))
    kind = kinds[fields.choice(numbers.pop(tag, None), f"{name}.{tag}", kinds)]
    if kind is Quantiles:
        with located(name):
            points = ((_percentile(key), fields.number(length, key, 1)) for key, length in numbers.items())
            return Quantiles(tuple(sorted(points)))
    known = dataclasses.fields(kind)
    required = [field.name for field in known if field.default is dataclasses.MISSING]
    fields.table(numbers, name, [field.name for field in known], required)
    with located(name):
        return kind(**numbers)


def _percentile(key: str) -> float:
    """99.9 of `p99.9`."""
    return fields.number(key.removeprefix("p"), key, 0, 100, from_text=True)
