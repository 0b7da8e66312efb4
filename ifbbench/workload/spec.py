"""Workload specifications: a workload as distributions, read from a YAML or TOML file, and the requests drawn from it.

datasets/README.md documents the keys.
"""

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from ifbbench import fields
from ifbbench.errors import InputError
from ifbbench.fields import located
from ifbbench.workload.arrivals import ARRIVALS, AllAtOnce, ArrivalProcess
from ifbbench.workload.distributions import (
    DURATIONS,
    LENGTHS,
    DurationDistribution,
    LengthDistribution,
    Lengths,
    Limited,
    NotNegative,
    Quantiles,
    Stream,
    Times,
    generator,
)
from ifbbench.workload.prompts import runs_of, with_prefix
from ifbbench.workload.trace import (
    NO_ORIGIN,
    PREFIX_BLOCK,
    PrefixRun,
    RequestColumns,
    Reserve,
    Trace,
    TraceRequest,
    identifiers,
    integers,
    num_blocks,
    seconds,
)

SUFFIXES = (".yaml", ".yml", ".toml")
KEYS = ("name", "num_requests", "prompt_len", "output_len", "arrival", "reserve", "shared_prefix", "sessions")
REQUIRED_KEYS = ("num_requests", "prompt_len", "output_len")
KIND_NAMES: dict[Any, str] = {kind: name for kinds in (LENGTHS, DURATIONS, ARRIVALS) for name, kind in kinds.items()}
MAX_POOLS = 10_000_000
NO_POOL = -1
ARRIVAL_DECIMALS = 6
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
        facts = {key: value for key, value in _plain(self).items() if key != "name" and value is not None}
        return json.dumps(facts | {"seed": seed}, sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """`value` with dataclasses as dictionaries, and with the name of its kind in each distribution."""
    if not dataclasses.is_dataclass(value):
        return value
    kind = {"kind": KIND_NAMES[type(value)]} if type(value) in KIND_NAMES else {}
    return kind | {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}


# Reading.


def read_spec(path: Path) -> WorkloadSpec:
    """The specification in the file at `path`; InputError names the file and the key that is wrong."""
    import yaml

    with located(str(path), "See datasets/README.md for what a workload specification holds."):
        try:
            text = path.read_text(encoding="utf-8")
            document = tomllib.loads(text) if path.suffix.lower() == ".toml" else yaml.safe_load(text)
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}.") from error
        except (ValueError, yaml.YAMLError) as error:
            raise InputError(f"not valid {path.suffix[1:].upper()}: {' '.join(str(error).split())}.") from error
        return parse_spec(document, default_name=path.stem)


def parse_spec(document: Any, default_name: str) -> WorkloadSpec:
    """The specification in a mapping with REQUIRED_KEYS and optional others of KEYS."""
    values = {"name": default_name} | fields.table(document, "the specification", KEYS, REQUIRED_KEYS)
    reserve = fields.text(values.get("reserve", "actual"), "reserve")
    Reserve(reserve)
    return WorkloadSpec(
        name=fields.text(values["name"], "name"),
        num_requests=values["num_requests"],
        prompt_len=_chosen(values["prompt_len"], LENGTHS, "prompt_len"),
        output_len=_chosen(values["output_len"], LENGTHS, "output_len"),
        arrival=_chosen(values["arrival"], ARRIVALS, "arrival", "process") if "arrival" in values else ALL_AT_ONCE,
        reserve=reserve,
        shared_prefix=_shared_prefix(values["shared_prefix"]) if "shared_prefix" in values else None,
        sessions=_sessions(values["sessions"]) if "sessions" in values else None,
    )


def _shared_prefix(value: Any) -> SharedPrefix:
    values = _arguments(SharedPrefix, value, "shared_prefix")
    length = values["len"] if isinstance(values["len"], dict) else {"distribution": "fixed", "value": values["len"]}
    values |= {"len": _chosen(length, LENGTHS, "shared_prefix.len")}
    with located("shared_prefix"):
        return SharedPrefix(**values)


def _sessions(value: Any) -> Sessions:
    values = _arguments(Sessions, value, "sessions")
    return Sessions(
        _chosen(values["turns"], LENGTHS, "sessions.turns"),
        _chosen(values["think_time"], DURATIONS, "sessions.think_time"),
    )


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
        return kind(**numbers)


def _arguments(kind: Any, value: Any, name: str) -> dict[str, Any]:
    """`value`, checked to hold the fields of the dataclass `kind`, at least those without a default, and no others."""
    known = dataclasses.fields(kind)
    required = [field.name for field in known if field.default is dataclasses.MISSING]
    return fields.table(value, name, [field.name for field in known], required)


# Drawing.


