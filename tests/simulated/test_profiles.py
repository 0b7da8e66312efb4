"""Hardware profiles and built-in models: plausible values, and the errors for unknown names and invalid files."""

import json
from dataclasses import replace

import pytest

from ifbbench.build.engine import build_engine
from ifbbench.errors import InputError
from ifbbench.models.layers import Mixer, Mlp
from ifbbench.models.named_models import OTHER_NAMES, built_in_models, load_model_config, published_shape
from ifbbench.models.quantization import quantization_of
from ifbbench.settings.config import RunConfig
from ifbbench.settings.devices import HARDWARE_PROFILES
from ifbbench.simulated.cost_model import CostModel
from ifbbench.simulated.hardware import hardware_names, load_hardware
from ifbbench.simulated.shard import Shard

WANTED_HARDWARE = {
    "h100-sxm",
    "h200-sxm",
    "a100-80gb-sxm",
    "a100-40gb",
    "l40s",
    "l4",
    "a10g",
    "b200",
    "rtx-4090",
    "rtx-pro-6000",
    "b300",
    "gb200",
    "gb300",
    "h20",
    "mi300x",
    "mi325x",
    "mi355x",
    "cpu",
}
# As their makers publish them, in billions.
PUBLISHED_PARAMETERS = {
    "llama-3.1-8b": 8.03,
    "llama-3-8b": 8.03,
    "llama-3.3-70b": 70.55,
    "llama-3.1-405b": 405.85,
    "llama-2-7b": 6.74,
    "qwen3-0.6b": 0.596,
    "qwen2.5-7b": 7.616,
    "qwen3-32b": 32.76,
    "mistral-7b": 7.248,
    "mixtral-8x7b": 46.7,
    "qwen3-30b-a3b": 30.53,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
    "deepseek-r1": 671.0,
    "deepseek-v3": 671.0,
    "kimi-k2": 1026.4,
    "qwen3-235b-a22b": 235.1,
    "qwen3-next-80b-a3b": 79.67,
    "llama-4-scout": 107.77,
    "llama-4-maverick": 400.7,
    "glm-4.5": 352.8,
    "minimax-m2": 228.7,
    "gemma-3-27b": 27.01,
    "qwen3-4b": 4.022,
    "qwen3-8b": 8.191,
    "qwen3-14b": 14.768,
    "qwen3-coder-480b-a35b": 480.15,
    "glm-4.5-air": 106.85,
    "glm-4.6": 352.8,
    "kimi-k2.5": 1026.4,
}
# By their model cards, rounded: all, and those that a token uses. Scout's 109 include vision, GLM's 355 its layer for
# multi-token prediction.
PUBLISHED_ROUNDED = {
    "deepseek-r1": (671, 37),
    "kimi-k2": (1000, 32),
    "qwen3-235b-a22b": (235, 22),
    "qwen3-next-80b-a3b": (80, 3.9),
    "llama-4-scout": (109, 17),
    "llama-4-maverick": (400, 17),
    "glm-4.5": (355, 32),
    "minimax-m2": (230, 10),
    "gemma-3-27b": (27, 27),
    "gpt-oss-120b": (117, 5.1),
    "qwen3-coder-480b-a35b": (480, 35),
    "glm-4.5-air": (106, 12),
    "kimi-k2.5": (1000, 32),
}
SHARES = ("matmul", "matmul_fp8", "context_attention", "memory", "generation_attention", "network")


def test_every_wanted_profile_is_built_in():
    assert set(hardware_names()) >= WANTED_HARDWARE


@pytest.mark.parametrize("name", sorted(WANTED_HARDWARE))
def test_profile_is_sane(name):
    profile = load_hardware(name)

    assert profile.memory_bytes > 2**30
    assert profile.memory_bandwidth > 1e9
    assert profile.peak_flops["bf16"] == profile.peak_flops["fp16"]
    assert profile.peak_flops["bf16"] >= profile.peak_flops["float32"]
    assert all(0 < getattr(profile.constants, share) <= 1 for share in SHARES)
    assert profile.is_cpu == (name == "cpu")


@pytest.mark.parametrize("name", sorted(WANTED_HARDWARE))
def test_profile_says_where_its_figures_come_from(name):
    assert (HARDWARE_PROFILES / f"{name}.toml").read_text(encoding="utf-8").startswith("# ")


