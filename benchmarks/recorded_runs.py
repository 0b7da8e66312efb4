"""Files of 40 varied runs, to compare two revisions of the engine byte by byte.

`python -m benchmarks.recorded_runs write DIRECTORY [NAME ...]` makes the runs, or those named; it needs nothing
but the bundled data sets. With IFBBENCH_PURE_PYTHON=1 the loop is not compiled, which changes no file.
`python -m benchmarks.recorded_runs compare DIRECTORY OTHER [NAME ...]` prints one JSON object with the files that
differ, of all runs or those named; exit status 1 if any does. Runs on a simulated GPU must be equal to the last byte.
Runs in real time are compared without their times. Of `run.json` the versions, host, date and directory name are left
out.
"""

import hashlib
import json
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from ifbbench.cli.main import main as cli

SIMULATED = "--device sim:h100-sxm --model llama-3.1-8b"
NULL = "--device null"
TINY = "--device cpu --model tiny --max_seq_len 2048"
GNE, MU, STATIC = (f"--policy {name}" for name in ("guaranteed_no_evict", "max_utilization", "static_batch"))
WHOLE, CHUNKED = "--no_enable_chunked_context --max_seq_len 8000", "--enable_chunked_context --max_num_tokens 512"
EQUAL_PROGRESS = f"{CHUNKED} --context_chunking_policy equal_progress"
SMALL_POOL = "--max_tokens_in_paged_kvcache 16384 --reserve factor:1.5 --time_scale 0"
REUSE = "--enable_kv_cache_reuse --max_tokens_in_paged_kvcache 65536"
CHAT, CODE, SHARED, TURNS = (f"{name} --max_num_samples" for name in ("chat", "code", "shared-prefix", "multi-turn"))
MOONCAKE = "mooncake-conversation --max_num_samples 40 --max_seq_len 131072"

RUNS = {
    "default": f"default {SIMULATED} {WHOLE}",
    "default_mu_small_pool": f"default {SIMULATED} {MU} {WHOLE} --max_tokens_in_paged_kvcache 4096",
    "chat_gne": f"{CHAT} 150 {SIMULATED} {GNE} {WHOLE}",
    "chat_gne_chunked": f"{CHAT} 150 {SIMULATED} {GNE} {CHUNKED}",
    "chat_gne_small_pool": f"{CHAT} 100 {SIMULATED} {GNE} {WHOLE} {SMALL_POOL}",
    "chat_mu_small_pool": f"{CHAT} 100 {SIMULATED} {MU} {WHOLE} {SMALL_POOL}",
    "chat_mu_chunked_small_pool": f"{CHAT} 100 {SIMULATED} {MU} {CHUNKED} {SMALL_POOL}",
    "chat_mu_equal_progress": f"{CHAT} 100 {SIMULATED} {MU} {EQUAL_PROGRESS} {SMALL_POOL}",
    "chat_gne_equal_progress": f"{CHAT} 100 {SIMULATED} {GNE} {EQUAL_PROGRESS} --max_batch_size 24",
    "chat_static": f"{CHAT} 80 {SIMULATED} {STATIC} {WHOLE} --max_batch_size 16",
    "chat_v1": f"{CHAT} 60 {SIMULATED} --type v1 {WHOLE} --max_batch_size 16",
    "chat_two_passes": f"{CHAT} 60 {SIMULATED} --type UIFB {CHUNKED}",
    "chat_overlap": f"{CHAT} 80 {SIMULATED} {GNE} {CHUNKED} --overlap async",
    "chat_overlap_mu": f"{CHAT} 80 {SIMULATED} {MU} {CHUNKED} {SMALL_POOL} --overlap async",
    "chat_beams": f"{CHAT} 40 {SIMULATED} {WHOLE} --beam_width 4 --max_tokens_in_paged_kvcache 65536",
    "chat_beams_mu": f"{CHAT} 40 {SIMULATED} {MU} {CHUNKED} {SMALL_POOL} --beam_width 2",
    "chat_streaming": f"{CHAT} 60 {SIMULATED} {CHUNKED} --streaming",
    "chat_concurrency": f"{CHAT} 100 {SIMULATED} {CHUNKED} --concurrency 12",
    "chat_poisson": f"{CHAT} 100 {SIMULATED} {CHUNKED} --request_rate 30 --enable_exp_delays --seed 7",
    "chat_emulated": f"{CHAT} 60 {SIMULATED} {CHUNKED} --static_emulated_batch_size 8 --static_emulated_timeout 300",
    "chat_thinned_gz": f"{CHAT} 100 {SIMULATED} {CHUNKED} --iteration_stats_every 10 --recording_format jsonl.gz",
    "chat_window": f"{CHAT} 60 {SIMULATED} {CHUNKED} --max_attention_window 1024",
    "chat_window_sink": f"{CHAT} 60 {SIMULATED} {WHOLE} --max_attention_window 512 --sink_token_len 4",
    "chat_window_linear": f"{CHAT} 60 {SIMULATED} {CHUNKED} --max_attention_window 768 --window_mode linear",
    "chat_two_windows": f"{CHAT} 60 {SIMULATED} {WHOLE} --max_attention_window 512,4096 --time_scale 0",
    "chat_contiguous": f"{CHAT} 60 {SIMULATED} --no_enable_chunked_context --kv_cache_type contiguous"
    " --max_seq_len 8000 --max_batch_size 32",
    "chat_tp": f"{CHAT} 100 --device sim:h100-sxm --model llama-3.3-70b --dtype fp8 --tp_size 4 {CHUNKED}",
    "chat_pp": f"{CHAT} 60 --device sim:a100-80gb-sxm --model llama-3.1-8b --pp_size 2 {CHUNKED}",
    "code_gne": f"{CODE} 150 {SIMULATED} {GNE} {CHUNKED}",
    "code_mu": f"{CODE} 150 {SIMULATED} {MU} {WHOLE} --time_scale 0.01",
    "shared_reuse": f"{SHARED} 120 {SIMULATED} {GNE} {CHUNKED} {REUSE}",
    "shared_reuse_mu": f"{SHARED} 120 {SIMULATED} {MU} {WHOLE} {REUSE} --time_scale 0",
    "shared_no_partial": f"{SHARED} 80 {SIMULATED} {GNE} {WHOLE} {REUSE} --no_enable_partial_reuse",
    "turns_reuse_host": f"{TURNS} 120 {SIMULATED} {GNE} {CHUNKED} --enable_kv_cache_reuse"
    " --max_tokens_in_paged_kvcache 8192 --kv_host_cache_bytes 2000000000",
    "mooncake_reuse": f"{MOONCAKE} {SIMULATED} {GNE} --enable_chunked_context --tokens_per_block 128"
    " --enable_kv_cache_reuse",
    "mooncake_mu_reuse": f"{MOONCAKE} {SIMULATED} {MU} --enable_chunked_context --enable_kv_cache_reuse --time_scale 0",
    "null_mu": f"{CHAT} 100 {NULL} {MU} {CHUNKED} {SMALL_POOL}",
    "null_reuse": f"{SHARED} 100 {NULL} {GNE} {WHOLE} --time_scale 0 --enable_kv_cache_reuse",
    "tiny_gne": f"documentation {TINY} --no_enable_chunked_context --max_batch_size 4 --max_num_tokens 12"
    " --time_scale 0",
    "tiny_mu": f"default --max_num_samples 24 {TINY} {MU} --enable_chunked_context --max_num_tokens 128 --time_scale 0"
    " --max_tokens_in_paged_kvcache 2048 --responses_json {directory}/responses.json",
}
NOT_COMPARED = {"versions", "hardware", "git_revision", "name", "wall_s"}
ENDINGS_OF_TIMES = ("_s", "_ms", "_per_s", "Timestamp", "bound_by_time", "waiting_by_limit", "slow_requests")


