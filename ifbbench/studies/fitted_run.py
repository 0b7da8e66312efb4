"""A simulated device in place of the real one of a recorded run: the cost model is fitted to the run's iterations, or
to the latencies that clients of an endpoint saw."""

import re
from collections.abc import Callable
from math import exp, log
from pathlib import Path
from typing import Any

from ifbbench.analysis.recorded import RecordedRun
from ifbbench.errors import InputError
from ifbbench.files import check_new_file
from ifbbench.models.named_models import load_model_config
from ifbbench.replay.run import run_trace, summarise_run
from ifbbench.settings.config import RunConfig
from ifbbench.settings.devices import HARDWARE_PROFILES, SIMULATED
from ifbbench.simulated.hardware import SUFFIX, HardwareProfile, load_hardware, write_profile
from ifbbench.studies.fit import slowed
from ifbbench.workload.trace import Trace

# The file of the fitted profile, in the run directory.
FITTED = f"fitted{SUFFIX}"
# The directory of the replay of a run against an endpoint, in its run directory.
REPLAY = "replay"
# A device is made at most so many times slower or faster, until the mean latency is near enough, in so many replays.
MAX_SLOWER, NEAR_ENOUGH, MAX_REPLAYS = 4.0, 0.005, 8
# The mean latency may be that of the run but for this share.
MAX_MISS = 0.25
# Settings of a real device that a simulated one does not have.
REAL_ONLY = ("cpu_threads", "warm_up", "wait_sleep", "check_ranks")
# Settings whose effect does not follow from the iterations of a run with another value.
NOT_FITTED = ("tp_size", "kv_cache_dtype", "overlap", "async_scheduling")


def fit_device(run: RecordedRun) -> str:
    """Fit the cost model to the iterations of `run`, as `ifbbench calibrate --from` does; then make all of it slower or
    faster, so that all iterations together take as long as they did. The profile is written into the run directory.
    Returns the simulated device. InputError for a run that it cannot be fitted to."""
    from ifbbench.studies.calibrate_from_logs import fit_logs  # takes a moment

    given = {"device": SIMULATED + _base_profile(run)}
    if run.of_other_engine:
        given["model"] = run.config["model"]
    fit = fit_logs([run.path], given)
    path = run.path / FITTED
    check_new_file(path, "the fitted profile", overwrite=True)
    write_profile(slowed(fit.profile, fit.time_ratio), path, "Fitted by `ifbbench why` to the run in this directory.")
    return f"{SIMULATED}{path}"


def name_server(run: RecordedRun, model: str | None, device: str | None) -> None:
    """Say which model and GPU the server had whose recording or imported log `run` is; None as the run says. InputError
    for a run of ifbbench, and for a model or a GPU that is not known."""
    if not run.of_other_engine:
        raise InputError(f"--device, --model: {run.path} is a run of ifbbench, which names its own; leave them out.")
    settings = run.data.run["config"]
    if model is not None:
        load_model_config(model)
        settings["model"] = model
    if device is not None:
        name = device.removeprefix(SIMULATED)
        hardware = load_hardware(name)
        settings["device"] = "cpu" if name == "cpu" else "cuda"
        run.data.run["hardware"] = {"gpu": {"name": hardware.title, "memory_bytes": hardware.memory_bytes}}


def replayed_config(run: RecordedRun, device: str) -> dict[str, Any]:
    """The settings of a run on a real device for its replay on `device`: each as the run had it, also those that it
    derived from the real device."""
    return {name: value for name, value in run.config.items() if name not in REAL_ONLY} | {"device": device}


def replay_endpoint(run: RecordedRun, trace: Trace, config: RunConfig) -> float:
    """Replay a run against an endpoint on a simulated device that is so much slower or faster than that of `config`
    that the mean end-to-end latency is that of the run. The replay and the profile are recorded in the run directory.
    Returns how much slower.

    config: the settings of the server. InputError if no request was completed, or if no device that is MAX_SLOWER times
    as slow or as fast has this latency."""
    measured_s = ((run.data.summary or {}).get("e2e_s") or {}).get("mean")
    if not measured_s:
        raise InputError(f"{run.path}: no request was completed, so that there is nothing to fit to")
    path, hardware = run.path / FITTED, load_hardware(config.hardware or "")
    check_new_file(path, "the fitted profile", overwrite=True)
    fitted = config.with_values(device=f"{SIMULATED}{path}")

    def error(slower: float) -> float:
        """The logarithm of the mean latency over that of the run."""
        _write_slowed(hardware, slower, path)
        mean_s = summarise_run(trace, fitted)["e2e_s"]["mean"]
        if not mean_s:
            raise InputError(f"{run.path}: with these settings no request is completed")
        return log(mean_s / measured_s)

    slower = _zero_of(error)
    if slower is None:
        raise InputError(
            f"{run.path}: no {hardware.name} that is up to {MAX_SLOWER:g} times slower or faster has the mean latency "
            "of the run; is this the GPU, and are these the settings of the server?"
        )
    _write_slowed(hardware, slower, path)
    directory = run.path / REPLAY
    run_trace(trace, fitted.with_values(output=str(directory), overwrite=True))
    return slower


def _write_slowed(hardware: HardwareProfile, slower: float, path: Path) -> None:
    write_profile(slowed(hardware, slower), path, "Fitted by `ifbbench why` to the run in this directory.")


def _zero_of(error: Callable[[float], float]) -> float | None:
    """The factor at which `error`, which rises with it, is nearest to 0; None if it is not near anywhere."""
    low, high = -log(MAX_SLOWER), log(MAX_SLOWER)
    at, found = 0.0, dict[float, float]()
    for _ in range(MAX_REPLAYS):
        found[at] = error(exp(at))
        if abs(found[at]) <= NEAR_ENOUGH:
            break
        if found[at] < 0:
            low = at
        else:
            high = at
        if low >= high:
            break
        below, above = found.get(low), found.get(high)
        if below is not None and above is not None:
            # Between the two, by the false position, but not so near to one of them that the other stays.
            share = min(max(-below / (above - below), 0.1), 0.9)
            at = low + share * (high - low)
        else:  # latencies rise at least as much as the times of the device
            at = min(max(at - found[at], low), high)
    best = min(found, key=lambda one: abs(found[one]))
    return exp(best) if abs(found[best]) <= MAX_MISS else None


def _base_profile(run: RecordedRun) -> str:
    """The profile of the device of a run, or of the GPU whose name has most words in common; of these, the one whose
    memory is nearest."""
    if run.config["device"] == "cpu":
        return "cpu"
    gpu = (run.data.run.get("hardware") or {}).get("gpu") or {}
    words = _words(gpu.get("name", ""))
    profiles = {path.stem: load_hardware(path.stem) for path in sorted(HARDWARE_PROFILES.glob("*.toml"))}
    common = {name: len(words & _words(profile.title)) for name, profile in profiles.items()}
    most = max(common.values())
    if not most:
        raise InputError(f"no hardware profile is like {gpu.get('name') or 'its GPU, which the run does not name'}")
    memory_bytes = gpu.get("memory_bytes") or 0
    alike = [name for name, number in common.items() if number == most]
    return min(alike, key=lambda name: abs(profiles[name].memory_bytes - memory_bytes))


def _words(name: str) -> set[str]:
    """The words of a GPU's name that tell it from others."""
    return set(re.findall(r"[a-z]+\d+[a-z]*|\d{4}|rtx|pro", name.lower()))