def test_gpus_of_a_generation_share_their_constants():
    assert load_hardware("h100-sxm").constants is not None
    assert load_hardware("h100-sxm").constants == load_hardware("h200-sxm").constants
    assert load_hardware("h100-sxm").constants != load_hardware("a100-80gb-sxm").constants


def test_a_profile_with_more_words_is_near_the_one_that_it_begins_with():
    with pytest.raises(InputError, match=r"Did you mean b200\?"):
        load_hardware("b200-sxm")


def test_names_are_taken_as_people_write_them():
    assert load_hardware("sim:H100_SXM") == load_hardware("h100-sxm")


def test_an_unknown_profile_is_refused_with_the_names_and_the_near_one():
    with pytest.raises(InputError, match=r"'h100'.*a100-40gb.*rtx-4090.*Did you mean h100-sxm\?"):
        load_hardware("h100")


@pytest.mark.parametrize("name", ["a100-80gb-sxm", "a10g"])
def test_ampere_multiplies_no_8_bits(name):
    with pytest.raises(InputError, match="no matrix products in fp8; choose one of bf16"):
        load_hardware(name).check_dtype("fp8")
    load_hardware(name).check_dtype("int4")


def test_a_profile_of_ones_own_may_replace_constants(tmp_path):
    text = (HARDWARE_PROFILES / "h100-sxm.toml").read_text(encoding="utf-8")
    path = tmp_path / "mine.toml"
    path.write_text(f"{text}\n[constants]\nmemory = 0.5\n\n[calibration]\nmedian_error = 0.03\n", encoding="utf-8")

    profile = load_hardware(str(path))

    assert profile.name == "mine"
    assert profile.constants.memory == 0.5
    assert profile.constants.matmul == load_hardware("h100-sxm").constants.matmul
    assert profile.calibration == {"median_error": 0.03}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_bandwidth = 3.352e12", "memory_bandwidth = 0", r"memory_bandwidth is 0; expected a finite number abo"),
        ("memory_bandwidth = 3.352e12", "", r"memory_bandwidth is missing"),
        ('architecture = "hopper"', 'architecture = "volta"', r"architecture is 'volta'; expected one of ada, "),
        ("[peak_flops]", "[constants]\nspeed = 1\n[peak_flops]", r"constants has an unknown key 'speed'; expected m"),
        ("[peak_flops]", "[peak_flops", r"cannot be read as TOML"),
        ("bf16 = 9.894e14", "bf16 = true", r"peak_flops\.bf16 is True"),
    ],
)
def test_a_bad_profile_is_refused_by_file_and_key(tmp_path, old, new, message):
    text = (HARDWARE_PROFILES / "h100-sxm.toml").read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "bad.toml"
    path.write_text(text.replace(old, new), encoding="utf-8")

    with pytest.raises(InputError, match=rf"bad\.toml: .*{message}"):
        load_hardware(str(path))


@pytest.mark.parametrize(("name", "billions"), PUBLISHED_PARAMETERS.items())
def test_built_in_shapes_have_the_published_parameters(name, billions):
    assert load_model_config(name).num_parameters / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize(("name", "published"), PUBLISHED_ROUNDED.items())
def test_parameters_are_those_of_the_model_cards(name, published):
    model = load_model_config(name)

    assert model.num_parameters / 1e9 == pytest.approx(published[0], rel=0.03)
    assert model.active_parameters / 1e9 == pytest.approx(published[1], rel=0.12)


def test_all_built_in_shapes_are_covered():
    assert set(built_in_models()) == {"tiny", "tiny-mla", *PUBLISHED_PARAMETERS}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-r1"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "llama-3.3-70b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", None),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", "qwen3-8b"),
        ("deepseek-ai/DeepSeek-V3.1-Terminus", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-V3.2", None),
        ("zai-org/GLM-4.5-Air-FP8", "glm-4.5-air"),
        ("zai-org/GLM-4.7", "glm-4.6"),
        ("zai-org/GLM-4.7-Flash", None),
        ("moonshotai/Kimi-K2-Instruct-0905", "kimi-k2"),
        ("moonshotai/Kimi-K2-Thinking", "kimi-k2.5"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-30b-a3b"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "llama-3.3-70b"),
        ("MiniMaxAI/MiniMax-M2.5", "minimax-m2"),
        ("MiniMaxAI/MiniMax-M3", None),
    ],
)
def test_a_published_name_is_that_of_its_own_shape(name, shape):
    assert published_shape(name) == shape


