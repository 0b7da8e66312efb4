"""Random settings of `run` with random traces: every run ends, answers each request once and leaves no block in use;
every command reads it, and what a kill would have left of it, and its directory is the config file of the same run."""

import json
import random
import re
import shlex
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.build.engines import NOT_IN_VLLM
from ifbbench.build.sglang import NOT_IN_SGLANG
from ifbbench.cli.given_settings import PLACES
from ifbbench.cli.main import main
from ifbbench.compressed import read_pieces
from ifbbench.engine.loop import TokenGenerationLoop
from ifbbench.engine.request import Request
from ifbbench.errors import InputError
from ifbbench.replay import single
from ifbbench.replay.run import run_trace
from ifbbench.report.outputs import write_outputs
from ifbbench.rundir.figures import figures
from ifbbench.rundir.line_types import documented_fields
from ifbbench.rundir.metrics import distribution
from ifbbench.rundir.reader import load_run, micro_batches_of
from ifbbench.rundir.recorder import Recorder
from ifbbench.schedulers.tensorrt_llm.scheduler import TensorRtLlmScheduler
from ifbbench.settings.config import FLEET_SETTINGS, TIER_SETTINGS, RunConfig, settings
from ifbbench.settings.groups.execution import EARLY_STOPPING
from ifbbench.settings.groups.recording import RECORDING_FORMATS, RESULT_FORMATS, SIDE_OUTPUTS
from ifbbench.settings.groups.scheduling import CHUNKING_POLICIES, OVERLAPS, POLICIES
from ifbbench.settings.groups.sglang import (
    EVICTION_POLICIES,
    HOST_WRITE_POLICIES,
    RETRACTION_POLICIES,
    SCHEDULE_POLICIES,
)
from ifbbench.studies.repeat import run_repeats
from tests.attack.readers import copied, cut_off, read_by_every_command

LIMIT_S = 300  # a busy machine is slow
SEEDS, SLOW_SEEDS = range(100), range(100, 5_200)
# Of so many seeds, one has its run read by every command; in the slow tests with so many charts.
READ_EACH, SLOW_READ_EACH, SLOW_CHARTS = 5, 4, 2
REPEATED_SHARE = 0.2
# Figures of a killed run that are unknown: those of iterations with `--recording summary`, and those of them that
# thinned statistics leave out or interpolate; and the tokens of a contiguous cache. As the beginnings of dotted names.
UNKNOWN_OF_SUMMARY = (
    "iterations",
    "pauses",
    "recomputed",
    "empty_gen",
    "padding",
    "kv_",
    "peak_",
    "bound_by",
    "speculative",
    ".*itl",
)
UNKNOWN_WHERE_THINNED = ("recomputed", "empty_gen", "padding", "kv_", "bound_by_time", "speculative", ".*itl")
DEVICES = ["null"] * 9 + ["sim:h100-sxm"] * 5 + ["sim:a100-40gb"] * 2 + ["sim:cpu"] * 2 + ["cpu"] * 2
Draw = Callable[[random.Random], Any]


def sometimes(share: float, *values: Any) -> Draw:
    """One of `values` with probability `share`, else the default (None)."""
    return lambda draw: draw.choice(values) if draw.random() < share else None


def on_or_off(share: float, usual: bool = False) -> Draw:
    return sometimes(share, not usual)


