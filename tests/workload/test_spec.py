"""Workload specifications as files."""

from dataclasses import replace

import pytest
import yaml

from ifbbench.errors import InputError
from ifbbench.workload.arrival_processes import AllAtOnce, Gamma
from ifbbench.workload.distributions import Fixed, Geometric, Histogram, LogNormalTime, Quantiles, Uniform
from ifbbench.workload.draw import draw_trace, draw_turns
from ifbbench.workload.load import bundled_path
from ifbbench.workload.spec import Sessions, SharedPrefix, WorkloadSpec, parse_spec, read_spec
from ifbbench.workload.statistics import trace_statistics

ONE = {"distribution": "fixed", "value": 1}
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


def test_shared_prefixes_and_sessions():
    think_time = {"distribution": "lognormal", "median": 2, "mean": 3}
    sessions = {"turns": {"distribution": "geometric", "mean": 2.5}, "think_time": think_time}
    shared_prefix = {"pools": 20, "len": {"distribution": "uniform", "min": 5, "max": 9}, "share": 0.8, "skew": 1}
    spec = parse_spec(MINIMAL | {"shared_prefix": shared_prefix, "sessions": sessions}, "mine")
    assert spec.shared_prefix == SharedPrefix(20, Uniform(5, 9), 0.8, 1)
    assert spec.sessions == Sessions(Geometric(2.5), LogNormalTime(2, 3))
    short = parse_spec(MINIMAL | {"shared_prefix": {"pools": 2, "len": 700}}, "mine")
    assert short.shared_prefix == SharedPrefix(2, Fixed(700), 1.0, 0.0)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_requests": 0}, "num_requests is 0; expected an integer of at least 1"),
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
        ({"prompt_len": {"distribution": "fixed", "value": 1.5}}, "prompt_len: value is 1.5; expected an integer"),
        (
            {"prompt_len": {"distribution": "fixed", "value": 0}},
            "prompt_len: value is 0; expected an integer from 1 to",
        ),
        ({"prompt_len": {"distribution": "fixed", "value": 1, "mean": 2}}, "prompt_len has an unknown key 'mean'"),
        (
            {"output_len": {"distribution": "uniform", "min": 5, "max": 4}},
            "output_len: max is 4; expected at least min (5)",
        ),
        (
            {"output_len": {"distribution": "normal", "mean": 0, "stdev": 1}},
            "output_len: mean is 0; expected a finite number above 0",
        ),
        (
            {"output_len": {"distribution": "normal", "mean": 1, "stdev": -1}},
            "output_len: stdev is -1; expected a finite number of at least 0",
        ),
        ({"output_len": {"distribution": "normal", "mean": ".nan", "stdev": 1}}, "output_len: mean is '.nan'"),
        (
            {"output_len": {"distribution": "lognormal", "median": 9, "mean": 8}},
            "output_len: mean is 8; expected at least median (9)",
        ),
        ({"output_len": {"distribution": "quantiles", "p0": 1, "p50": 2}}, "do not go from p0 to p100"),
        ({"output_len": {"distribution": "quantiles", "p0": 3, "p100": 2}}, "a higher quantile is below a lower one"),
        (
            {"output_len": {"distribution": "quantiles", "p0": 0, "p100": 2}},
            "p0 is 0; expected a finite number of at least 1",
        ),
        (
            {"output_len": {"distribution": "quantiles", "mode": 1}},
            "output_len: mode is 'mode'; expected a finite number from 0 to 100",
        ),
        ({"arrival": {"process": "poisson"}}, "arrival has no key 'rate'"),
        ({"arrival": {"process": "poisson", "rate": 0}}, "arrival: rate is 0; expected a finite number above 0"),
        ({"arrival": {"process": "gamma", "rate": 1, "cv": 0}}, "arrival: cv is 0; expected a finite number above 0"),
        ({"arrival": {"process": "all_at_once", "rate": 1}}, "arrival has an unknown key 'rate'; expected none"),
        (
            {"output_len": {"distribution": "geometric", "mean": 0.5}},
            "output_len: mean is 0.5; expected a finite number of at least 1",
        ),
        ({"shared_prefix": 3}, "shared_prefix is 3; expected keys and values"),
        ({"shared_prefix": {"pools": 3}}, "shared_prefix has no key 'len'; expected pools, len"),
        ({"shared_prefix": {"len": 3}}, "shared_prefix has no key 'pools'"),
        ({"shared_prefix": {"pools": 0, "len": 3}}, "shared_prefix: pools is 0; expected an integer from 1 to"),
        ({"shared_prefix": {"pools": 1.5, "len": 3}}, "shared_prefix: pools is 1.5; expected an integer"),
        ({"shared_prefix": {"pools": 1, "len": 0}}, "shared_prefix.len: value is 0; expected an integer"),
        ({"shared_prefix": {"pools": 1, "len": "x"}}, "shared_prefix.len: value is 'x'; expected an integer"),
        (
            {"shared_prefix": {"pools": 1, "len": {}}},
            "shared_prefix.len.distribution is missing; expected one of fixed",
        ),
        (
            {"shared_prefix": {"pools": 1, "len": 3, "share": 2}},
            "shared_prefix: share is 2; expected a finite number from 0 to 1",
        ),
        (
            {"shared_prefix": {"pools": 1, "len": 3, "skew": -1}},
            "shared_prefix: skew is -1; expected a finite number of at least 0",
        ),
        (
            {"shared_prefix": {"pools": 1, "len": 3, "skew": "x"}},
            "shared_prefix: skew is 'x'; expected a finite number",
        ),
        ({"shared_prefix": {"pools": 1, "len": 3, "zipf": 1}}, "shared_prefix has an unknown key 'zipf'"),
        ({"sessions": []}, "sessions is []; expected keys and values"),
        ({"sessions": {"turns": ONE}}, "sessions has no key 'think_time'"),
        ({"sessions": {"think_time": ONE}}, "sessions has no key 'turns'"),
        ({"sessions": {"turns": ONE, "think_time": ONE, "pause": 1}}, "sessions has an unknown key 'pause'"),
        ({"sessions": {"turns": 2, "think_time": ONE}}, "sessions.turns is 2; expected keys and values"),
        (
            {"sessions": {"turns": ONE, "think_time": ONE | {"value": -1}}},
            "sessions.think_time: value is -1; expected a finite number of at least 0",
        ),
        ({"sessions": {"turns": ONE, "think_time": {"distribution": "normal"}}}, "sessions.think_time.distribution is"),
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
        ("w.yaml", "", "the specification is missing; expected keys and values"),
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