def test_other_names_are_those_of_built_in_shapes():
    assert {shape for shape in OTHER_NAMES.values() if shape is not None} <= set(built_in_models())
    assert set(OTHER_NAMES).isdisjoint(built_in_models())


def test_weights_of_kimi_k2_thinking_have_four_bits():
    found = quantization_of("moonshotai/Kimi-K2-Thinking")
    assert found is not None
    assert found.dtype == "int4"


def test_only_the_experts_of_kimi_k2_thinking_have_four_bits():
    """Its files have 594 GB (huggingface.co/moonshotai/Kimi-K2-Thinking)."""
    model = load_model_config("moonshotai/Kimi-K2-Thinking")
    shard = Shard(model, "int4", "bf16")
    assert shard.parameter_bytes == pytest.approx(594e9, rel=0.001)
    assert {part: shard.dtype_of(part) for part in (Mixer.ATTENTION, Mlp.DENSE, Mlp.SHARED, Mlp.EXPERTS)} == {
        Mixer.ATTENTION: "bf16",
        Mlp.DENSE: "bf16",
        Mlp.SHARED: "bf16",
        Mlp.EXPERTS: "int4",
    }
    named = {one.name: one.bytes for one in CostModel(shard, load_hardware("b300")).of_tokens(1)}
    all_int4 = replace(shard, model=replace(model, unquantized=()))
    other = {one.name: one.bytes for one in CostModel(all_int4, load_hardware("b300")).of_tokens(1)}
    assert named["shared expert down"] == pytest.approx(other["shared expert down"] * 2 / (0.5 + 2 / 32), rel=0.01)
    assert named["expert down product"] == other["expert down product"]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("llama-4", r"Did you mean llama-4-maverick, llama-4-scout\?"),
        ("qwen3-235b", r"Did you mean qwen3-235b-a22b\?"),
        ("/models/deepseek-r1", r"For the built-in shape of that name, give deepseek-r1\."),
    ],
)
def test_the_error_for_a_model_names_those_that_may_be_meant(name, nearest):
    with pytest.raises(InputError, match=nearest):
        load_model_config(name)


def test_bytes_of_a_token_in_the_kv_cache():
    assert load_model_config("llama-3.1-8b").kv_bytes_per_token(1) == 65_536
    assert load_model_config("qwen3-0.6b").kv_bytes_per_token(2) == 2 * 28 * 8 * 128 * 2


def test_a_mixture_of_experts_runs_on_simulated_devices_only(tmp_path):
    values = {
        "model_type": "mixtral",
        "vocab_size": 100,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "quantization_config": {},
    }
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    model = load_model_config(tmp_path)

    assert (model.num_experts, model.experts_per_token, model.intermediate_size) == (4, 2, 16)
    assert build_engine(RunConfig(device="sim:h100-sxm", model=str(tmp_path))).model == model
    with pytest.raises(InputError, match="has layers that run on simulated devices only"):
        build_engine(RunConfig(device="cpu", model=str(tmp_path)))


def test_llama_3_is_llama_3_1_with_fewer_positions():
    assert load_model_config("llama-3-8b").max_position_embeddings == 8192
    assert load_model_config("llama-3.1-8b").max_position_embeddings == 131_072


def test_an_unknown_model_is_refused_with_the_names_and_the_near_one():
    with pytest.raises(InputError, match=r"'llama-3.1-7b'.*tiny, .*tiny-mla\. Did you mean llama-3.1-8b\?"):
        load_model_config("llama-3.1-7b")


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_a_config_file_of_ones_own(tmp_path, model_type):
    values = {
        "model_type": model_type,
        "vocab_size": 1000,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 128,
        "max_position_embeddings": 512,
    }
    path = tmp_path / "shape.json"
    path.write_text(json.dumps(values), encoding="utf-8")

    shape = load_model_config(path)

    assert shape.query_key_norm == (model_type == "qwen3")
    products = 64 * (128 + 2 * 64) + 128 * 64 + 3 * 64 * 128
    extra = 128 + 2 * 64 if model_type == "qwen2" else 2 * 32
    assert shape.num_parameters == 2 * (products + 2 * 64 + extra) + 2 * 1000 * 64 + 64
