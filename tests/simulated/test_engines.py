"""Engine overheads: their files, what they change in a prediction, and the serving process."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from ifbbench.errors import InputError
from ifbbench.models.named_models import load_model_config
from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig
from ifbbench.settings.devices import ENGINE_OVERHEADS
from ifbbench.simulated.engines import load_overhead, overhead_names
from ifbbench.simulated.hardware import load_hardware
from ifbbench.simulated.shard import Shard, kv_memory_bytes

NAMES = overhead_names()


@pytest.fixture(autouse=True)
def _files_are_read_again():
    load_overhead.cache_clear()


def _run(tmp_path, name="run", prompt_len=512, output_len=32, requests=8, **settings):
    """Summary and requests of a simulated run."""
    trace = tmp_path / f"{name}.jsonl"
    row = {"arrival_s": 0.0, "prompt_len": prompt_len, "output_len": output_len, "max_new_tokens": output_len}
    trace.write_text("".join(json.dumps({"request_id": index, **row}) + "\n" for index in range(requests)))
    config = RunConfig(device="sim:h100-sxm", model="llama-3.1-8b", output=str(tmp_path / name), quiet=True, **settings)
    summary = run_trace(str(trace), config).summary
    lines = (tmp_path / name / "requests.jsonl").read_text().splitlines()
    return summary, sorted((json.loads(line) for line in lines), key=lambda request: request["request_id"])


def _overhead_file(tmp_path, **times):
    names = (
        "iteration_s",
        "request_s",
        "prompt_token_s",
        "serving_request_s",
        "serving_token_in_s",
        "serving_token_out_s",
        "context_s",
    )
    values = dict.fromkeys(names, 0.0) | times
    path = tmp_path / "mine.toml"
    lines = [f"{name} = {value}" for name, value in values.items()]
    path.write_text("\n".join(['title = "Mine"', 'version = "1"', 'kv_share_of = "free"', *lines]))
    return str(path)


@pytest.mark.parametrize("name", NAMES)
def test_every_engine_says_where_its_figures_come_from_and_has_settings_of_a_run(name):
    overhead = load_overhead(name)

    assert (ENGINE_OVERHEADS / f"{name}.toml").read_text(encoding="utf-8").startswith("# ")
    assert overhead.settings
    RunConfig().with_values(**overhead.settings)
    assert overhead.applied_to(load_hardware("h100-sxm"), "bf16").constants.kernel_s >= 1.5e-6


def test_attention_over_a_cache_of_8_bits_has_a_share_of_its_own():
    hardware = load_hardware("h100-sxm")
    of = {dtype: load_overhead("vllm").applied_to(hardware, dtype).constants for dtype in ("bf16", "fp8")}

    assert of["bf16"].generation_attention == hardware.constants.generation_attention
    assert of["fp8"].generation_attention == 0.72


def test_constants_of_an_architecture_are_replaced(tmp_path):
    path = Path(_overhead_file(tmp_path))
    path.write_text(path.read_text() + "\n[factors]\nkernel_s = 2\n[constants.hopper]\nexperts_memory = 0.5\n")
    hopper, ampere = load_hardware("h100-sxm"), load_hardware("a100-40gb")
    of_hopper, of_ampere = (load_overhead(str(path)).applied_to(one, "bf16").constants for one in (hopper, ampere))

    assert of_hopper == replace(hopper.constants, kernel_s=2 * hopper.constants.kernel_s, experts_memory=0.5)
    assert of_ampere == replace(ampere.constants, kernel_s=2 * ampere.constants.kernel_s)


def test_constants_of_weights_in_a_data_type_replace_those_of_the_architecture(tmp_path):
    path = Path(_overhead_file(tmp_path))
    path.write_text(
        path.read_text()
        + "\n[constants.hopper]\nexperts = 0.5\nexperts_memory = 0.5\n"
        + "[constants.hopper.bf16]\nexperts = 0.25\nlisted_row_s = 0\n"
    )
    hopper, overhead = load_hardware("h100-sxm"), load_overhead(str(path))
    of = {dtype: overhead.applied_to(hopper, "bf16", dtype).constants for dtype in ("bf16", "fp8")}

    assert of["fp8"] == replace(hopper.constants, experts=0.5, experts_memory=0.5)
    assert of["bf16"] == replace(hopper.constants, experts=0.25, experts_memory=0.5)


def test_only_earlier_versions_of_tensorrt_llm_quantize_slowly_and_only_on_blackwell():
    names = {"tensorrt-llm": 0.0, "tensorrt-llm-1.2": 8.9e-12, "tensorrt-llm-1.1": 8.9e-12}
    of = {
        gpu: {name: load_overhead(name).applied_to(load_hardware(gpu), "fp8").constants.quantize_s for name in names}
        for gpu in ("b200", "h200-sxm")
    }
    assert of == {"b200": names, "h200-sxm": dict.fromkeys(names, 0.0)}


def test_kernels_of_experts_are_tuned_for_some_shapes(tmp_path):
    path = Path(_overhead_file(tmp_path))
    path.write_text(
        path.read_text()
        + "\n[constants.hopper.bf16]\nexperts = 0.25\n"
        + "[constants.hopper.bf16.tuned]\nshapes = [[8, 14336]]\nexperts = 0.5\n"
    )
    hopper, overhead = load_hardware("h100-sxm"), load_overhead(str(path))
    of = {
        shape: overhead.applied_to(hopper, "bf16", "bf16", shape).constants.experts
        for shape in ((8, 14336), (8, 7168), None)
    }
    assert of == {(8, 14336): 0.5, (8, 7168): 0.25, None: 0.25}
    assert overhead.applied_to(hopper, "bf16", "fp8", (8, 14336)).constants == hopper.constants


@pytest.mark.parametrize("shapes", ["8", "[[8]]", "[[8, 0]]", "[[8, 1.5]]"])
def test_shapes_of_tuned_kernels_are_checked(shapes, tmp_path):
    path = Path(_overhead_file(tmp_path))
    path.write_text(path.read_text() + f"\n[constants.hopper.bf16.tuned]\nshapes = {shapes}\n")
    with pytest.raises(InputError, match=r"constants\.hopper\.bf16\.tuned\.shapes is .*a list of \[experts"):
        load_overhead(str(path))


def test_sglang_has_tuned_kernels_for_mixtral_but_not_for_deepseek():
    shapes = {
        name: Shard(load_model_config(name), "bf16", "bf16", tp_size=size).expert_shape
        for name, size in (("mixtral-8x7b", 2), ("qwen3-235b-a22b", 4), ("deepseek-r1", 8), ("llama-3.1-8b", 1))
    }
    tuned = load_overhead("sglang").tuned_experts["hopper"]["bf16"].shapes
    assert {name for name, shape in shapes.items() if shape in tuned} == {"mixtral-8x7b", "qwen3-235b-a22b"}


@pytest.mark.parametrize(
    ("calibration", "iteration_s"),
    [({"determined": ["kernel_s"]}, 5e-5), ({"determined": ["host_iteration_s"]}, 1e-3), ({"model": "tiny"}, 1e-3)],
)
def test_a_calibrated_profile_keeps_what_was_measured_under_an_engine(calibration, iteration_s):
    measured = replace(load_hardware("h100-sxm"), host_iteration_s=1e-3, calibration=calibration)
    applied = load_overhead("vllm").applied_to(measured, "fp8")

    assert applied.constants == measured.constants
    assert applied.host_iteration_s == iteration_s


def test_an_unknown_engine_is_refused_with_the_names_and_the_near_one():
    with pytest.raises(InputError, match=r"'vlm'; expected one of sglang.* Did you mean vllm\?"):
        load_overhead("vlm")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("iteration_s = 0.0", "iteration_s = -1", "iteration_s is -1"),
        ('kv_share_of = "free"', 'kv_share_of = "all"', "kv_share_of is 'all'; expected one of free, total"),
        ('version = "1"', 'versoin = "1"', "unknown key 'versoin'"),
        ('title = "Mine"', "title = ", "cannot be read as TOML"),
    ],
)
def test_a_bad_file_is_refused_by_file_and_key(tmp_path, old, new, message):
    path = _overhead_file(tmp_path)
    with open(path, encoding="utf-8") as file:
        text = file.read()
    assert old in text
    bad = tmp_path / "bad.toml"
    bad.write_text(text.replace(old, new))

    with pytest.raises(InputError, match=rf"bad\.toml: .*{message}"):
        load_overhead(str(bad))


def test_without_an_engine_a_run_is_that_of_the_batch_manager(tmp_path):
    alone, _ = _run(tmp_path, "alone")
    nothing, _ = _run(tmp_path, "nothing", engine_overhead=_overhead_file(tmp_path, iteration_s=5e-4, request_s=2.5e-6))

    assert alone == nothing | {"expected_error": alone["expected_error"]}


def test_the_serving_process_adds_to_the_first_token_and_not_to_later_ones(tmp_path):
    without, _ = _run(tmp_path, "without", requests=1, engine_overhead=_overhead_file(tmp_path))
    load_overhead.cache_clear()
    path = _overhead_file(tmp_path, serving_request_s=0.01, serving_token_in_s=1e-5, serving_token_out_s=1e-4)
    with_server, _ = _run(tmp_path, "with", requests=1, engine_overhead=path)

    added = with_server["ttft_s"]["mean"] - without["ttft_s"]["mean"]
    assert added == pytest.approx(0.01 + 512e-5 + 1e-4, abs=1e-8)
    assert with_server["itl_s"]["mean"] == pytest.approx(without["itl_s"]["mean"], rel=1e-6)
    assert with_server["queue_time_s"]["mean"] - without["queue_time_s"]["mean"] == pytest.approx(0.01512, abs=1e-8)


def test_a_serving_process_that_is_too_slow_bounds_the_throughput(tmp_path):
    path = _overhead_file(tmp_path, serving_token_out_s=1e-3)
    summary, _ = _run(tmp_path, requests=64, output_len=64, concurrency=32, engine_overhead=path)

    assert 700 < summary["output_throughput_tokens_per_s"] < 1000


def test_a_client_of_a_closed_loop_returns_when_its_tokens_have_been_delivered(tmp_path):
    path = _overhead_file(tmp_path, serving_token_out_s=1e-3)
    _, requests = _run(tmp_path, requests=3, concurrency=1, engine_overhead=path)

    for before, after in pairwise(requests):
        assert after["arrival_s"] == pytest.approx(before["arrival_s"] + before["e2e_s"], abs=1e-9)


@pytest.mark.parametrize("load", [{"concurrency": 3}, {"request_rate": 40.0}, {"request_rate": 400.0}])
def test_iterations_advanced_together_and_one_by_one_are_equal(tmp_path, load, monkeypatch):
    """With a serving process too, whose work overlaps with iterations and arrivals."""
    path = _overhead_file(tmp_path, serving_request_s=0.004, serving_token_in_s=1e-6, serving_token_out_s=3e-4)
    together = _run(tmp_path, "together", requests=20, engine_overhead=path, **load)
    monkeypatch.setattr("ifbbench.schedulers.tensorrt_llm.repetition.RepeatingScheduler.horizon", lambda *_: 0)
    one_by_one = _run(tmp_path, "single", requests=20, engine_overhead=path, **load)

    assert together[0]["schedule_digest"] == one_by_one[0]["schedule_digest"]
    for left, right in zip(together[1], one_by_one[1], strict=True):
        assert left["ttft_s"] == right["ttft_s"]
        assert left["e2e_s"] == right["e2e_s"]


def test_a_share_of_all_memory_leaves_less_for_the_cache():
    model, hardware = load_model_config("llama-3.1-8b"), load_hardware("h100-sxm")
    config = RunConfig(device="sim:h100-sxm", dtype="bf16", max_batch_size=64, kv_cache_free_gpu_mem_fraction=0.9)
    of_free, of_total = (
        kv_memory_bytes(model, hardware, config.with_values(engine_overhead=name)) for name in ("tensorrt-llm", "vllm")
    )

    assert of_free == kv_memory_bytes(model, hardware, config) > of_total
    assert of_free - of_total == pytest.approx(0.1 * (hardware.memory_bytes - of_free / 0.9), rel=1e-6)


def test_a_model_that_leaves_no_share_for_the_cache_is_refused():
    model, hardware = load_model_config("qwen3-32b"), load_hardware("h100-sxm")
    config = RunConfig(
        device="sim:h100-sxm",
        dtype="bf16",
        max_batch_size=64,
        kv_cache_free_gpu_mem_fraction=0.7,
        engine_overhead="vllm",
    )
    with pytest.raises(InputError, match="--kv_cache_free_gpu_mem_fraction"):
        kv_memory_bytes(model, hardware, config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"device": "null"}, "only simulated devices have"), ({"static_emulated_batch_size": 2}, "without a server")],
)
def test_what_does_not_fit_together_is_refused(tmp_path, settings, message):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"request_id": 0, "arrival_s": 0, "prompt_len": 8, "output_len": 2, "max_new_tokens": 2}\n')
    config = RunConfig(output=str(tmp_path / "run"), engine_overhead="vllm", **{"device": "sim:h100-sxm"} | settings)
    with pytest.raises(InputError, match=message):
        run_trace(str(trace), config)


def test_an_engine_may_take_longer_for_iterations_with_context(tmp_path):
    hardware = load_hardware("h100-sxm")
    with_context = load_overhead(_overhead_file(tmp_path, context_s=0.003)).applied_to(hardware, "bf16")
    assert with_context.constants.context_s == hardware.constants.context_s + 0.003

    path = tmp_path / "mine.toml"
    path.write_text(path.read_text().replace("context_s = 0.003\n", "").replace("context_s = 0.003", ""))
    without = tmp_path / "without.toml"
    path.rename(without)
    assert load_overhead(str(without)).context_s == 0
