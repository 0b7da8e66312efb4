"""Recognises logs by their content, and reads them."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ifbbench.errors import InputError
from ifbbench.rundir.checking import as_object, check_line
from ifbbench.rundir.run_directory import find_iterations
from ifbbench.settings.fields import shown
from ifbbench.studies.engine_logs import is_tensorrt_llm, is_vllm, read_tensorrt_llm, read_vllm
from ifbbench.studies.load_tests import LoadTest, is_load_tests, read_load_tests
from ifbbench.studies.log import Log, text_of
from ifbbench.studies.run_log import is_run, read_iterations, read_run
from ifbbench.studies.sglang_logs import is_sglang, read_sglang

RUN = "run of ifbbench"
FORMATS = (
    "a run directory of ifbbench, TensorRT-LLM's iteration statistics (trtllm-bench --iteration_log, trtllm-serve "
    "/metrics), log lines of vLLM or SGLang, or a CSV file of load tests (input_len, output_len, concurrency or rate, "
    "and throughput, ttft or itl)"
)


def read_logs(paths: Sequence[Path], given: Mapping[str, Any]) -> tuple[list[Log], list[tuple[Path, LoadTest]]]:
    """The logs at `paths`, each recognised by its content, and the load tests in them with their files.

    given: settings that were given.

    InputError for what is no log, and for one that is damaged or mixed.
    """
    logs, tests = list[Log](), list[tuple[Path, LoadTest]]()
    for path in paths:
        log = Log(path.parent if path.is_file() and is_run(path) else path)
        logs.append(log)
        if is_run(log.path):
            log.format = RUN
            read_run(log, given.get("model") is not None)  # first: it refuses a pipe, which a run directory has not
            log.sha256 = hashlib.sha256(Log(find_iterations(log.path)).content(FORMATS, "--from ")).hexdigest()
            continue
        content = log.content(FORMATS, "--from ")
        log.sha256 = hashlib.sha256(content).hexdigest()
        tests += [(path, test) for test in _read(log, text_of(content), given)]
        if not (log.samples or log.observations or tests):
            raise InputError(f"{path}: has no iteration that ran a request under constant load; give a longer log.")
    return logs, tests


def _read(log: Log, text: str, given: Mapping[str, Any]) -> Sequence[LoadTest]:
    """Read the content of a file into `log`. Returns its load tests, if it is a file of these."""
    if not text.strip():
        raise InputError(f"{log.path}: is empty; expected {FORMATS}.")
    if '"Iteration Counter"' in text[:20_000] or '"ifbbench"' in text[:20_000]:
        log.format = "iterations of ifbbench"
        read_iterations(log, _json_lines(log, text))
    elif is_tensorrt_llm(text):
        log.format = "TensorRT-LLM iteration statistics"
        read_tensorrt_llm(log, text, bool(given.get("overlap") or given.get("enable_trt_overlap")))
    elif is_vllm(text):
        log.format = "vLLM log"
        cache_tokens = given.get("max_tokens_in_paged_kvcache")
        read_vllm(log, text, None if cache_tokens is None else int(cache_tokens))
    elif is_sglang(text):
        log.format = "SGLang log"
        read_sglang(log, text)
    elif is_load_tests(text):
        log.format = "load tests"
        return read_load_tests(log, text, int(given.get("tp_size") or 1))
    else:
        raise InputError(f"{log.path}: no known log, it begins with {shown(text.strip())}; expected {FORMATS}.")
    return ()


def _json_lines(log: Log, text: str) -> list[dict[str, Any]]:
    """The lines of iterations.jsonl. A last one that is not complete is left out."""
    lines = text.splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = as_object(line.encode())
            if "ifbbench" not in row:
                raise InputError(
                    f"{log.path}, line {number}: field 'ifbbench' is missing, which has the times of an "
                    "iteration; give iterations.jsonl, or the run directory."
                )
            check_line("iterations.jsonl", row)
        except ValueError as error:
            if number == len(lines):
                log.notes.append(f"it is cut in line {number}, which is not used.")
                break
            raise InputError(f"{log.path}, line {number}: {error}. Restore the file.") from None
        rows.append(row)
    return rows
