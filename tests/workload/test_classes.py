"""Workloads of several request classes, and streams that are not correlated."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from ifbbench.errors import InputError
from ifbbench.workload.distributions import Histogram, Stream, Uniform, generator
from ifbbench.workload.draw import draw_trace
from ifbbench.workload.formats import write_trace
from ifbbench.workload.reading import read_trace
from ifbbench.workload.spec import FROM_ANSWER, RequestClass, TaskIds, parse_spec
from ifbbench.workload.trace import TraceRequest, columns_of

UNIFORM: dict[str, Any] = {"distribution": "uniform", "min": 1, "max": 1000}
LONG = {"distribution": "uniform", "min": 5000, "max": 9000}
CHAT: dict[str, Any] = {
    "name": "chat",
    "weight": 3,
    "prompt_len": UNIFORM,
    "priority": 0.8,
    "shared_prefix": {"pools": 2, "len": 700},
}
DOCUMENTS: dict[str, Any] = {
    "name": "documents",
    "prompt_len": LONG,
    "reserve": "fixed:2000",
    "lora_task_id": {"min": 4, "max": 6},
}
AGENT: dict[str, Any] = {
    "name": "agent",
    "weight": 2,
    "prompt_len": UNIFORM,
    "sessions": {
        "turns": {"distribution": "geometric", "mean": 4},
        "think_time": {"distribution": "exponential", "mean": 3},
        "think_from": "answer",
    },
}
MIXED: dict[str, Any] = {
    "num_requests": 6_000,
    "output_len": UNIFORM,
    "arrival": {"process": "poisson", "rate": 5},
    "classes": [CHAT, DOCUMENTS, AGENT],
}


def drawn(document=MIXED, seed=3, count=None):
    return draw_trace(parse_spec(document, "mixed"), seed, "", count)


def of_class(requests, name):
    return [request for request in requests if request.request_class == name]


def test_classes_of_a_specification():
    chat, documents, agent = parse_spec(MIXED, "mixed").request_classes()
    assert (chat.name, chat.weight, chat.priority, chat.reserve) == ("chat", 3, 0.8, "actual")
    assert (documents.weight, documents.reserve, documents.lora_task_id) == (1, "fixed:2000", TaskIds(4, 6))
    assert chat.output_len == documents.output_len == agent.output_len
    assert agent.sessions is not None
    assert agent.sessions.think_from == FROM_ANSWER


def test_one_class_without_a_name():
    spec = parse_spec({"num_requests": 1, "prompt_len": UNIFORM, "output_len": UNIFORM}, "plain")
    assert spec.request_classes() == (RequestClass(Uniform(1, 1000), Uniform(1, 1000)),)
    assert {request.request_class for request in drawn()} == {"chat", "documents", "agent"}
    assert columns_of(draw_trace(spec, 0, "").requests).class_of is None


def test_each_class_has_its_own_facts():
    requests = list(drawn())
    chat, documents, agent = (of_class(requests, name) for name in ("chat", "documents", "agent"))
    assert {request.priority for request in chat} == {0.8}
    assert {request.priority for request in documents + agent} == {0.5}
    assert {request.lora_task_id for request in documents} == {4, 5, 6}
    assert {request.lora_task_id for request in chat + agent} == {None}
    assert {request.max_new_tokens for request in documents} == {2000}
    assert min(request.prompt_len for request in documents) >= 5000
    # Prefix ids of one class are not those of another.
    assert {request.prefix_ids for request in chat} == {(0, 1), (2, 3)}
    assert {request.prefix_ids for request in documents} == {None}
    assert min(min(request.prefix_ids or ()) for request in agent) == 4


def test_weights_are_shares_of_arrivals():
    requests = list(drawn())
    conversations = [request for request in of_class(requests, "agent") if request.after is None]
    numbers = [len(of_class(requests, "chat")), len(of_class(requests, "documents")), len(conversations)]
    assert np.array(numbers) / sum(numbers) == pytest.approx([3 / 6, 1 / 6, 2 / 6], abs=0.03)
    assert len(of_class(requests, "agent")) / len(conversations) == pytest.approx(4, rel=0.1)


def test_columns_know_the_class_and_priority_without_making_a_request():
    columns = columns_of(drawn().requests)
    assert [columns.class_at(index) for index in range(50)] == [request.request_class for request in columns[:50]]
    assert columns.priority is not None
    assert list(columns.priority[:50]) == [request.priority for request in columns[:50]]


def test_a_written_trace_is_read_as_drawn(tmp_path):
    write_trace(drawn(), tmp_path / "a.jsonl")
    assert list(read_trace(tmp_path / "a.jsonl")) == list(drawn())


def test_a_longer_drawing_begins_with_the_shorter():
    longer = {request.request_id: request for request in drawn()}
    shorter = list(drawn(count=700))
    assert len(shorter) == 700
    assert all(longer[request.request_id] == request for request in shorter)


def test_a_class_added_at_the_end_leaves_the_draws_of_the_others_alone():
    two = drawn(MIXED | {"classes": [CHAT, DOCUMENTS]})
    for name in ("chat", "documents"):
        some, others = of_class(drawn(), name), of_class(two, name)
        assert [r.output_len for r in some[:400]] == [r.output_len for r in others[:400]]
        assert [r.prompt_len for r in some[:400]] == [r.prompt_len for r in others[:400]]


def test_a_turn_follows_the_end_of_the_answer_before():
    agent = {request.request_id: request for request in of_class(drawn(), "agent")}
    later = [request for request in agent.values() if request.after is not None]
    assert len(later) > 1000
    for request in later:
        before = agent[request.after]
        assert request.prefix_ids[: len(before.prefix_ids)] == before.prefix_ids
        assert request.arrival_s == pytest.approx(before.arrival_s + request.think_s, abs=2e-6)
    assert np.mean([request.think_s for request in later]) == pytest.approx(3, rel=0.1)


def test_think_time_from_arrival_is_the_default():
    sessions = AGENT["sessions"] | {"think_from": "arrival"}
    plain = {key: value for key, value in AGENT["sessions"].items() if key != "think_from"}
    workload: dict[str, Any] = {"num_requests": 50, "prompt_len": UNIFORM, "output_len": UNIFORM}
    some, others = (drawn(workload | {"sessions": one}) for one in (sessions, plain))
    assert (list(some), some.sha256) == (list(others), others.sha256)
    assert {request.after for request in some} == {None}
    assert drawn(workload | {"sessions": AGENT["sessions"]}).sha256 != some.sha256


def test_no_two_streams_are_correlated():
    """Lengths of prompts and outputs within a class, and between any two streams of any two classes."""
    same: dict[str, Any] = {"prompt_len": UNIFORM, "output_len": UNIFORM}
    classes = [{"name": name} for name in ("a", "b", "c")]
    count = 10_000
    for seed in (0, 1, 420):
        requests = list(drawn({"num_requests": count, **same, "classes": classes}, seed))
        several = [of_class(requests, one["name"]) for one in classes]
        several.append(list(drawn({"num_requests": count, **same}, seed)))
        streams = [[getattr(r, f) for r in rs[:3_000]] for rs in several for f in ("prompt_len", "output_len")]
        bound = 5 / np.sqrt(3_000)  # five standard errors of no correlation
        for some, others in combinations(streams, 2):
            assert abs(np.corrcoef(some, others)[0, 1]) < bound


@pytest.mark.parametrize("distribution", ["normal", "uniform", "lognormal", "histogram", "quantiles"])
def test_prompt_and_output_lengths_are_not_correlated(distribution):
    numbers: dict[str, dict[str, Any]] = {
        "normal": {"mean": 500, "stdev": 100},
        "uniform": {"min": 1, "max": 1000},
        "lognormal": {"median": 100, "mean": 150},
        "histogram": {"edges": [1, 10, 100], "counts": [1, 1]},
        "quantiles": {"p0": 1, "p50": 20, "p100": 90},
    }
    length = {"distribution": distribution, **numbers[distribution]}
    columns = columns_of(drawn({"num_requests": 20_000, "prompt_len": length, "output_len": length}).requests)
    assert abs(np.corrcoef(columns.prompt_len, columns.output_len)[0, 1]) < 5 / np.sqrt(20_000)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"classes": []}, "classes is []; expected a list of at least one class"),
        ({"classes": "chat"}, "classes is 'chat'; expected a list"),
        ({"classes": [3]}, "classes[0] is 3; expected keys and values"),
        ({"classes": [{"weight": 1, "prompt_len": UNIFORM}]}, "classes[0] has no key 'name'"),
        ({"classes": [{"name": "a"}]}, "classes[0] has no key 'prompt_len'"),
        ({"classes": [CHAT, CHAT]}, "classes have the names chat, chat; expected each name once"),
        ({"classes": [CHAT | {"weight": 0}]}, "classes[0]: weight is 0; expected a finite number above 0"),
        ({"classes": [CHAT | {"priority": 2}]}, "classes[0]: priority is 2; expected a finite number from 0 to 1"),
        ({"classes": [CHAT | {"share": 2}]}, "classes[0] has an unknown key 'share'"),
        ({"classes": [CHAT | {"prompt_len": {}}]}, "classes[0]: prompt_len.distribution is missing"),
        ({"lora_task_id": {"min": 3, "max": 2}}, "lora_task_id: max is 2; expected at least min (3)"),
        ({"lora_task_id": -1}, "lora_task_id: min is -1; expected an integer of at least 0"),
    ],
)
def test_what_is_wrong_is_named(change, complaint):
    with pytest.raises(InputError) as raised:
        parse_spec(MIXED | change, "mixed")
    assert complaint in str(raised.value)


def test_unknown_start_of_the_think_time():
    agent = AGENT | {"sessions": AGENT["sessions"] | {"think_from": "start"}}
    with pytest.raises(InputError, match=r"sessions\.think_from is 'start'; expected one of arrival, answer"):
        parse_spec(MIXED | {"classes": [agent]}, "mixed")


# Histograms.


def test_a_histogram_is_met():
    lengths = Histogram((1, 2, 10, 100, 101), (1, 0, 2, 1)).draw(generator(0, Stream.INPUT_LENGTH), 40_000)
    counts = [(lengths == 1).mean(), ((lengths > 1) & (lengths < 10)).mean(), (lengths == 100).mean()]
    assert counts == pytest.approx([0.25, 0, 0.25], abs=0.01)
    within = lengths[(lengths >= 10) & (lengths < 100)]
    assert within.mean() == pytest.approx(54.5, rel=0.01)
    assert (within.min(), within.max()) == (10, 99)


def test_a_longer_series_starts_with_the_shorter():
    one = Histogram((1, 50, 90), (2, 1.5))
    assert (
        one.draw(generator(0, Stream.INPUT_LENGTH), 60)[:20].tolist()
        == one.draw(generator(0, Stream.INPUT_LENGTH), 20).tolist()
    )


@pytest.mark.parametrize(
    ("edges", "counts", "complaint"),
    [
        ((1, 1), (1,), "edges are not ascending"),
        ((5,), (), "edges are not ascending; expected at least two"),
        ((0, 5), (1,), r"edges\[0\] is 0"),
        ((1, 5), (1, 2), "counts do not fit edges; expected 1 of them"),
        ((1, 5), 3, "counts do not fit edges"),
        ((1, 5), (-1,), r"counts\[0\] is -1"),
        ((1, 5), (0,), "counts are all 0"),
        ((1, 5), (float("nan"),), r"counts\[0\] is nan"),
    ],
)
def test_bad_histograms(edges, counts, complaint):
    with pytest.raises(InputError, match=complaint):
        Histogram(edges, counts)


def test_after_is_no_number_only_request():
    assert not TraceRequest(1, 0.0, 1, 1, 1, after=0).has_only_numbers
