"""What the bundled workloads draw, against the published figures that their comments cite."""

import hashlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from ifbbench.workload.draw import draw_trace, draw_turns
from ifbbench.workload.formats import trace_lines
from ifbbench.workload.load import bundled_path
from ifbbench.workload.spec import read_spec
from ifbbench.workload.statistics import trace_statistics
from ifbbench.workload.trace import columns_of


def spec_of(name):
    path = bundled_path(name)
    assert path is not None
    return read_spec(path)


def drawn(name, count, seed=0):
    return draw_trace(replace(spec_of(name), num_requests=count), seed, "")


def test_agent():
    """GitHub Copilot coding agents: tokens of a call, calls of a user turn, cached share. Prompts have a heavy tail, so
    their mean is that of three seeds."""
    columns = [columns_of(drawn("agent", 15_000, seed).requests) for seed in range(3)]
    assert np.mean([np.mean(one.prompt_len) for one in columns]) == pytest.approx(67_818, rel=0.05)
    assert np.mean([np.mean(one.output_len) for one in columns]) == pytest.approx(527, rel=0.03)
    assert trace_statistics(drawn("agent", 3_000)).seen_before_share == pytest.approx(0.857, abs=0.03)
    first_turns = draw_turns(spec_of("agent").request_classes(), 0, 15_000).first_turns
    assert 15_000 / len(first_turns) == pytest.approx(7.83, rel=0.05)
    assert sum(request.after is None for request in drawn("agent", 2_000)) < 2_000 / 6


def test_reasoning():
    """DeepSeek-R1 in OpenThoughts: 6,000 tokens on average, some above 20,000."""
    outputs = np.asarray(columns_of(drawn("reasoning", 20_000).requests).output_len)
    assert outputs.mean() == pytest.approx(6_000, rel=0.03)
    assert 0.005 < (outputs > 20_000).mean() < 0.1


def test_batch_offline():
    """MLPerf llama2-70b offline: 24,576 requests at once, at most 1,024 tokens, 294.45 output tokens on average."""
    trace = draw_trace(spec_of("batch-offline"), 0, "")
    statistics = trace_statistics(trace)
    assert (len(trace), statistics.span_s) == (24_576, 0)
    assert statistics.output_tokens.mean == pytest.approx(294.45, rel=0.02)
    assert max(statistics.prompt_tokens.max, statistics.output_tokens.max) <= 1_024


def test_sharegpt():
    """The vLLM paper's figure 11: prompts of 161.31 and outputs of 337.99 tokens on average."""
    statistics = trace_statistics(drawn("sharegpt", 20_000))
    assert statistics.prompt_tokens.mean == pytest.approx(161.31, rel=0.03)
    assert statistics.output_tokens.mean == pytest.approx(337.99, rel=0.02)


def test_mixed():
    """The lengths of `chat` and of `long-context`, nine requests to one."""
    trace = drawn("mixed", 20_000)
    assert Counter(request.request_class for request in trace)["chat"] / 20_000 == pytest.approx(0.9, abs=0.01)
    classes = trace_statistics(trace).classes
    assert classes["chat"].prompt_mean == pytest.approx(1_155, rel=0.07)
    assert classes["chat"].output_mean == pytest.approx(211, rel=0.07)
    assert classes["documents"].prompt_mean == pytest.approx(12_035, rel=0.07)
    assert classes["documents"].output_mean == pytest.approx(343, rel=0.10)


@pytest.mark.parametrize(
    ("name", "rate", "cv"),
    [("chat", 5.53, 1.09), ("code", 2.567, 13.2), ("long-context", 3.40, 3.0)],
)
def test_arrivals(name, rate, cv):
    """Azure 2023 and Mooncake: requests/s and the coefficient of variation of the gaps."""
    statistics = trace_statistics(drawn(name, 200_000))
    assert statistics.request_rate_per_s == pytest.approx(rate, rel=0.05)
    assert statistics.gap_cv == pytest.approx(cv, rel=0.08)


def test_quantiles_of_azure_conversation():
    """p10, p25, p50, p75, p90 and p99."""
    columns = columns_of(drawn("chat", 50_000).requests)
    marks = (10, 25, 50, 75, 90, 99)
    assert np.percentile(columns.prompt_len, marks) == pytest.approx((207, 396, 1020, 1189, 2735, 4142), rel=0.03)
    assert np.percentile(columns.output_len, marks) == pytest.approx((54, 85, 129, 395, 424, 601), rel=0.03)


@pytest.mark.parametrize(
    ("name", "sha256"),
    [
        ("chat", "be4194f04f94"),
        ("code", "9cf2c46d0ba2"),
        ("long-context", "4b642e3febcd"),
        ("mooncake-conversation", "b9ddc1d1b4b4"),
        ("multi-turn", "c26ab01db081"),
        ("shared-prefix", "585108137469"),
    ],
)
def test_drawn_requests_stay_the_same(name, sha256):
    """Recorded results name a workload and a seed: what they draw must never change."""
    trace = draw_trace(spec_of(name), 3, "")
    assert hashlib.sha256("".join(trace_lines(trace)).encode()).hexdigest().startswith(sha256)
