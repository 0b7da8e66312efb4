"""Settings: the values they take, in whatever words, and those that are not built yet."""

import pytest

from ifbbench.config import RunConfig, from_mapping, setting, settings
from ifbbench.errors import InputError


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("type", "IFB", "inflight_fused"),
        ("type", "ifb", "inflight_fused"),
        ("type", "InflightFusedBatching", "inflight_fused"),
        ("type", "inflight-fused", "inflight_fused"),
        ("type", "UIFB", "inflight"),
        ("type", "inflightbatching", "inflight"),
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


UNAVAILABLE = [each for each in settings() if each.unavailable]


def test_what_is_not_built_yet():
    names = ["enable_kv_cache_reuse", "max_attention_window", "sink_token_len", "kv_host_cache_bytes"]
    assert [each.name for each in UNAVAILABLE] == names


@pytest.mark.parametrize("each", UNAVAILABLE, ids=lambda each: each.name)
@pytest.mark.parametrize("value", ["1", "512,1024", "on"])
def test_a_setting_that_is_not_built_yet_takes_its_default_alone(each, value):
    with pytest.raises(InputError, match=f"--{each.name}: '{value}' asks for {each.unavailable}, which is not built"):
        each.check(value)
    assert from_mapping({each.name: each.default}) == RunConfig()


@pytest.mark.parametrize(("name", "value"), [("enable_block_reuse", "False"), ("host_cache_size", "0")])
def test_a_default_may_come_as_text(name, value):
    assert from_mapping({name: value}) == RunConfig()
