"""Every setting, once: default, unit, range, help text and its names on each surface.

The command line, config files, `run.json`, sweeps and error messages are made from these fields. `RunConfig` is what
the user asked for, with None where the answer depends on the model or the device; `ifbbench.build.resolve` fills these
in, and `run.json` holds every resolved value.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from ifbbench.errors import InputError
from ifbbench.settings.devices import SIMULATED
from ifbbench.settings.dtypes import DTYPES
from ifbbench.settings.engines import ENGINE_NAMES, ENGINES, SGLANG
from ifbbench.settings.fields import Setting, settings_of
from ifbbench.settings.groups.endpoint import EndpointSettings
from ifbbench.settings.groups.execution import ExecutionSettings
from ifbbench.settings.groups.fleet import APART, FleetSettings
from ifbbench.settings.groups.kv_cache import TIERS, CacheSettings
from ifbbench.settings.groups.lora import LoraSettings
from ifbbench.settings.groups.recording import RecordingSettings
from ifbbench.settings.groups.replay import ARRIVALS, READING, ReplaySettings
from ifbbench.settings.groups.scheduling import LIMITS, SchedulingSettings
from ifbbench.settings.groups.sglang import HOST, SglangSettings
from ifbbench.settings.groups.vllm import VllmSettings


@dataclass(frozen=True)
class RunConfig(
    # Fields are in the order of the last base first.
    RecordingSettings,
    ExecutionSettings,
    LoraSettings,
    CacheSettings,
    SglangSettings,
    VllmSettings,
    SchedulingSettings,
    EndpointSettings,
    FleetSettings,
    ReplaySettings,
):
    """All settings of one run. Values are checked on construction; see `settings()` for names, ranges and help."""

    def __post_init__(self) -> None:
        values = vars(self)
        given = [setting for setting in settings() if values[setting.name] is not setting.default]
        for setting in given:
            object.__setattr__(self, setting.name, setting.check(getattr(self, setting.name)))
        for setting in given:
            if getattr(self, setting.name) in (setting.default, setting.command_line_default):
                continue
            if setting.group in ENGINES and self.engine != setting.group:
                raise InputError(
                    f"--{setting.name}: is a setting of {ENGINE_NAMES[setting.group]}'s scheduler; add --engine "
                    f"{setting.group}, or leave it out."
                )
            is_for_server = setting.group == "endpoint" and (setting.name, self.engine) != ("ignore_eos", SGLANG)
            if not setting.is_of_client if self.endpoint else is_for_server:
                why = (
                    "the server at --endpoint has settings of its own; leave it out"
                    if self.endpoint
                    else "is for a server; add --endpoint URL, or leave it out"
                )
                raise InputError(f"--{setting.name}: {why}.")

    def with_values(self, **values: Any) -> "RunConfig":
        """A copy with some settings changed; every name must be a setting's own name."""
        own = vars(self)
        if unknown := values.keys() - own.keys():
            raise TypeError(f"no settings of a run: {', '.join(sorted(unknown))}")
        # As `dataclasses.replace`, in a sixth of the time: searches make thousands of configurations, most of whose
        # settings are those of another one.
        copy = object.__new__(type(self))
        vars(copy).update(own | values)
        copy.__post_init__()
        return copy

    def without(self, *names: str) -> "RunConfig":
        """A copy in which these settings have their defaults."""
        return self.with_values(**{name: getattr(RunConfig, name) for name in names})

    @property
    def is_fleet(self) -> bool:
        """Whether a router distributes the requests to replicas, of which there may be only one."""
        others = (self.router, self.replica_config, self.replica_events, self.autoscale)
        is_other = self.is_disaggregated or any(given is not None for given in others)
        return self.replicas > 1 or is_other

    @property
    def tier_settings(self) -> list[str]:
        """The settings of stores beneath the KV cache that are given."""
        return [name for name in TIER_SETTINGS if getattr(self, name) != getattr(RunConfig, name)]

    @property
    def is_disaggregated(self) -> bool:
        """Whether some replicas compute prompts, and others generate."""
        return self.prefill_replicas > 0 or self.decode_replicas > 0

    def of_one_replica(self, **values: Any) -> "RunConfig":
        """The settings of a replica on its own, with some of them changed."""
        return self.without(*FLEET_SETTINGS).with_values(**values)

    @property
    def weight_dtype(self) -> str:
        """`dtype`, or the default of devices that are not simulated."""
        return self.dtype or DTYPES[0]

    @property
    def hardware(self) -> str | None:
        """The hardware profile of a simulated device, None for others."""
        return self.device.removeprefix(SIMULATED) if self.device.startswith(SIMULATED) else None

    @property
    def has_drafts(self) -> bool:
        """Whether any setting asks for draft tokens."""
        return any((self.draft_model, self.draft_ngram, self.draft_mtp, self.draft_len, self.acceptance_rate))

    @property
    def keeps_arrivals(self) -> bool:
        """Whether requests arrive at times of their own, with --concurrency too, and not when a response makes room."""
        rates = (self.request_rate, self.rate_schedule, self.arrival)
        return self.concurrency is None or any(given is not None for given in rates)

    @property
    def samples_read(self) -> int | None:
        """How many requests of a trace are read, those that are left out included; None for all."""
        return None if self.max_num_samples is None else self.skip_samples + self.max_num_samples

    @property
    def uses_lora(self) -> bool:
        """Whether requests may have LoRA adapters. Others run the base model, whatever their LoRA task."""
        given = (self.lora_dir, self.num_loras, self.lora_device_mem_fraction, self.lora_num_device_mod_layers)
        return any(one is not None for one in given)

    @property
    def makes_no_tokens(self) -> bool:
        """Whether nothing is computed, so that output tokens have no ids."""
        return self.device == "null" or self.hardware is not None

    @property
    def num_ranks(self) -> int:
        """Processes of a run: one on devices without a model."""
        return 1 if self.makes_no_tokens else self.tp_size * self.pp_size

    def as_dict(self) -> dict[str, Any]:
        """Setting name to value, in the order of definition."""
        return {setting.name: getattr(self, setting.name) for setting in settings()}


@cache
def settings() -> tuple[Setting, ...]:
    """All settings in the order of `RunConfig`."""
    return settings_of(RunConfig)


def _family(name: str) -> tuple[str, ...]:
    return tuple(setting.name for setting in settings() if setting.family == name)


# Settings that choose what is read of a trace, and those that replace its arrivals.
READ_SETTINGS, ARRIVAL_SETTINGS = _family(READING), _family(ARRIVALS)
# Settings that only a fleet with prefill and decode apart has, and those that only a fleet has.
SIDE_SETTINGS = _family(APART)
FLEET_SETTINGS = tuple(setting.name for setting in settings() if setting.group == "fleet")
# Settings of SGLang's host memory, which its storage is behind, and those of the stores beneath the device memory.
HOST_SETTINGS, TIER_SETTINGS = _family(HOST), _family(TIERS)
# Settings that limit requests and batches.
LIMIT_SETTINGS = _family(LIMITS)
