"""`ifbbench explain-step`: its table, its JSON, and its errors."""

import json

import pytest
from click.testing import CliRunner

from ifbbench.build.engine import build_engine
from ifbbench.cli.main import main
from ifbbench.errors import InputError
from ifbbench.settings.names import from_mapping
from ifbbench.studies.explain import Step, duration, parse_step, scaled
from tests.simulated.batches import batch_of

STEP = ["llama-3.1-8b", "--dtype", "fp8", "--context", "512@0", "--generation", "64x2048"]


def _run(*arguments):
    return CliRunner().invoke(main, ["explain-step", *arguments])


def _explained(*arguments):
    result = _run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_the_table_names_operations_limits_and_totals():
    result = _run(*STEP, "--device", "sim:h100-sxm")

    assert result.exit_code == 0, result.output
    assert "llama-3.1-8b on NVIDIA H100 SXM 80 GB  weights fp8 · KV cache fp8" in result.output
    assert "512 context tokens (512@0) and 64 requests in generation (64 with 2,048 keys each)" in result.output
    for words in ("gate and up product", "generation attention", "8.59 GB", "compute", "memory", "total", "KV cache"):
        assert words in result.output
    assert "all-reduces" not in result.output
    assert "This batch takes 131,584 of these tokens" in result.output


def test_the_json_has_the_same_sums():
    found = _explained(*STEP, "--device", "h100-sxm")

    assert sum(operation["seconds"] for operation in found["operations"]) == pytest.approx(found["device_s"], rel=1e-6)
    assert found["work"]["context_tokens"] == 512
    assert found["work"]["generation_kv_tokens"] == 64 * 2048
    assert found["memory"]["step_tokens"] == 512 + 64 * 2048


def test_devices_can_be_written_with_and_without_prefix_and_options_with_dashes():
    with_prefix = _explained(*STEP, "--device", "sim:h100_sxm", "--tp_size", "2", "--kv_cache_dtype", "bf16")
    without = _explained(*STEP, "--device", "h100-sxm", "--tp-size", "2", "--kv-cache-dtype", "bf16")

    assert with_prefix == without
    assert without["tp_size"] == 2
    assert "all-reduces" in [operation["name"] for operation in without["operations"]]


def test_a_batch_that_does_not_fit_is_said_to():
    result = _run("llama-3.1-8b", "--device", "l4", "--generation", "64x8000")

    assert result.exit_code == 0, result.output
    assert "This batch does not fit: it takes 512,000 tokens of KV cache." in result.output