# How each setting of `run` is drawn; None leaves it at its default. Traces take milliseconds, on the wall clock too.
DRAWS: dict[str, Draw] = {
    "max_num_samples": sometimes(0.1, 1, 3, 100),
    "skip_samples": sometimes(0.1, 1, 3),
    "time_scale": sometimes(0.3, 0.0, 0.0, 0.5, 2.0),
    "request_rate": sometimes(0.15, 1e3, 2e4),
    "enable_exp_delays": on_or_off(0.05),
    "burstiness": sometimes(0.04, 0.3, 4.0),
    "arrival": sometimes(
        0.15, "recorded", "all_at_once", "ramp:0:5e3:0.01", "ramp:1e3:9e3:0.01:exponential", "on_off:5e3:0.002:0.003"
    ),
    "rate_schedule": sometimes(0.04, "rates.csv"),
    "duration": sometimes(0.1, 0.001, 0.004, 1.0),
    "replica": sometimes(0.1, "1/2", "2/3"),
    "reserve": sometimes(0.3, "actual", "factor:1.5", "factor:0.5", "fixed:7"),
    "max_prompt_len": sometimes(0.15, 1, 8, 40),
    "skip_bad_rows": on_or_off(0.1),
    "trace_format": sometimes(0.05, "ifbbench"),
    "columns": sometimes(0.0),
    "tokenizer": sometimes(0.0),
    "characters_per_token": sometimes(0.05, 3.5),
    "default_output_len": sometimes(0.05, 3),
    "concurrency": sometimes(0.25, 1, 2, 5),
    "wait_sleep": sometimes(0.15, 1, 3),
    "beam_width": sometimes(0.15, 1, 2, 3),
    "streaming": on_or_off(0.2),
    "return_log_probs": on_or_off(0.04),
    "return_context_logits": on_or_off(0.04),
    "return_generation_logits": on_or_off(0.04),
    "normalize_log_probs": on_or_off(0.04),
    "exclude_input_in_output_seq": on_or_off(0.1),
    "eos_id": sometimes(0.15, -1, 0, 7, 99),
    "pad_id": sometimes(0.1, 0, 5),
    "warm_up": sometimes(0.1, 0, 1, 3),
    "seed": lambda draw: draw.randrange(5),
    "slo": sometimes(0.2, "ttft=2ms", "tpot=50us,e2e=1s", "ttft=1ms,ttft.p99=10ms,itl.max=1s"),
    # Several engines: see tests/fleet.
    **dict.fromkeys(FLEET_SETTINGS, sometimes(0.0)),
    # A server that is not ours: see test_endpoint.py.
    **dict.fromkeys([one.name for one in settings() if one.group == "endpoint"], sometimes(0.0)),
    "ignore_eos": on_or_off(0.4, usual=True),  # of SGLang here
    "engine": sometimes(0.4, "vllm", "sglang"),
    "type": sometimes(0.35, "v1", "inflight_unfused"),
    "policy": sometimes(0.6, *POLICIES),
    "max_batch_size": sometimes(0.8, 1, 2, 3, 4, 8),
    "max_queue_size": sometimes(0.12, 0, 1, 3, 100),
    "max_num_tokens": sometimes(0.5, 4, 9, 16, 33, 64, 100, "none"),
    "enable_batch_size_tuning": on_or_off(0.1),
    "enable_max_num_tokens_tuning": on_or_off(0.1),
    "dynamic_batch_moving_average_window": sometimes(0.1, 1, 3),
    "enable_chunked_context": lambda draw: draw.choice([None, True, True, False]),
    "context_chunking_policy": sometimes(0.4, *CHUNKING_POLICIES),
    "context_chunk_unit": sometimes(0.25, 4, 8, 16),
    "max_seq_len": sometimes(0.9, 32, 64, 100, 256),
    "max_input_len": sometimes(0.15, 8, 31, 64),
    "max_beam_width": sometimes(0.12, 1, 2, 4),
    "enable_trt_overlap": on_or_off(0.15),
    "overlap": sometimes(0.2, *OVERLAPS),
    "static_emulated_batch_size": sometimes(0.15, 1, 2, 5),
    "static_emulated_timeout": lambda draw: draw.choice([0, 1, 2]),
    "vllm_version": sometimes(0.3, "0.22", "0.30"),
    "scheduling_policy": sometimes(0.4, "priority"),
    "async_scheduling": sometimes(0.4, True, False),
    "max_num_scheduled_tokens": sometimes(0.2, 3, 9, 20),
    "max_num_active_seqs": sometimes(0.2, 1, 3),
    "long_prefill_token_threshold": sometimes(0.3, 2, 7),
    "long_prefill_token_threshold_adaptive": on_or_off(0.3),
    "scheduler_reserve_full_isl": sometimes(0.3, False),
    "watermark": sometimes(0.3, 0.01, 0.2),
    "prefix_cache_retention_interval": sometimes(0.3, 32, "none"),
    "num_gpu_blocks_override": sometimes(0.3, 20, 40),
    "schedule_policy": sometimes(0.5, *SCHEDULE_POLICIES),
    "schedule_conservativeness": sometimes(0.4, 1e-6, 0.1, 2.0, 100.0),
    "reserve_by_ratio": on_or_off(0.2),
    "max_prefill_tokens": sometimes(0.3, 20, 100),
    "prefill_max_requests": sometimes(0.2, 1, 2),
    "enable_mixed_chunk": on_or_off(0.3),
    "disable_overlap_schedule": on_or_off(0.3),
    "scheduler_recv_interval": sometimes(0.3, 3, 10),
    "num_reserved_decode_tokens": sometimes(0.0),  # of decode replicas: see tests/fleet
    "disable_radix_cache": on_or_off(0.2),
    "radix_eviction_policy": sometimes(0.3, *EVICTION_POLICIES),
    "enable_hierarchical_cache": on_or_off(0.5),
    "hicache_ratio": sometimes(0.5, 0.2, 1.0, 5.0),
    "hicache_size": sometimes(0.0),  # a gigabyte at least
    "hicache_write_policy": sometimes(0.6, *HOST_WRITE_POLICIES),
    "retraction_policy": sometimes(0.3, *RETRACTION_POLICIES),
    "enable_priority_scheduling": on_or_off(0.4),
    "disable_priority_preemption": on_or_off(0.3),
    "priority_scheduling_preemption_threshold": sometimes(0.4, 0.0, 0.3),
    "tokens_per_block": lambda draw: draw.choice([1, 2, 4, 8, 8, 16, 32]),
    "max_tokens_in_paged_kvcache": sometimes(0.95, 20, 40, 64, 128, 300, 2_000),
    "kv_cache_free_gpu_mem_fraction": sometimes(0.1, 0.05, 0.5),
    "gpu_memory_utilization": sometimes(0.05, 0.8),
    "enable_kv_cache_reuse": on_or_off(0.4),
    "enable_partial_reuse": on_or_off(0.3, usual=True),
    "copy_on_partial_reuse": on_or_off(0.3, usual=True),
    "max_attention_window": sometimes(0.25, "9", "16", "17", "40", "64", "12,31", "8,16,99"),
    "sink_token_len": sometimes(0.15, 1, 3, 8),
    "window_mode": sometimes(0.3, "linear", "cyclic"),
    "kv_host_cache_bytes": sometimes(0.15, 100_000, 2_000_000, 100_000_000),
    "kv_retention_priority": sometimes(0.3, 36, 90, 100),
    "kv_retention_s": sometimes(0.3, 0.0, 0.001, 5.0),
    # They need a simulated device: see tests/fleet/test_tiers.py.
    **dict.fromkeys(TIER_SETTINGS, sometimes(0.0)),
    "kv_cache_dtype": sometimes(0.1, "float32", "bf16", "fp8"),
    "kv_cache_type": sometimes(0.06, "contiguous"),
    "lora_dir": sometimes(0.0),
    "num_loras": sometimes(0.3, 1, 2, 5),
    "lora_rank": sometimes(0.05, 1, 4, 70),
    "max_lora_rank": sometimes(0.2, 4, 16),
    "lora_device_mem_fraction": sometimes(0.05, 1e-6, 0.1, 0.5),
    "lora_num_device_mod_layers": sometimes(0.15, 1, 100, 300, 5_000),
    "lora_host_cache_bytes": sometimes(0.1, 0, 1_000_000, 3_000_000),
    "device": lambda draw: draw.choice(DEVICES),
    "model": sometimes(0.0),
    "dtype": sometimes(0.06, "float32", "bf16", "fp8", "int4"),
    "cpu_threads": lambda draw: 1,
    "tp_size": sometimes(0.04, 2),
    "pp_size": sometimes(0.06, 2, 4),
    # Models with experts are tested in tests/simulated/.
    **dict.fromkeys(["ep_size", "attention_dp_size", "attention_dp_enable_balance"], sometimes(0.0)),
    "attention_dp_time_out_iters": sometimes(0.02, 0, 9),
    "attention_dp_batching_wait_iters": sometimes(0.02, 0, 4),
    **dict.fromkeys(["expert_load", "redundant_experts", "enable_two_batch_overlap"], sometimes(0.0)),
    "check_ranks": sometimes(0.02, 1, 7),
    "rank_timeout": sometimes(0.02, 60.0),
    "engine_overhead": sometimes(0.3, "vllm", "sglang", "tensorrt-llm"),
    "stream_interval": sometimes(0.3, 3, 20),
    "draft_model": sometimes(0.06, "tiny"),
    "draft_ngram": sometimes(0.12, 1, 3),
    "draft_mtp": sometimes(0.0),
    "draft_len": sometimes(0.06, 1, 3, 7),
    "acceptance_rate": sometimes(0.12, "0.7", "0", "1", "0.9,0.5,0.2"),
    "temperature": sometimes(0.15, 0.7, 2.0),
    "top_k": sometimes(0.1, 1, 5),
    "top_p": sometimes(0.1, 0.3, 0.9),
    "repetition_penalty": sometimes(0.05, 1.3),
    "presence_penalty": sometimes(0.05, -0.5, 1.5),
    "frequency_penalty": sometimes(0.05, 0.3),
    "min_length": sometimes(0.05, 1, 3, 50),
    "length_penalty": sometimes(0.1, -1.0, 0.0, 2.0),
    "early_stopping": sometimes(0.2, *EARLY_STOPPING),
    "stop_at_end_token": on_or_off(0.2),
    "output": sometimes(0.0),
    "overwrite": on_or_off(0.2),
    "output_csv": sometimes(0.05, "figures.csv"),
    "report_json": sometimes(0.05, "report.json"),
    "request_json": sometimes(0.05, "requests.json"),
    "iteration_log": sometimes(0.05, "iterations.log"),
    "result_json": sometimes(0.05, "result.json"),
    "result_format": sometimes(0.05, *RESULT_FORMATS),
    "save_detailed": on_or_off(0.05),
    "responses_json": sometimes(0.05, "responses.json"),
    "recording": sometimes(0.1, "summary"),
    "recording_format": sometimes(0.2, *RECORDING_FORMATS),
    "iteration_stats_format": sometimes(0.1, "trtllm"),
    "iteration_stats_every": sometimes(0.15, 2, 7),
    "enable_steady_state": on_or_off(0.15),
    "profile": on_or_off(0.03),
    "log_iteration_data": on_or_off(0.05),
    "quiet": lambda draw: True,
}


