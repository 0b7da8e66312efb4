"""Workload specifications as files."""

import pytest
import yaml

from ifbbench.errors import InputError
from ifbbench.workload.arrivals import AllAtOnce, Gamma
from ifbbench.workload.bundled import bundled_path
from ifbbench.workload.distributions import Fixed, Quantiles, Uniform
from ifbbench.workload.spec import WorkloadSpec, draw_trace
from ifbbench.workload.spec_file import parse_spec, read_spec
from ifbbench.workload.statistics import trace_statistics

MINIMAL = {
    "num_requests": 3,
    "prompt_len": {"distribution": "fixed", "value": 4},
    "output_len": {"distribution": "uniform", "min": 1, "max": 2},
}


def test_minimal_specification():
    assert parse_spec(MINIMAL, "mine") == WorkloadSpec("mine", 3, Fixed(4), Uniform(1, 2), AllAtOnce(), "actual")


def test_yaml_and_toml_say_the_same(tmp_path):
    as_yaml, as_toml = tmp_path / "w.yaml", tmp_path / "w.toml"
    as_yaml.write_text(
        "num_requests: 3\nreserve: factor:2\n"
        "prompt_len: {distribution: quantiles, p0: 1, p99.9: 8, p100: 9}\n"
        "output_len: {distribution: fixed, value: 2}\narrival: {process: gamma, rate: 2, cv: 3}\n"
    )
    as_toml.write_text(
        'num_requests = 3\nreserve = "factor:2"\n'
        'prompt_len = {distribution = "quantiles", p100 = 9, p0 = 1, "p99.9" = 8}\n'
        'output_len = {distribution = "fixed", value = 2}\narrival = {process = "gamma", rate = 2, cv = 3}\n'
    )
    expected = WorkloadSpec("w", 3, Quantiles(((0, 1), (99.9, 8), (100, 9))), Fixed(2), Gamma(2, 3), "factor:2")
    assert read_spec(as_yaml) == read_spec(as_toml) == expected


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_requests": 0}, "num_requests 0 is below 1"),
        ({"num_requests": 2.0}, "num_requests is 2.0; expected an integer"),
        ({"num_requests": True}, "num_requests is True; expected an integer"),
        ({"name": 3}, "name is 3"),
        ({"reserve": "double"}, "reserve 'double' is not valid"),
        ({"reserve": 2}, "reserve is 2; expected a text"),
        ({"speed": 1}, "unknown key 'speed'; expected name, num_requests"),
        ({"prompt_len": 7}, "prompt_len is 7; expected keys and values"),
        ({"prompt_len": {"distribution": "zipf"}}, "prompt_len.distribution is 'zipf'; expected one of fixed, normal"),
        ({"prompt_len": {"distribution": ["fixed"]}}, "prompt_len.distribution is ['fixed']"),
        ({"prompt_len": {"distribution": "fixed"}}, "prompt_len has no key 'value'"),
        ({"prompt_len": {"distribution": "fixed", "value": 1.5}}, "prompt_len.value is 1.5; expected an integer"),
        ({"prompt_len": {"distribution": "fixed", "value": 0}}, "prompt_len: value 0 is below 1"),
        ({"prompt_len": {"distribution": "fixed", "value": 1, "mean": 2}}, "prompt_len has an unknown key 'mean'"),
        ({"output_len": {"distribution": "uniform", "min": 5, "max": 4}}, "output_len: max 4 is below min 5"),
        ({"output_len": {"distribution": "normal", "mean": 0, "stdev": 1}}, "output_len: mean 0 is not above 0"),
        ({"output_len": {"distribution": "normal", "mean": 1, "stdev": -1}}, "output_len: stdev -1 is negative"),
        ({"output_len": {"distribution": "normal", "mean": ".nan", "stdev": 1}}, "output_len.mean is '.nan'"),
        ({"output_len": {"distribution": "lognormal", "median": 9, "mean": 8}}, "output_len: mean 8 is below median 9"),
        ({"output_len": {"distribution": "quantiles", "p0": 1, "p50": 2}}, "do not go from p0 to p100"),
        ({"output_len": {"distribution": "quantiles", "p0": 3, "p100": 2}}, "a higher quantile is below a lower one"),
        ({"output_len": {"distribution": "quantiles", "p0": 0, "p100": 2}}, "p0 0 is below 1"),
        ({"output_len": {"distribution": "quantiles", "mode": 1}}, "output_len.mode is not known"),
        ({"arrival": {"process": "poisson"}}, "arrival has no key 'rate'"),
        ({"arrival": {"process": "poisson", "rate": 0}}, "arrival: rate 0 is not a finite number above 0"),
        ({"arrival": {"process": "gamma", "rate": 1, "cv": 0}}, "arrival: cv 0 is not a finite number above 0"),
        ({"arrival": {"process": "all_at_once", "rate": 1}}, "arrival has an unknown key 'rate'; expected none"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, change, complaint):
    path = tmp_path / "w.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | change))
    with pytest.raises(InputError) as raised:
        read_spec(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert complaint in str(raised.value)


@pytest.mark.parametrize("key", sorted(MINIMAL))
def test_required_keys(key):
    document = {name: value for name, value in MINIMAL.items() if name != key}
    with pytest.raises(InputError, match=f"has no key '{key}'"):
        parse_spec(document, "mine")


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("w.yaml", "a: [1", "not valid YAML"),
        ("w.toml", "a = [1", "not valid TOML"),
        ("w.yaml", "", "the specification is None; expected keys and values"),
        ("w.yaml", "- 1", "the specification is [1]; expected keys and values"),
    ],
)
def test_file_that_holds_no_specification(tmp_path, name, content, complaint):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(InputError) as raised:
        read_spec(path)
    assert complaint in str(raised.value)


PUBLISHED = {
    # name: prompt mean, p50, p90; output mean, p50, p90; tolerance of means. Straight lines between few known
    # quantiles cannot meet a mean exactly; the specifications say by how much they miss it.
    "chat": (1_155, 1_020, 2_735, 211, 129, 424, 0.06),
    "code": (2_048, 1_469, 5_188, 27.9, 13, 63, 0.13),
    "long-context": (12_035, 6_909, 26_700, 343, 350, 597, 0.10),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_bundled_specification_keeps_the_published_figures(name):
    path = bundled_path(name)
    assert path is not None
    spec = read_spec(path)
    drawn = WorkloadSpec(name, 20_000, spec.prompt_len, spec.output_len)
    statistics = trace_statistics(draw_trace(drawn, 0, ""))
    prompt_mean, prompt_p50, prompt_p90, output_mean, output_p50, output_p90, tolerance = PUBLISHED[name]
    prompt, output = statistics.prompt_tokens, statistics.output_tokens
    assert [prompt.mean, output.mean] == pytest.approx([prompt_mean, output_mean], rel=tolerance)
    assert [prompt.p50, prompt.p90] == pytest.approx([prompt_p50, prompt_p90], rel=0.05)
    assert [output.p50, output.p90] == pytest.approx([output_p50, output_p90], rel=0.05)