@pytest.mark.parametrize(
    ("windows", "kept"),
    [
        (["--max_attention_window", "1024"], 64 * 1024),
        (["--max_attention_window", "1024", "--window_mode", "linear"], 64 * 8015),
        (["--max_attention_window", "1024,99999"], 64 * (1024 + 8015) // 2),
        (["--max_attention_window", "99999999"], 64 * 8015),
    ],
)
def test_an_attention_window_makes_the_step_that_a_run_has(windows, kept):
    step = ["llama-3.1-8b", "--device", "h100-sxm", "--generation", "64x8015"]
    found = _explained(*step, *windows)
    settings = dict(zip((name.removeprefix("--") for name in windows[::2]), windows[1::2], strict=True))
    config = from_mapping({"model": step[0], "device": "sim:h100-sxm", "max_batch_size": 64, **settings})
    engine = build_engine(config)
    engine.executor.submit(batch_of([], [8015] * 64))
    engine.executor.collect()
    assert found["device_s"] + found["host_s"] == pytest.approx(engine.clock.now(), abs=1e-12)
    assert found["memory"]["step_tokens"] == kept


def test_a_window_limits_the_keys_of_a_chunk():
    step = ["llama-3.1-8b", "--device", "h100-sxm", "--context", "512@4096"]
    assert _explained(*step, "--max_attention_window", "1024")["work"]["context_kv_tokens"] == 1023 + 512
    assert _explained(*step, "--max_attention_window", "1024")["memory"]["step_tokens"] == 1024


def test_a_bad_window_is_refused():
    result = _run(*STEP, "--device", "h100-sxm", "--max_attention_window", "few")
    assert result.exit_code == 2
    assert "--max_attention_window: 'few' is not valid" in result.output


def test_the_host_of_an_engine_and_the_parts_of_a_ttft():
    alone = _explained(*STEP, "--device", "h100-sxm")
    found = _explained(*STEP, "--device", "h100-sxm", "--engine_overhead", "sglang", "--enable_trt_overlap")

    assert sum(found["host"].values()) == pytest.approx(found["host_s"], abs=1e-9)
    assert set(found["host"]) == {"iteration", "requests", "prompt tokens"}
    assert (alone["engine"], found["engine"]) == ("", "SGLang 0.5.1 to 0.5.8")
    assert found["device_s"] > alone["device_s"]
    parts = dict(found["ttft"])
    assert parts.pop("total") == pytest.approx(sum(parts.values()))
    assert parts["context"] + parts["generation beside it"] == pytest.approx(found["device_s"])
    assert parts["server: request in"] == pytest.approx(1e-3 + 512 * 1e-6)
    assert parts["iteration submitted before"] > 0
    # Without overlap and without a server there is less to wait for.
    assert set(alone["ttft"]) == {"rest of the iteration that runs", "host", "context", "generation beside it", "total"}


def test_a_step_without_a_prompt_has_no_ttft():
    assert _explained("llama-3.1-8b", "--device", "h100-sxm", "--generation", "4x100")["ttft"] == {}
    assert "TTFT" not in _run("llama-3.1-8b", "--device", "h100-sxm", "--generation", "4x100").output
    assert "iteration submitted before" in _run(*STEP, "--device", "h100-sxm", "--enable_trt_overlap").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny", "--generation", "1x1"], "--device: auto is not simulated; expected a hardware profile: a100-40gb"),
        (["tiny", "--device", "h100-sxn", "--generation", "1x1"], "Did you mean h100-sxm?"),
        (["big", "--device", "h100-sxm", "--generation", "1x1"], "'big' is neither a directory nor a"),
        (["tiny", "--device", "h100-sxm"], "a batch of 0 requests; expected 1 to 1,000,000"),
        (["tiny", "--device", "h100-sxm", "--context", "5@x"], "--context: '5@x' is not valid; expected LENGTH@START"),
        (["tiny", "--device", "h100-sxm", "--generation", "5"], "--generation: '5' is not valid; expected REQUESTSxL"),
        (["tiny", "--device", "a10g", "--dtype", "fp8", "--context", "5"], "has no matrix products in fp8"),
        (["llama-3.3-70b", "--device", "l4", "--context", "5"], "the model does not fit"),
    ],
)
def test_errors_are_one_line_without_traceback(arguments, message):
    result = _run(*arguments)

    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_parts_repeat_and_take_commas():
    assert parse_step(["512@0,128@1024", "7"], ["4x100, 2x50"]) == Step(
        chunks=((0, 512), (1024, 128), (0, 7)), groups=((4, 100), (2, 50))
    )


@pytest.mark.parametrize("text", ["0@0", "-1@0", "1@2@3", "1.5@0", "9999999999@0", ""])
def test_chunks_that_are_none_are_refused(text):
    with pytest.raises(InputError, match="--context"):
        parse_step([text], [])


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0.00 B"), (999.4, "999 B"), (999.6, "1.00 kB"), (65_536, "65.5 kB"), (1.5e15, "1.50 PB")]
)
def test_sizes_have_three_digits(value, text):
    assert scaled(value, "B") == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.5, "1.50 s"), (0.9999, "1.00 s"), (0.0123, "12.3 ms"), (5e-7, "0.50 µs")]
)
def test_times_have_three_digits(seconds, text):
    assert duration(seconds) == text
