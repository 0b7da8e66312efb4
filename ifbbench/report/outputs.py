"""The files that a run is also written to for the scripts of other benchmarks, all made from its directory."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from ifbbench.errors import IfbbenchError
from ifbbench.files import new_file
from ifbbench.report.compat import sglang_log, trtllm_bench, vllm_bench, vllm_log
from ifbbench.report.compat.gpt_manager_benchmark import write_benchmark_csv
from ifbbench.rundir.reader import RunData
from ifbbench.rundir.run_directory import RESULT, SERVER_LOGS
from ifbbench.settings.config import RunConfig
from ifbbench.settings.engines import SGLANG, VLLM

Write = Callable[[RunData, Path], None]
WRITERS: Mapping[str, Write] = MappingProxyType(
    {
        "output_csv": write_benchmark_csv,
        "report_json": trtllm_bench.write_report,
        "request_json": trtllm_bench.write_requests,
        "iteration_log": trtllm_bench.write_iterations,
    }
)
SERVER_LINES: Mapping[str, Callable[[RunData], Iterator[str]]] = MappingProxyType(
    {VLLM: vllm_log.lines, SGLANG: sglang_log.lines}
)


def write_outputs(run: RunData, config: RunConfig) -> None:
    """Write the files that `config` asks for, over existing ones: each, even if another one cannot be written. Errors
    are those of `new_file`."""
    wanted = [(Path(path), write) for name, write in WRITERS.items() if (path := getattr(config, name))]
    if config.result_json or config.result_format:
        path = Path(config.result_json) if config.result_json else run.path / RESULT
        wanted.append((path, partial(vllm_bench.write_result, detailed=config.save_detailed)))
    if (engine := config.iteration_stats_format) in SERVER_LOGS:
        wanted.append((run.path / SERVER_LOGS[engine], partial(write_server_log, engine)))
    errors: list[IfbbenchError] = []
    for path, write in wanted:
        try:
            write(run, path)
        except IfbbenchError as error:
            errors.append(error)
    if errors:
        raise type(errors[0])(" ".join(map(str, errors)))


def write_server_log(engine: str, run: RunData, path: Path) -> None:
    """Write the log that the server of `engine` would have written of a run."""
    with new_file(path, overwrite=True) as file:
        for line in SERVER_LINES[engine](run):
            file.write(line.encode() + b"\n")
