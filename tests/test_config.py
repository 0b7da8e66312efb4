"""Settings: the values they take, in whatever words."""

import dataclasses

import pytest

from ifbbench.errors import InputError
from ifbbench.settings.config import RunConfig, settings
from ifbbench.settings.names import from_mapping, same_elsewhere, setting


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("type", "IFB", "inflight_fused"),
        ("type", "ifb", "inflight_fused"),
        ("type", "InflightFusedBatching", "inflight_fused"),
        ("type", "inflight-fused", "inflight_fused"),
        ("type", "UIFB", "inflight_unfused"),
        ("type", "inflightbatching", "inflight_unfused"),
        ("type", "inflight", "inflight_fused"),
        ("type", "V1", "v1"),
        ("type", "Static", "v1"),
        ("policy", "GUARANTEED_NO_EVICT", "guaranteed_no_evict"),
        ("policy", "Max-Utilization", "max_utilization"),
        ("policy", "Package.Module:ClassName", "Package.Module:ClassName"),
        ("policy", "Somebodys-Own", "Somebodys-Own"),
        ("early_stopping", "NEVER", "never"),
        ("device", "CPU", "cpu"),
    ],
)
def test_choices_in_other_words(name, given, taken):
    assert setting(name).check(given) == taken
    assert getattr(RunConfig(**{name: given}), name) == taken


def test_every_other_word_means_a_choice():
    for each in settings():
        assert set(each.value_aliases.values()) <= set(each.choices)


def test_no_name_means_two_settings():
    names = [name for each in settings() for name in (each.name, *each.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("each", settings(), ids=lambda each: each.name)
def test_defaults_are_valid(each):
    assert each.check(each.default) == each.default


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("enable_block_reuse", "true", True),
        ("enable_partial_reuse", "0", False),
        ("copy_on_partial_reuse", False, False),
        ("max_attention_window", 128, "128"),
        ("max_attention_window", "512,1024", "512,1024"),
        ("sink_token_length", "4", 4),
        ("window_mode", "LINEAR", "linear"),
        ("host_cache_size", 2**30, 2**30),
        ("kv_cache_dtype", "FP8", "fp8"),
        ("kv_cache_type", "Contiguous", "contiguous"),
    ],
)
def test_settings_of_the_cache(name, given, taken):
    assert from_mapping({name: given}) == RunConfig(**{setting(name).name: taken})


@pytest.mark.parametrize(("name", "value"), [("enable_block_reuse", "False"), ("host_cache_size", "0")])
def test_a_default_may_come_as_text(name, value):
    assert from_mapping({name: value}) == RunConfig()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_batch_size", True, "an integer"),
        ("max_batch_size", 8.5, "an integer"),
        ("temperature", True, "a finite number"),
        ("quiet", 7, "true or false"),
        ("quiet", 1, "true or false"),
        ("enable_chunked_context", 0.5, "true or false"),
        ("enable_chunked_context", "perhaps", "true or false"),
        ("output", True, "a text"),
        ("type", True, "one of v1"),
    ],
)
def test_a_value_of_another_type_is_refused(name, value, expected):
    with pytest.raises(InputError, match=rf"--{name} is {value!r}; expected {expected}"):
        RunConfig(**{name: value})


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("h100-sxm", "sim:h100-sxm"),
        ("H100_SXM", "sim:H100_SXM"),
        ("h100", "sim:h100-sxm"),
        ("sim:A100", "sim:a100-80gb-sxm"),
        ("rtx", "sim:rtx"),  # refused with the names that there are, where the profile is read
        ("my/own.toml", "sim:my/own.toml"),
        ("sim:h100-sxm", "sim:h100-sxm"),
        ("cpu", "cpu"),
    ],
)
def test_a_hardware_profile_is_a_simulated_device(given, taken):
    assert RunConfig(device=given).device == taken


def test_names_of_other_systems_are_suggested_and_mean_one_setting():
    names = {name for each in settings() for name in (each.name, *each.aliases)}
    elsewhere = [word for each in settings() for word in (*each.elsewhere.split(), *each.opposites.split())]
    assert len(elsewhere) == len(set(elsewhere))
    assert not names & set(elsewhere)
    assert same_elsewhere("parallel") == "max_batch_size"
    assert same_elsewhere("max_batch_size") is None
    with pytest.raises(InputError, match=r"'n-batch' is not a setting\. Did you mean max_num_tokens\?"):
        setting("n-batch")


def test_a_copy_with_other_values_is_checked_as_the_original():
    config = RunConfig(device="null", max_batch_size=4)
    changed = config.with_values(max_batch_size="7", engine="vllm")
    assert changed == dataclasses.replace(config, max_batch_size=7, engine="vllm")
    assert (config.max_batch_size, config.engine, changed.max_batch_size) == (4, "trtllm", 7)
    with pytest.raises(InputError, match="--max_batch_size"):
        config.with_values(max_batch_size=0)
    with pytest.raises(TypeError, match="no settings of a run: batch"):
        config.with_values(batch=7)
