"""The settings of the replicas of a fleet, where `--replica_config` gives some of them others than the fleet has."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ifbbench.build.engines import engine_defaults
from ifbbench.errors import InputError
from ifbbench.settings.bounds import MAX_REPLICAS
from ifbbench.settings.config import FLEET_SETTINGS, RunConfig
from ifbbench.settings.engines import ENGINES
from ifbbench.settings.fields import integer, located
from ifbbench.settings.names import from_mapping, own_names, setting
from ifbbench.settings.table_files import read_tables

# The settings of an engine. All others are of the fleet: which requests arrive, and what is recorded.
OWN_GROUPS = ("scheduling", *ENGINES, "kv cache", "lora", "execution")
COUNT = "count"


def replica_configs(config: RunConfig) -> list[RunConfig]:
    """The settings of a run of each replica that the fleet begins with. InputError for a file that does not fit."""
    if config.replica_config is None:
        return [config.of_one_replica()] * config.replicas
    path, found = Path(config.replica_config), list[RunConfig]()
    for number, entry in enumerate(read_tables(path, "--replica_config"), start=1):
        with located(f"--replica_config {path}: entry {number}"):
            count = integer(entry.pop(COUNT, 1), COUNT, 1, MAX_REPLICAS, from_text=True)
            found += [_with_own(config.of_one_replica(), entry)] * count
    if len(found) > MAX_REPLICAS:
        raise InputError(f"--replica_config {path}: {len(found)} replicas; expected at most {MAX_REPLICAS}.")
    if config.replicas not in (1, len(found)):
        raise InputError(
            f"--replicas: {config.replicas}, and --replica_config {path} has {len(found)}; leave --replicas out."
        )
    return found


def own_settings(configs: Sequence[RunConfig]) -> list[dict[str, Any]]:
    """The settings of each replica that not all of them have in common."""
    known = [one.as_dict() for one in configs]
    names = [name for name in known[0] if any(one[name] != known[0][name] for one in known)] if known else []
    return [{name: one[name] for name in names} for one in known]


def _with_own(fleet: RunConfig, given: Mapping[str, Any]) -> RunConfig:
    """The settings of a replica that differ from those of the fleet by `given`.

    What is the default of the fleet's engine and device becomes that of the replica's."""
    own = {name: setting(name).check(value) for name, value in own_names(given).items()}
    for name in own:
        if name in FLEET_SETTINGS or setting(name).group not in OWN_GROUPS:
            raise InputError(
                f"{name} is a setting of the whole fleet; expected {COUNT}, and settings of an engine such as device, "
                "tp_size or max_batch_size."
            )
    known = fleet.as_dict()
    usual = {name: setting(name).check(value) for name, value in engine_defaults(known).items()}
    kept = {name: value for name, value in known.items() if name not in usual or usual[name] != value} | own
    others = {name: value for name, value in engine_defaults(kept).items() if name not in kept}
    return from_mapping(others | kept, command_line=True)
