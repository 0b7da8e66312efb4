"""The log of an SGLang server: its lines, and that calibration reads them back."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ifbbench.rundir.reader import load_run
from ifbbench.rundir.run_directory import SERVER_LOGS
from ifbbench.simulated.hardware import load_hardware, write_profile
from ifbbench.studies.engine_logs import is_vllm
from ifbbench.studies.log import Log
from ifbbench.studies.sglang_logs import is_sglang, read_sglang
from tests.replay.test_same_tokens import write_trace
from tests.report.test_vllm_log import lines_of, ran
from tests.studies.test_calibrate_from_logs import calibrated

RUN = (
    "run chat --engine sglang --device sim:h100-sxm --model llama-3.1-8b --max-total-tokens 20000 --time_scale 0"
    " --max_num_samples 60 --chunked-prefill-size 1024 --no_ignore_eos --schedule-conservativeness 0.02 --quiet"
    " --iteration_stats_format sglang --output"
)
SHORT_OF_CACHE = (
    "run {trace} --engine sglang --device sim:h100-sxm --model llama-3.1-8b --max-total-tokens 160 --page-size 8"
    " --chunked-prefill-size 32 --max_seq_len 96 --time_scale 0 --no_ignore_eos --schedule-conservativeness 0 --quiet"
    " --iteration_stats_format sglang --output"
)
PREFILL = re.compile(
    r"^\[[-\d]+ [:\d]+\] Prefill batch, #new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+), token usage: "
    r"([\d.]+), #running-req: (\d+), #queue-req: (\d+), #pending-token: (\d+), cuda graph: False, input throughput "
    r"\(token/s\): ([\d.]+)$",
    re.MULTILINE,
)
DECODE = re.compile(
    r"^\[[-\d]+ [:\d]+\] Decode batch, #running-req: (\d+), #token: (\d+), token usage: ([\d.]+), cuda graph: True, "
    r"gen throughput \(token/s\): ([\d.]+), #queue-req: (\d+)$",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with cut prompts."""
    path = tmp_path_factory.mktemp("sglang") / "run"
    ran(*RUN.split(), str(path))
    return path


def test_each_prefill_batch_and_each_40th_decode_batch_has_a_line(run: Path) -> None:
    text, rows = (run / SERVER_LOGS["sglang"]).read_text(), lines_of(run / "iterations.jsonl")
    prefills = [row for row in rows if row["Context Requests"]]
    found = PREFILL.findall(text)
    assert [(int(one[0]), int(one[1])) for one in found] == [
        (row["Context Requests"], row["Total Context Tokens"]) for row in prefills
    ]
    decodes = [row for row in rows if not row["Context Requests"]][39::40]
    assert [tuple(map(int, one[:2])) for one in DECODE.findall(text)] == [
        (row["Scheduled Requests"], row["Used KV cache blocks"]) for row in decodes
    ]
    assert len(text.splitlines()) == 1 + len(prefills) + len(decodes)
    # The tokens over the rates are the times between the lines, which add up.
    seconds = sum(int(one[1]) / float(one[7]) for one in found)
    last = prefills[-1]["ifbbench"]
    assert seconds == pytest.approx(
        last["start_s"] + last["latency_ms"] / 1000 - rows[0]["ifbbench"]["start_s"], rel=1e-4
    )


def test_waiting_tokens_are_those_of_the_queue_with_outputs_before_a_retraction(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.jsonl")
    run = tmp_path / "run"
    ran(*SHORT_OF_CACHE.format(trace=tmp_path / "trace.jsonl").split(), str(run))
    data, found = load_run(run), PREFILL.findall((run / SERVER_LOGS["sglang"]).read_text())
    assert data.iterations["pauses"].sum() > 0
    lengths = dict(zip(data.requests["request_id"], data.requests["prompt_len"], strict=True))
    rows = data.iterations[data.iterations["context_requests"] > 0]
    for one, number in zip(found, rows["iteration_counter"], strict=True):
        spans = data.spans[(data.spans["first_iteration"] <= number) & (number <= data.spans["last_iteration"])]
        queue = spans[spans["phase"].isin(["waiting", "paused"])]
        least = sum(lengths[request] for request in queue["request_id"])
        outputs = sum(
            data.spans[(data.spans["request_id"] == request) & (data.spans["last_iteration"] < number)][
                "produced"
            ].sum()
            for request in queue["request_id"]
        )
        cut = int(one[6]) - least - outputs
        assert 0 <= cut < max(lengths.values())


def test_calibration_finds_the_constants_of_the_run(tmp_path: Path) -> None:
    base = load_hardware("h100-sxm")
    constants = replace(base.constants, matmul=0.45, memory=0.6)
    write_profile(replace(base, constants=constants), tmp_path / "true.toml", "Known.")
    command = RUN.replace("sim:h100-sxm", f"sim:{tmp_path / 'true.toml'}").replace("--time_scale 0", "--concurrency 8")
    ran(*command.split(), str(tmp_path / "run"))
    calibrated(tmp_path / "run" / SERVER_LOGS["sglang"], tmp_path)
    fitted = load_hardware(str(tmp_path / "fitted.toml")).constants
    assert fitted.matmul == pytest.approx(0.45, rel=0.1)
    assert fitted.memory == pytest.approx(0.6, rel=0.1)


def read(text: str) -> Log:
    log = Log(Path("server.log"))
    read_sglang(log, text)
    return log


def test_lines_of_older_versions_are_read() -> None:
    decode = "[2025-09-01 10:00:0{}] Decode batch. #running-req: 4, #token: 400, token usage: 0.1, cuda graph: True, "
    lines = [decode.format(second) + "gen throughput (token/s): 400.00, #queue-req: 0" for second in range(2)]
    text = "\n".join(lines)
    assert is_sglang(text)
    assert not is_vllm(text)
    (one,) = read(text).observations
    assert one.seconds == pytest.approx(0.01)
    assert [(work.generation_tokens, work.generation_kv_tokens) for work, _ in one.steps] == [(4, 400)]
