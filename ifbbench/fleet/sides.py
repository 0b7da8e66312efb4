"""The settings of the two sides of a fleet with prefill and decode apart."""

from typing import Any

from ifbbench.errors import InputError
from ifbbench.settings.config import SIDE_SETTINGS, RunConfig
from ifbbench.settings.fields import located
from ifbbench.settings.names import setting

# Groups of settings that the replicas of a fleet have in common, and settings: what both sides must agree on.
COMMON_GROUPS = frozenset(("replay", "fleet", "endpoint", "recording"))
COMMON = frozenset(("engine", "model", "kv_cache_dtype"))


def side_values(config: RunConfig, side: str) -> dict[str, Any]:
    """The settings of `--prefill` or `--decode`, by name. InputError for one that is not a replica's own.

    A part without = goes on with the value before it: max_attention_window=64,128."""
    text: str | None = getattr(config, side)
    values: dict[str, Any] = {}
    parts = [] if text is None else text.split(",")
    for number in range(len(parts) - 1, 0, -1):
        if "=" not in parts[number]:
            parts[number - 1 : number + 1] = [f"{parts[number - 1]},{parts[number]}"]
    for part in parts:
        name, _, value = part.partition("=")
        with located(f"--{side}"):
            found = setting(name.strip())
        if found.group in COMMON_GROUPS or found.name in COMMON:
            raise InputError(f"--{side} {found.name}: both sides have it in common; give it as --{found.name}.")
        if found.name in values:
            raise InputError(f"--{side} gives {found.name} twice; expected each setting once.")
        with located(f"--{side}"):
            values[found.name] = found.check(value.strip())
    return values


def gpus_of_side(config: RunConfig, side: str) -> int:
    """GPUs of each replica of `prefill` or `decode`."""
    own = config.with_values(**side_values(config, side))
    return own.tp_size * own.pp_size


def check_sides(config: RunConfig) -> None:
    """InputError for settings of a fleet that do not fit together."""
    if not (config.prefill_replicas and config.decode_replicas):
        one, other = ("prefill", "decode") if config.prefill_replicas else ("decode", "prefill")
        raise InputError(
            f"--{one}_replicas {getattr(config, f'{one}_replicas')}: needs --{other}_replicas, at least 1."
        )
    usual = RunConfig()
    for name in ("replica_config", "autoscale", "replica_start_up"):
        if getattr(config, name) != getattr(usual, name):
            raise InputError(f"--{name}: is not built with --prefill_replicas and --decode_replicas; leave it out.")
    if config.replicas > 1:
        raise InputError(
            "--replicas: is a fleet of replicas that do both; leave out that, or --prefill_replicas and "
            "--decode_replicas."
        )


def check_no_sides(config: RunConfig) -> None:
    """InputError for settings that only a fleet with prefill and decode apart has."""
    usual = RunConfig()
    for name in SIDE_SETTINGS:
        if getattr(config, name) != getattr(usual, name):
            raise InputError(f"--{name}: is for a fleet with --prefill_replicas and --decode_replicas; add them.")
