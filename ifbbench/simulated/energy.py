"""The energy of GPUs in a simulated run: of the work that they did, and of the time that they were there for."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ifbbench.simulated.cost_model import CostModel
from ifbbench.simulated.executor import SimulatedExecutor
from ifbbench.simulated.hardware import Watts, load_hardware
from ifbbench.simulated.step_work import OperationCost, StepWork, WorkDone

OUTPUT_LAYER, ATTENTION = "output layer", ("context attention", "generation attention")
MOVES_OVER_NETWORK = ("all-reduces", "pipeline transfer", "expert dispatch", "expert combine")


def energy_figures(executor: SimulatedExecutor, summary: Mapping[str, Any]) -> dict[str, Any]:
    """The `energy` of summary.json, of a run that has ended with `summary`; nothing if the profile has no watts."""
    model, draft_model = executor.cost_model, executor.draft_model
    watts = model.hardware.watts
    if watts is None or not summary["duration_s"]:
        return {}
    gpus = model.shard.tp_size * model.shard.pp_size
    joules = watts.idle * gpus * summary["duration_s"] + joules_of_work(model, executor.done, watts)
    if draft_model is not None:
        joules += joules_of_work(draft_model, executor.draft_done, watts)
    return {"energy": figures_of(joules, gpus, summary)}


def energy_of_replicas(
    parts: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    hardware: Sequence[str | None],
    up_s: Sequence[float],
) -> dict[str, Any]:
    """The `energy` of several servers with the summaries `parts`, which are idle while none of their requests is there.

    hardware: profile of each replica.
    up_s: how long each is there.

    Nothing is returned if the energy of one is not known.
    """
    if not all("energy" in part for part in parts):
        return {}
    joules, gpus, gpu_s = 0.0, 0, 0.0
    for part, profile, there_s in zip(parts, hardware, up_s, strict=True):
        assert profile is not None
        watts = load_hardware(profile).watts
        assert watts is not None
        idle_s = max(0.0, there_s - part["duration_s"])
        joules += part["energy"]["joules"] + watts.idle * part["energy"]["gpus"] * idle_s
        gpus += part["energy"]["gpus"]
        gpu_s += part["energy"]["gpus"] * there_s
    return {"energy": figures_of(joules, gpus, summary) | {"power_w_per_gpu": joules / gpu_s}}


def figures_of(joules: float, gpus: int, summary: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of `joules` that `gpus` took in a run with `summary`: by output token, by token, by request."""
    tokens, requests = summary["output_tokens"], summary["requests"]["completed"]
    all_tokens = tokens + summary["prompt_tokens"]
    return {
        "joules": joules,
        "gpus": gpus,
        "power_w_per_gpu": joules / gpus / summary["duration_s"],
        "joules_per_output_token": joules / tokens if tokens else None,
        "joules_per_token": joules / all_tokens if all_tokens else None,
        "joules_per_request": joules / requests if requests else None,
    }


def joules_of_work(cost_model: CostModel, done: WorkDone, watts: Watts) -> float:
    """Joules of all devices for the work in `done`, above those of idle devices.

    An operation adds to the power of a device in proportion to the share of memory bandwidth and of peak FLOP/s that it
    reaches (see `Watts`), up to the limit. Transfers between devices and the time between kernels add nothing."""
    attention = StepWork(
        attention_pairs=round(done.attention_pairs),
        context_kv_tokens=round(done.context_kv_tokens),
        generation_kv_tokens=round(done.generation_kv_tokens),
    )
    total = _joules(cost_model, cost_model.of_attention(attention), watts)
    for tokens, count in done.iterations_by_tokens.items():
        total += count * _joules(cost_model, cost_model.of_tokens(tokens), watts)
    for outputs, count in done.iterations_by_outputs.items():
        total += count * _joules(cost_model, cost_model.of_outputs(outputs), watts)
    return total * cost_model.shard.tp_size


def _joules(cost_model: CostModel, operations: Iterable[OperationCost], watts: Watts) -> float:
    """Joules of one device for operations, each in the data type that it multiplies in."""
    shard, hardware, total = cost_model.shard, cost_model.hardware, 0.0
    in_layers = hardware.product_dtype(shard.dtype)
    for one in operations:
        if one.name in MOVES_OVER_NETWORK:
            continue
        dtype = shard.compute_dtype if one.name == OUTPUT_LAYER else in_layers
        if one.name in ATTENTION:
            dtype = shard.attention_dtype
        dynamic = watts.memory * one.bytes / hardware.memory_bandwidth
        dynamic += watts.compute * one.flops / hardware.peak_flops[dtype]
        total += min(dynamic, (watts.limit - watts.idle) * one.seconds)
    return total