def write(directory: Path, names: Collection[str] = RUNS) -> None:
    """Make the runs `names` below `directory`. RuntimeError if a command is refused."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        target = directory / name
        words = RUNS[name].format(directory=directory).split()
        result = CliRunner().invoke(cli, ["run", *words, "--output", str(target), "--quiet"])
        if not (target / "summary.json").exists():
            raise RuntimeError(f"{name}: {result.output} {result.exception}")
        print(name, result.exit_code, file=sys.stderr)


def differences(first: Path, second: Path, names: Collection[str] = RUNS) -> Iterator[str]:
    """Names of the files of the runs `names` that are not equal."""
    for name in names:
        in_real_time = "sim:" not in RUNS[name]
        files = {path.name for run in (first / name, second / name) for path in run.glob("*.json*")}
        for file in sorted(files):
            one, other = (_content(directory / name / file, in_real_time) for directory in (first, second))
            if one != other:
                yield f"{name}/{file}"
    if "tiny_mu" in names and (first / "responses.json").read_bytes() != (second / "responses.json").read_bytes():
        yield "responses.json"


def _content(path: Path, in_real_time: bool) -> Any:
    if not path.exists():
        return None
    if path.name == "run.json":
        described = json.loads(path.read_text(encoding="utf-8"))
        for part, key in (("config", "output"), ("config", "responses_json"), ("trace", "source")):
            described[part].pop(key, None)
        return _without_times({key: value for key, value in described.items() if key not in NOT_COMPARED}, in_real_time)
    if not in_real_time:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return _without_times(json.loads(text), True)
    return [_without_times(json.loads(line), True) for line in text.splitlines()]


def _without_times(value: Any, in_real_time: bool) -> Any:
    """`value` without anything that depends on real time, where it does."""
    if not in_real_time or not isinstance(value, dict):
        return value
    kept = {key: item for key, item in value.items() if not key.endswith(ENDINGS_OF_TIMES)}
    return {key: _without_times(item, True) for key, item in kept.items()}


def main() -> None:
    """Write runs, or compare those of two revisions."""
    command, *given = sys.argv[1:]
    paths, names = given[: 1 if command == "write" else 2], given[1 if command == "write" else 2 :]
    if unknown := [name for name in names if name not in RUNS]:
        sys.exit(f"{', '.join(unknown)}: no such run; expected some of {', '.join(RUNS)}.")
    if command == "write":
        os.environ["COLUMNS"] = "160"
        write(Path(paths[0]).resolve(), names or RUNS)
        return
    found = list(differences(Path(paths[0]), Path(paths[1]), names or RUNS))
    described = {"benchmark": "files of recorded runs", "runs": len(names or RUNS), "different": found}
    print(json.dumps(described, indent=2))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