def test_bundled_conversations_keep_the_published_figures():
    """Mooncake's conversation trace: what its specification says about it, drawn as often as the trace has requests."""
    path = bundled_path("mooncake-conversation")
    assert path is not None
    statistics = trace_statistics(draw_trace(replace(read_spec(path), num_requests=12_031), 0, ""))
    prompt, output = statistics.prompt_tokens, statistics.output_tokens
    assert prompt.mean == pytest.approx(12_035, rel=0.03)
    assert [prompt.p50, prompt.p90, prompt.p99] == pytest.approx([6_909, 27_367, 85_400], rel=0.15)
    assert [output.p50, output.p90, output.p99] == pytest.approx([350, 597, 1_119], rel=0.05)
    assert statistics.span_s == pytest.approx(3_537, rel=0.05)
    assert statistics.seen_before_share == pytest.approx(0.37, abs=0.02)


def test_bundled_chat_in_turns_keeps_the_published_means():
    path = bundled_path("multi-turn")
    assert path is not None
    spec = replace(read_spec(path), num_requests=20_000)
    trace = draw_trace(spec, 0, "")
    assert spec.sessions is not None
    num_sessions = len(draw_turns(spec.request_classes(), 0, 20_000).first_turns)
    assert len(trace) / num_sessions == pytest.approx(2.0, rel=0.03)
    alone = trace_statistics(draw_trace(replace(spec, sessions=None), 0, ""))
    assert [alone.prompt_tokens.mean, alone.output_tokens.mean] == pytest.approx([69.5, 214.5], rel=0.05)


@pytest.mark.parametrize(
    ("name", "sha256"),
    [("chat", "f44428adaa76"), ("long-context", "e00fb7c93e7d"), ("mooncake-conversation", "b1b915a21b4a")],
)
def test_identity_of_a_bundled_workload_stays_the_same(name, sha256):
    """It is recorded in every run.json."""
    path = bundled_path(name)
    assert path is not None
    assert draw_trace(read_spec(path), 0, "", max_num_samples=1).sha256.startswith(sha256)


def test_the_example_of_classes_in_the_documentation():
    path = bundled_path("chat")
    assert path is not None
    example = (path.parent / "README.md").read_text().split("```yaml\n")[1].split("```")[0]
    spec = parse_spec(yaml.safe_load(example), "example")
    assert [(one.name, one.weight) for one in spec.request_classes()] == [("chat", 9), ("documents", 1)]
    assert len(draw_trace(spec, 0, "")) == 1000


def test_a_histogram_in_a_specification():
    lengths = {"distribution": "histogram", "edges": [1, 5, 9], "counts": [3, 1]}
    spec = parse_spec(MINIMAL | {"prompt_len": lengths}, "mine")
    assert spec.prompt_len == Histogram((1, 5, 9), (3, 1))
    with pytest.raises(InputError, match="prompt_len: edges are not ascending"):
        parse_spec(MINIMAL | {"prompt_len": lengths | {"edges": [5, 1, 9]}}, "mine")