def test_every_setting_is_drawn() -> None:
    assert list(DRAWS) == [setting.name for setting in settings()]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_run(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soak(seed, tmp_path, monkeypatch, is_read=seed % READ_EACH == 0)


@pytest.mark.slow
@pytest.mark.parametrize("first", SLOW_SEEDS[::100])
def test_many_random_runs(first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [
        soak(seed, tmp_path / str(seed), monkeypatch, seed % SLOW_READ_EACH == 0, SLOW_CHARTS)
        for seed in range(first, first + 100)
    ]
    assert sum(outcomes) > 40, "most settings drawn should fit together, else only refusals are tested"


def fit_together(values: dict[str, Any]) -> None:
    """Most draws of these settings would be refused for one that they need and that is missing."""
    if "num_loras" not in values:
        values.pop("lora_rank", None)
    if values["device"] == "cpu":
        values.pop("acceptance_rate", None)
    elif "draft_model" in values or "draft_ngram" in values:
        values.setdefault("acceptance_rate", "0.6")
    if not values.keys() & {"draft_model", "draft_ngram", "acceptance_rate"}:
        values.pop("draft_len", None)
    if "enable_kv_cache_reuse" not in values:
        values.pop("kv_retention_priority", None)
    if "kv_retention_priority" not in values:
        values.pop("kv_retention_s", None)
    engine, unknown = values.get("engine"), {"vllm": NOT_IN_VLLM, "sglang": NOT_IN_SGLANG}
    others = {one.name for one in settings() if one.group in unknown and one.group != engine}
    for name in (*others, *unknown.get(str(engine), ())):
        values.pop(name, None)
    if engine != "sglang":
        values.pop("ignore_eos", None)
    else:
        values.pop("overlap", None)
        size = values.get("max_num_tokens", "none")
        if size != "none":
            page = values.get("tokens_per_block", 1)
            values["max_num_tokens"] = max(size // page, 1) * page
        if values.get("disable_radix_cache") or "enable_kv_cache_reuse" not in values:
            values.pop("enable_hierarchical_cache", None)
        if "enable_hierarchical_cache" not in values:
            for name in ("hicache_ratio", "hicache_write_policy"):
                values.pop(name, None)
        if values.get("schedule_policy") not in (None, "fcfs", "lof"):
            values.pop("enable_priority_scheduling", None)
        if "enable_priority_scheduling" not in values:
            for name in (
                "retraction_policy",
                "disable_priority_preemption",
                "priority_scheduling_preemption_threshold",
            ):
                values.pop(name, None)
    if values.get("engine") == "vllm":
        values.pop("overlap", None)
        if values.get("max_num_tokens", "none") == "none":
            values["max_num_tokens"] = 33
        values["max_batch_size"] = min(values.get("max_batch_size", 8), values["max_num_tokens"])
        if values.get("enable_chunked_context") is False:
            values.pop("enable_chunked_context")
        if values.keys() & {"draft_ngram", "acceptance_rate"}:
            values.pop("async_scheduling", None)
    if not values["device"].startswith("sim:h") or "static_emulated_batch_size" in values:
        values.pop("engine_overhead", None)
    if "engine_overhead" not in values:
        values.pop("stream_interval", None)
    if "recording" in values:
        for name in ("enable_steady_state", "profile", "iteration_log", "result_json", "result_format"):
            values.pop(name, None)


def soak(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch, is_read: bool = False, charts: int = 0) -> bool:
    """One random run, checked. Returns whether it ran; settings that contradict each other raise InputError only.

    is_read: every command reads the run, and what a kill would have left of it; it is run again from its own directory,
    and sometimes repeated. charts: how many are drawn of each."""
    draw = random.Random(seed)
    values = {name: value for name, rule in DRAWS.items() if (value := rule(draw)) is not None}
    fit_together(values)
    if values["device"] == "cpu":  # several processes: see test_ranks.py
        values |= {"tp_size": 1, "pp_size": 1}
    values["output"] = str(folder / "run")
    for name in SIDE_OUTPUTS:
        if name in values:
            values[name] = str(folder / values[name])
    folder.mkdir(exist_ok=True)
    if "rate_schedule" in values:
        values["rate_schedule"] = str(folder / values["rate_schedule"])
        Path(values["rate_schedule"]).write_text("start_s,rate\n0,5000\n0.002,0\n0.004,20000\n")
    trace = folder / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows(draw, is_short=values["device"] == "cpu")))
    loops: list[TokenGenerationLoop] = []
    make = TokenGenerationLoop.__init__

    def noted(self: TokenGenerationLoop, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        loops.append(self)

    try:
        with monkeypatch.context() as patched, within(LIMIT_S):
            patched.setattr(TokenGenerationLoop, "__init__", noted)
            if is_read:
                patched.setattr(single, "Recorder", recorder_with_copy(folder / "killed", draw.choice((0, 2, 5))))
            config = RunConfig(**values)
            run_trace(str(trace), config, on_recorded=partial(written, config))
    except InputError:
        assert not (folder / "run").exists(), command_line(trace, values)
        return False
    except BaseException as error:
        error.add_note(f"Reproduce it with: {command_line(trace, values)}")
        raise
    try:
        check_engine(loops[-1])
        check_files(folder / "run", config)
        if is_read:
            check_same_run_again(folder / "run", folder / "again", config)
            read_by_every_command(folder / "run", folder / "again", draw, charts)
            if (folder / "killed").exists():
                check_killed(folder / "killed", folder / "run", config, draw, charts)
            if draw.random() < REPEATED_SHARE:
                check_repeats(str(trace), config, folder / "repeats")
    except (AssertionError, KeyError, FileNotFoundError) as error:
        error.add_note(f"Reproduce it with: {command_line(trace, values)}")
        raise
    return True


def recorder_with_copy(directory: Path, number: int) -> type[Recorder]:
    """A recorder that flushes its files when `number` further requests had ended, and copies the run directory, which
    a kill would have left like that, to `directory`; with the figures up to there in `at_kill.json`."""

    class CopyingRecorder(Recorder):
        def _end(self, finished: list[Request], iteration: int) -> None:
            super()._end(finished, iteration)
            if finished and self.summary(True, "")["requests"]["completed"] > number:
                if directory.exists():
                    return
                self.flush()
                shutil.copytree(self.directory, directory)
                (directory / "at_kill.json").write_text(json.dumps(self.summary(True, "")))

    return CopyingRecorder


def check_same_run_again(directory: Path, again: Path, config: RunConfig) -> None:
    """A run directory is the config file of the same run: with the same settings and, on a simulated device, the same
    schedule."""
    done = CliRunner().invoke(main, ["run", "--config", str(directory), "--output", str(again), "--quiet"])
    assert done.exit_code in (0, 1), done.output  # 1: requests that are too long fail again
    first, second = (json.loads((one / "run.json").read_text()) for one in (directory, again))
    for one in (first, second):
        one["config"] = {name: value for name, value in one["config"].items() if name not in PLACES}
        one["derived"].sort()
    assert first["config"] == second["config"]
    assert (first["derived"], first["trace"]["sha256"]) == (second["derived"], second["trace"]["sha256"])
    assert config.hardware is None or first["schedule_digest"] == second["schedule_digest"]


def check_killed(directory: Path, whole: Path, config: RunConfig, draw: random.Random, charts: int) -> None:
    """The figures of a killed run are those of its part that was done, and every command reads it; also where its
    files have come further or less far than the others."""
    known, found = json.loads((directory / "at_kill.json").read_text()), figures(load_run(directory))
    unknown = ["kv_tokens"] if config.kv_cache_type == "contiguous" else []
    if config.recording == "summary":
        unknown += UNKNOWN_OF_SUMMARY
    elif config.iteration_stats_every > 1:
        unknown += UNKNOWN_WHERE_THINNED
    known, found = (
        {name: value for name, value in flat(one) if not re.match("|".join(unknown) or "$", name)}
        for one in (known, found)
    )
    assert known.keys() == found.keys()
    for name, value in known.items():
        assert found[name] == (pytest.approx(value, rel=1e-6, abs=1e-9) if isinstance(value, float) else value), name
    read_by_every_command(directory, whole, draw, charts)
    cut = copied(directory, directory.with_name("cut"))
    cut_off(cut, draw)
    read_by_every_command(cut, whole, draw, charts)


def flat(values: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested objects and lists, by dotted names; but for the digest, which a killed run has not."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else None
    if items is None:
        yield name, values
        return
    for key, value in items:
        if key != "schedule_digest":
            yield from flat(value, f"{name}.{key}" if name else str(key))


def check_repeats(trace: str, config: RunConfig, directory: Path) -> None:
    """Every command for repeats reads those of a run, and what a kill after the first one leaves."""
    killed = directory.with_name("repeats-killed")

    def copy(number: int, *_: Any) -> None:
        if number == 1:
            shutil.copytree(directory, killed)

    sole = config.with_values(output=str(directory), overwrite=False, **dict.fromkeys(SIDE_OUTPUTS))
    run_repeats(trace, sole, 2, lambda source, one: run_trace(source, one), copy)
    for words in (["report"], ["report", "--json"], ["compare", str(directory)]):
        for one in (directory, killed):
            done = CliRunner().invoke(main, [words[0], str(one), *words[1:]])
            assert done.exit_code == 0, done.output


def written(config: RunConfig, directory: Path) -> None:
    """Write the files for other tools that `config` asks for."""
    write_outputs(load_run(directory), config)


def rows(draw: random.Random, is_short: bool) -> Iterator[dict[str, Any]]:
    """A small trace: equal beginnings, several priorities, beams and adapters, reserved lengths beside actual ones."""
    kind = draw.choice(["lengths", "tokens", "prefixes"])
    common = [draw.randrange(4_096) for _ in range(60)]
    has_beams, is_at_once, has_classes = (draw.random() < share for share in (0.1, 0.4, 0.5))
    too_long_share = draw.choice([0.0, 0.05, 0.05, 1.0])  # of most runs; with 1, no request may complete
    session_share = draw.choice([0.0, 0.0, 0.4, 0.9])
    arrival_s = 0.0
    for index in range(draw.randint(1, 4 if is_short else 14)):
        prompt_len = draw.choice([1, draw.randint(1, 12), draw.randint(1, 24 if is_short else 70)])
        if not is_short and draw.random() < too_long_share:
            prompt_len = draw.randint(90, 400)
        output_len = draw.randint(1, 5 if is_short else 30)
        arrival_s += 0.0 if is_at_once or draw.random() < 0.4 else draw.expovariate(1_000.0)
        row: dict[str, Any] = {"request_id": 3 * index + 1, "arrival_s": arrival_s, "output_len": output_len}
        if kind == "tokens":
            shared = draw.choice([0, draw.randint(0, min(prompt_len, 60))])
            row["prompt_tokens"] = common[:shared] + [draw.randrange(4_096) for _ in range(prompt_len - shared)]
        else:
            row["prompt_len"] = prompt_len
        if kind == "prefixes" and draw.random() < 0.7:
            row |= {"prefix_ids": [draw.randrange(2)], "prefix_lens": [draw.randint(1, min(prompt_len, 512))]}
        if draw.random() < 0.4:
            row["max_new_tokens"] = max(1, output_len + draw.randint(-4, 12))
        if has_classes and draw.random() < 0.8:
            row["class"] = draw.choice("abc")
        if draw.random() < 0.3:
            row["priority"] = draw.choice([0.0, 0.2, 0.5, 0.9, 1.0])
        if has_beams:
            row["beam_width"] = draw.randint(1, 3)
        if draw.random() < 0.1:
            row["lora_task_id"] = draw.randrange(3)
        if draw.random() < 0.15:
            row["stop_ids"] = [draw.randrange(4_096) for _ in range(draw.choice([1, 300]))]
        if index and draw.random() < session_share:
            row |= {"after": 3 * draw.randrange(index) + 1, "think_s": draw.choice([0.0, 0.001])}
        yield row


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """TimeoutError in the block where it takes longer."""

    def give_up(*_: Any) -> None:
        raise TimeoutError(f"the run did not end within {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def command_line(trace: Path, values: dict[str, Any]) -> str:
    options = []
    for name, value in values.items():
        options += [f"--{name}" if value else f"--no_{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    return shlex.join(["ifbbench", "run", str(trace), *options])


def check_engine(loop: TokenGenerationLoop) -> None:
    """Nothing is left in the engine; stored blocks are free to be taken."""
    assert not loop.scheduler.table.requests
    cache = loop.scheduler.kv_cache  # type: ignore[attr-defined]
    assert cache.num_used == 0
    cache.check_consistency()
    if isinstance(loop.scheduler, TensorRtLlmScheduler) and loop.scheduler.adapters is not None:
        loop.scheduler.adapters.check_consistency()


def lines(directory: Path, name: str, config: RunConfig) -> list[dict[str, Any]]:
    content = b"".join(read_pieces(directory / f"{name}.{config.recording_format}"))
    return [json.loads(line) for line in content.splitlines()]


def check_files(directory: Path, config: RunConfig) -> None:
    summary = json.loads((directory / "summary.json").read_text())
    run = json.loads((directory / "run.json").read_text())
    if config.recording == "summary":
        assert not list(directory.glob("iterations*")) + list(directory.glob("s[pt]*.jsonl*"))
        assert len(lines(directory, "requests", config)) == summary["requests"]["total"]
        assert run["schedule_digest"] == summary["schedule_digest"]
        return
    requests, spans = lines(directory, "requests", config), lines(directory, "spans", config)
    iterations, trace = lines(directory, "iterations", config), lines(directory, "trace", config)
    if config.type == "v1":
        check_static_batches(iterations, lines(directory, "steps", config), config)
        iterations = lines(directory, "steps", config)
    assert not summary["partial"]
    assert not run["partial"]
    assert run["schedule_digest"] == summary["schedule_digest"]
    if summary.get("steady_state"):  # the figures are of a part of the run
        return

    # Each request ends exactly once.
    total = summary["requests"]["total"]
    if config.duration is None:
        assert total == len(trace)
    assert len({line["index"] for line in requests}) == len(requests) == total
    assert all(line["request_id"] == trace[line["index"]]["request_id"] for line in requests)
    check_arrivals(requests, trace, config)
    outcomes = Counter(line["outcome"] for line in requests)
    done = [line for line in requests if line["outcome"] == "completed"]
    assert summary["requests"] == {"total": total, "completed": len(done), "failed": outcomes["failed"]}
    assert len(done) + outcomes["failed"] == total
    assert all(line["error"] for line in requests if line["outcome"] == "failed")
    check_requests(summary, done, trace)
    check_spans(summary, done, spans)
    if config.iteration_stats_every == 1:
        check_iterations(summary, iterations, spans)
        if run["config"]["overlap"] != "async" or micro_batches_of(run["config"]) > 1:
            check_batches(iterations, spans, micro_batches_of(run["config"]))


def check_arrivals(requests: list[dict[str, Any]], trace: list[dict[str, Any]], config: RunConfig) -> None:
    """Each request arrives when the trace says; a turn of a session after the one before; none after the duration."""
    by_id = {line["request_id"]: line for line in requests}
    for line in requests:
        row = trace[line["index"]]
        assert config.duration is None or line["arrival_s"] <= config.duration
        if row.get("after") is None:
            assert line["arrival_s"] == row["arrival_s"] or not config.keeps_arrivals
        elif row["after"] in by_id and (end_s := by_id[row["after"]]["end_s"]) is not None:  # else it was skipped
            late_s = line["arrival_s"] - end_s - row["think_s"]
            assert late_s >= -1e-9
            assert late_s < 1e-9 or config.hardware is None, "on a virtual clock it comes exactly then"


def check_requests(summary: dict[str, Any], done: list[dict[str, Any]], trace: list[dict[str, Any]]) -> None:
    for line in done:
        row = trace[line["index"]]
        assert line["request_id"] == row["request_id"]
        assert 1 <= line["output_len"] <= min(row["output_len"], row["max_new_tokens"])
        assert 0 <= line["reused_tokens"] < line["prompt_len"]
        assert line["arrival_s"] <= line["first_scheduled_s"] <= line["first_token_s"] <= line["end_s"]
        assert sum(line["attribution_s"].values()) == pytest.approx(line["e2e_s"], abs=1e-9)
        assert all(seconds >= -1e-12 for seconds in line["attribution_s"].values())
    for name in ("prompt", "output"):
        assert summary[f"{name}_tokens"] == sum(line[f"{name}_len"] for line in done)
    for name in ("queue_time_s", "ttft_s", "tpot_s", "e2e_s"):
        assert summary[name] == distribution([line[name] for line in done if line[name] is not None])
    if done:
        assert summary["prefix_hit_rate"] == sum(line["reused_tokens"] for line in done) / summary["prompt_tokens"]
    assert sum(line["pauses"] for line in done) == summary["pauses"]
    assert sum(line["recomputed_tokens"] for line in done) == summary["recomputed_tokens"]


def check_spans(summary: dict[str, Any], done: list[dict[str, Any]], spans: list[dict[str, Any]]) -> None:
    """The spans of a request follow each other without gaps; they hold its tokens and its pauses."""
    of_request: dict[int, list[dict[str, Any]]] = {}
    for span in spans:
        of_request.setdefault(span["request_id"], []).append(span)
    for line in done:
        own = of_request.pop(line["request_id"])
        for before, after in pairwise(own):
            assert before["first_iteration"] <= before["last_iteration"]
            # The turns of other micro batches may be in between.
            assert 0 < after["first_iteration"] - before["last_iteration"] <= before.get("every", 1)
        assert own[-1]["last_iteration"] < summary["iterations"]
        phases = Counter(span["phase"] for span in own)
        assert sum(span.get("produced", 0) for span in own) == line["output_len"]
        assert phases["paused"] <= line["pauses"]
        context = sum(span["tokens"] for span in own if span["phase"] == "context")
        assert context == line["prompt_len"] - line["reused_tokens"] or line["pauses"]
    assert not of_request, "spans of requests that were refused"


def check_static_batches(batches: list[dict[str, Any]], steps: list[dict[str, Any]], config: RunConfig) -> None:
    """A line a static batch, which sums up its steps."""
    documented = list(map(documented_fields, batches))
    assert [line["iteration_counter"] for line in documented] == list(range(len(batches)))
    assert all(line["scheduled_requests"] == line["context_requests"] for line in documented)
    if config.iteration_stats_every == 1:
        summed = list(map(documented_fields, steps))
        for name in ("total_generation_tokens", "total_context_tokens", "empty_generation_slots", "context_requests"):
            assert sum(line[name] for line in documented) == sum(line[name] for line in summed)


def check_batches(iterations: list[dict[str, Any]], spans: list[dict[str, Any]], every: int) -> None:
    """The batches of the iterations are those of the spans: a request runs in the iterations of one micro batch. With
    overlap async, a discarded step of a complete request is in no span."""
    context, generation = Counter[int](), Counter[int]()
    for span in spans:
        if (counted := {"context": context, "recompute": context, "generation": generation}.get(span["phase"])) is None:
            continue
        assert span.get("every", 1) == every
        counted.update(range(span["first_iteration"], span["last_iteration"] + 1, every))
    for line in map(documented_fields, iterations):
        number = line["iteration_counter"]
        assert line["context_requests"] == context[number]
        if "microbatch_id" in line:
            assert line["generation_requests"] == generation[number]
            assert every == 1 or line["microbatch_id"] == number % every


def check_iterations(summary: dict[str, Any], iterations: list[dict[str, Any]], spans: list[dict[str, Any]]) -> None:
    documented = list(map(documented_fields, iterations))
    assert [line["iteration_counter"] for line in documented] == list(range(summary["iterations"]))
    for line in documented:
        # A higher priority may make one more request active than the limit; it is not one more that runs.
        assert line["scheduled_requests"] <= min(line["active_request_count"], line["max_request_count"])
        if line["max_kv_cache_blocks"] is not None:
            used, free = line["used_kv_cache_blocks"], line["free_kv_cache_blocks"]
            assert used >= 0
            assert free >= 0
            assert used + free == line["max_kv_cache_blocks"]
    of_context = sum(sum(span["chunks"]) for span in spans if span.get("chunks"))
    assert sum(line["total_context_tokens"] for line in documented) == of_context
    assert sum(len(line["ifbbench"]["paused"]) for line in iterations) == summary["pauses"]
    assert sum(line["ifbbench"]["tokens_recomputed"] for line in iterations) == summary["recomputed_tokens"]
    bound_by = Counter(line["ifbbench"]["bound_by"] for line in iterations)
    assert summary["bound_by"] == {name: bound_by[name] / max(len(iterations), 1) for name in summary["bound_by"]}
