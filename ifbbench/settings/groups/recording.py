"""Settings of what is recorded, and where it is written."""

from dataclasses import dataclass
from functools import partial

from ifbbench.settings.engines import LOGGED_ENGINES
from ifbbench.settings.fields import declare

RECORDINGS = ("full", "summary")
RECORDING_FORMATS = ("jsonl", "jsonl.gz")
ITERATION_STATS_FORMATS = ("batch_manager", "trtllm", *LOGGED_ENGINES)
RESULT_FORMATS = ("vllm",)
# Settings that name a file outside of the run directory, and those of them that are written from it.
REPORT_FILES = ("output_csv", "report_json", "request_json", "iteration_log", "result_json")
SIDE_OUTPUTS = ("responses_json", *REPORT_FILES)

_recording = partial(declare, "recording")


@dataclass(frozen=True)
class RecordingSettings:
    """Settings of what is recorded, and where it is written."""

    output: str | None = _recording(
        None,
        "Run directory. Default: results/<name>.",
        elsewhere="output_dir result_dir save_result results",
        is_common=True,
    )
    overwrite: bool = _recording(False, "Replace an existing run directory.", is_common=True)
    output_csv: str | None = _recording(None, "Also write gptManagerBenchmark's CSV of figures here.", elsewhere="csv")
    report_json: str | None = _recording(None, "Also write trtllm-bench's report of figures here.")
    request_json: str | None = _recording(None, "Also write trtllm-bench's list of requests here.")
    iteration_log: str | None = _recording(
        None,
        "Also write trtllm-bench's log of iterations here: the executor's statistics, one JSON object a line.",
        with_endpoint=False,
    )
    result_json: str | None = _recording(
        None,
        "Also write the result of another benchmark here; see --result_format.",
        elsewhere="result_filename export_file",
    )
    result_format: str | None = _recording(
        None,
        "The benchmark that --result_json is the result of: vllm (bench serve). Without --result_json it is "
        "result.json in the run directory.",
        choices=RESULT_FORMATS,
    )
    save_detailed: bool = _recording(
        False, "--result_json also lists the lengths, latencies and errors of each request."
    )
    responses_json: str | None = _recording(
        None, "Also write the generated tokens of each request here.", aliases=("responses_json_file",)
    )
    recording: str = _recording(
        "full",
        "What is written: everything, or the requests and the figures of summary.json alone, which is faster: "
        "no iterations.jsonl and no spans.jsonl.",
        choices=RECORDINGS,
    )
    recording_format: str = _recording("jsonl", "Lines of JSON, plain or compressed.", choices=RECORDING_FORMATS)
    iteration_stats_format: str = _recording(
        ITERATION_STATS_FORMATS[0],
        "Names in iterations.jsonl: those of the batch manager, or of TensorRT-LLM's executor. vllm and sglang (with "
        "that --engine): the batch manager's, and the log lines of that server beside them, in vllm.log or sglang.log.",
        choices=ITERATION_STATS_FORMATS,
        value_aliases={"executor": "trtllm"},
        with_endpoint=False,
    )
    iteration_stats_every: int = _recording(
        1,
        "Write the statistics of every N-th iteration only, and of those that pause a request or are bound by "
        "another limit than the one before.",
        minimum=1,
        unit="iterations",
        with_endpoint=False,
    )
    enable_steady_state: bool = _recording(
        False,
        "Restrict every figure of summary.json to the steady state: the window after ramp-up and before drain.",
        aliases=("steady_state",),
    )
    profile: bool = _recording(
        False,
        "Record where each iteration's time goes, and report it beside what the device could do.",
        with_endpoint=False,
    )
    log_iteration_data: bool = _recording(
        False,
        "Print the statistics of each iteration to stderr, as JSON.",
        elsewhere="verbose log_stats log_requests",
        with_endpoint=False,
    )
    quiet: bool = _recording(False, "No progress on standard error; tables are printed.", is_common=True)
