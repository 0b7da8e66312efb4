"""Settings of a fleet: several replicas of the engine behind a router."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from ifbbench.errors import InputError
from ifbbench.settings.autoscale import parse_autoscale
from ifbbench.settings.bounds import MAX_REPLICAS, MAX_SPAN_S
from ifbbench.settings.fields import declare, number

# The family of settings that a fleet with prefill and decode apart has.
APART = "prefill and decode apart"
# When keys and values of a prompt are sent.
TRANSFERS = BY_WHOLE, BY_LAYER = "whole", "layer"
# Routers of a fleet; the last ones may have a weight.
PREFIX_AFFINITY = "prefix_affinity"
WEIGHTED_ROUTERS = (PREFIX_AFFINITY, "dynamo")
ROUTERS = ("round_robin", "random", "least_requests", "least_tokens", "least_kv", "session", *WEIGHTED_ROUTERS)

_fleet = partial(declare, "fleet")
_apart = partial(_fleet, family=APART)


def _router(value: Any) -> Any:
    """The name of a router; its weight checked."""
    name, colon, weight = value.partition(":") if isinstance(value, str) else (value, "", "")
    if colon and (router := name.lower().replace("-", "_")) in WEIGHTED_ROUTERS:
        return f"{router}:{number(weight, f'--router {router}: the weight', 0.0, from_text=True):g}"
    return value


def _autoscale(value: Any) -> Any:
    """The rule of an autoscaler, checked."""
    if isinstance(value, str):
        parse_autoscale(value)
    return value


def _side(value: Any) -> Any:
    """Settings of one side of a fleet, NAME=VALUE,…, as one text; also given as a list of such texts."""
    if isinstance(value, list | tuple) and value and all(isinstance(one, str) for one in value):
        value = ",".join(value)
    if isinstance(value, str) and not value.partition("=")[1]:
        raise InputError(f"--prefill, --decode: {value!r} is no setting; expected NAME=VALUE, such as tp_size=2.")
    return value


@dataclass(frozen=True)
class FleetSettings:
    """Settings of a fleet: several replicas of the engine behind a router."""

    replicas: int = _fleet(
        1,
        "Engines with these settings behind a router, each a run of its own in the run directory. Simulated and null "
        "devices only.",
        minimum=1,
        maximum=MAX_REPLICAS,
        elsewhere="num_replicas data_parallel_size dp_size",
    )
    replica_config: str | None = _fleet(
        None,
        "Replicas that differ: a YAML or JSON file with a list of them, each with the settings in which it differs, "
        "and `count` for several alike.",
        elsewhere="worker_config",
    )
    router: str | None = _fleet(
        None,
        "Which replica gets a request: each in turn; a random one; the one with the fewest requests, or tokens of "
        "prompts, that are not answered; the one that uses the smallest share of its KV cache; that of its session; or "
        "the one with the least work for it, prefix_affinity:WEIGHT, where each prompt token that it does not hold "
        "counts as WEIGHT tokens of other requests; dynamo:WEIGHT, where those of others without a first token do, "
        "too. Default with several replicas: round_robin.",
        choices=ROUTERS,
        other_texts=".+:.+",
        others="prefix_affinity:WEIGHT, dynamo:WEIGHT, or package.module:ClassName",
        convert=_router,
        elsewhere="routing_logic load_balancing_method routing_policy",
    )
    router_state_age: float = _fleet(
        0.0,
        "The router reads the queues and KV caches of replicas in such intervals; 0 is before each request.",
        minimum=0.0,
        unit="s",
    )
    replica_events: str | None = _fleet(
        None,
        "Replicas that fail, drain or start: a YAML or JSON file with a list of events, each with the time `at` in "
        "seconds, and one of `fail: K`, `drain: K`, `start: COUNT` and `replicas: N`.",
    )
    request_retries: int = _fleet(
        5,
        "How often a request is sent to another replica when its own has failed; 0: it is lost with its replica.",
        minimum=0,
        maximum=MAX_REPLICAS,
        elsewhere="retry_max_retries",
    )
    autoscale: str | None = _fleet(
        None,
        "Start and drain replicas by a rule, MEASURE=TARGET,max=N, with min=1, every=15s, cool_down=300s and "
        "tolerance=0.1 unless given: queue (waiting requests), requests (not answered) or kv_use (share of the KV "
        "cache) of a replica, or the mean ttft.",
        convert=_autoscale,
        elsewhere="autoscaling_config",
    )
    replica_start_up: float = _fleet(
        0.0,
        "From the start of a replica by --replica_events or --autoscale until it takes requests; its GPUs are taken.",
        minimum=0.0,
        maximum=MAX_SPAN_S,
        unit="s",
    )
    prefill_replicas: int = _apart(
        0,
        "Engines that compute prompts only, and send their keys and values to those of --decode_replicas.",
        minimum=0,
        maximum=MAX_REPLICAS,
    )
    decode_replicas: int = _apart(
        0,
        "Engines that generate from the keys and values that those of --prefill_replicas send.",
        minimum=0,
        maximum=MAX_REPLICAS,
    )
    prefill: str | None = _apart(
        None,
        "Settings of the prefill replicas that differ, NAME=VALUE,… such as max_batch_size=64,tp_size=2. May be "
        "given several times.",
        convert=_side,
        is_list=True,
    )
    decode: str | None = _apart(
        None,
        "Settings of the decode replicas that differ, in the form of --prefill.",
        convert=_side,
        is_list=True,
    )
    decode_router: str | None = _apart(
        None,
        "The router of the decode replicas. Default: that of the prefill replicas (--router).",
        choices=ROUTERS,
        other_texts=".+:.+",
        others="prefix_affinity:WEIGHT, or package.module:ClassName",
        convert=_router,
        elsewhere="decode_policy",
    )
    disaggregate_from: int = _apart(
        0,
        "Prompts with fewer tokens that the decode replica is not expected to hold are computed there.",
        minimum=0,
        unit="tokens",
        elsewhere="max_local_prefill_length",
    )
    transfer_bandwidth: float | None = _apart(
        None,
        "What each GPU sends, or receives, of keys and values. Default: the network of the hardware profile; no limit "
        "on the null device.",
        above=0.0,
        maximum=1e18,
        unit="bytes/s",
    )
    transfer_latency: float | None = _apart(
        None,
        "Time from the last byte of a transfer to its arrival. Default: that of the network of the hardware profile.",
        minimum=0.0,
        maximum=MAX_SPAN_S,
        unit="s",
    )
    transfer_by: str = _apart(
        TRANSFERS[0],
        "When keys and values are sent: whole, once the prompt is complete, or layer by layer during the prefill, to "
        "blocks that the decode replica reserves before it.",
        choices=TRANSFERS,
    )