def draw_trace(spec: WorkloadSpec, seed: int, source: str, max_num_samples: int | None = None) -> Trace:
    """The first `max_num_samples` requests drawn from `spec` (default: all), by arrival; a pure function of (spec,
    seed). Conversations are drawn one after another, each with all its turns; the last may be cut off."""
    count = min(spec.num_requests, max_num_samples or spec.num_requests)
    inputs = spec.prompt_len.draw(generator(seed, Stream.INPUT_LENGTH), count)
    drawn_outputs = spec.output_len.draw(generator(seed, Stream.OUTPUT_LENGTH), count)
    reserved, outputs = Reserve(spec.reserve).columns(integers(drawn_outputs), integers(drawn_outputs))
    shared = spec.shared_prefix
    # NO_POOL as an index is the last element, a prefix without tokens.
    pools: list[list[PrefixRun]] = [*(draw_pools(shared, seed) if shared else ()), []]
    prefix_len = np.array([sum(length for _, length in runs) for runs in pools])
    pool_of = draw_pool_choices(shared, seed, count) if shared else np.full(count, NO_POOL)
    ids = np.arange(count)
    if spec.sessions is None:
        arrivals_s = spec.arrival.draw(generator(seed, Stream.ARRIVAL), count)
        origin = np.where(pool_of == NO_POOL, NO_ORIGIN, ids)
        prompt_len = integers(np.maximum(inputs, prefix_len[pool_of] + 1))

        def named_tokens(index: int) -> list[PrefixRun]:
            return pools[pool_of[index]]

    else:
        session_of, arrivals_s = draw_sessions(spec.sessions, seed, count, spec.arrival)
        origin, pool_of = ids, pool_of[session_of]
        tokens, first_ids = _conversations_so_far(session_of, inputs, np.asarray(outputs), drawn_outputs)
        first_ids += sum(map(len, pools))
        prompt_len = integers(tokens + prefix_len[pool_of])

        def named_tokens(index: int) -> list[PrefixRun]:
            length, first_id = int(tokens[index]), int(first_ids[index])
            return pools[pool_of[index]] + runs_of(range(first_id, first_id + num_blocks(length)), length)

    def recall(index: int) -> TraceRequest:
        # The columns have the arrival and the other lengths.
        return with_prefix(TraceRequest(index, 0.0, prompt_len[index], 1, 1), named_tokens(index))

    requests = RequestColumns(
        request_id=identifiers(ids),
        arrival_s=seconds(np.round(arrivals_s, ARRIVAL_DECIMALS)),
        prompt_len=prompt_len,
        max_new_tokens=reserved,
        output_len=outputs,
        origin=identifiers(origin),
        recall=recall,
    ).by_arrival()
    sha256 = hashlib.sha256(spec.canonical_text(seed).encode()).hexdigest()
    return Trace(spec.name, requests, sha256, source)


def draw_pools(shared: SharedPrefix, seed: int) -> list[list[PrefixRun]]:
    """The tokens of each pool's system prompt; prefix ids are numbered from 0 without gaps."""
    pools: list[list[PrefixRun]] = []
    first_id = 0
    for length in shared.len.draw(generator(seed, Stream.POOL_LENGTH), shared.pools).tolist():
        next_id = first_id + num_blocks(length)
        pools.append(runs_of(range(first_id, next_id), length))
        first_id = next_id
    return pools


def draw_pool_choices(shared: SharedPrefix, seed: int, count: int) -> NDArray[np.int64]:
    """The pool of each of `count` requests, from 0; NO_POOL for a request without a shared prefix."""
    weights = np.arange(1, shared.pools + 1, dtype=np.float64) ** -shared.skew
    bounds = np.cumsum(weights / weights.sum())
    chosen = np.searchsorted(bounds[:-1], generator(seed, Stream.POOL_CHOICE).random(count), side="right")
    shares = generator(seed, Stream.POOL_SHARE).random(count) < shared.share
    return np.where(shares, chosen, NO_POOL)


def draw_sessions(
    sessions: Sessions, seed: int, num_turns: int, starts: ArrivalProcess
) -> tuple[NDArray[np.int64], Times]:
    """The conversation of each turn, numbered from 0, and the turn's arrival (s); each of shape [num_turns].

    `starts` draws when conversations begin. The last one may be cut off. A longer drawing begins with the conversations
    of a shorter one.
    """
    counts = sessions.turns.draw(generator(seed, Stream.TURNS), num_turns)
    ends = np.minimum(np.cumsum(counts), num_turns)
    ends = ends[: int(np.searchsorted(ends, num_turns)) + 1]
    first_turns = np.concatenate(([0], ends[:-1]))
    arrivals_s = sessions.think_time.draw(generator(seed, Stream.THINK_TIME), num_turns)
    arrivals_s[first_turns] = starts.draw(generator(seed, Stream.ARRIVAL), len(ends))
    for first, end in zip(first_turns.tolist(), ends.tolist(), strict=True):
        arrivals_s[first:end] = np.cumsum(arrivals_s[first:end])
    return np.repeat(np.arange(len(ends)), ends - first_turns), arrivals_s


def _conversations_so_far(
    session_of: NDArray[np.int64], inputs: Lengths, outputs: NDArray[np.int32], drawn_outputs: Lengths
) -> tuple[Lengths, NDArray[np.int64]]:
    """The tokens of each turn's conversation up to and with the turn's message, without a shared prefix, and the
    first of the prefix ids, from 0, of that conversation; each of shape [turns]."""
    first_turns = np.flatnonzero(np.diff(session_of, prepend=-1))
    ends = np.cumsum(inputs + outputs)
    tokens = ends - outputs - (ends - outputs - inputs)[first_turns][session_of]
    # The ids do not depend on the reserved tokens, which may cut outputs off.
    blocks = -(-np.add.reduceat(inputs + drawn_outputs, first_turns) // PREFIX_BLOCK)
    return tokens, (np.cumsum(blocks) - blocks)[session_of]
