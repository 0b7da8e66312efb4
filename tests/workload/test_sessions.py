"""Drawn conversations."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from msgspec import structs

from ifbbench.errors import InputError
from ifbbench.settings.config import RunConfig
from ifbbench.workload.arrival_processes import AllAtOnce, Poisson
from ifbbench.workload.distributions import ExponentialTime, Fixed, FixedTime, Geometric, Uniform
from ifbbench.workload.draw import draw_trace
from ifbbench.workload.formats import write_trace
from ifbbench.workload.load import load_trace, session_numbers
from ifbbench.workload.prompts import prompt_tokens
from ifbbench.workload.reuse import tokens_seen_before
from ifbbench.workload.spec import Sessions, SharedPrefix, WorkloadSpec
from ifbbench.workload.trace import columns_of

SESSIONS = Sessions(Geometric(3.0), ExponentialTime(20.0))
SPEC = WorkloadSpec("some", 2_000, Uniform(50, 700), Uniform(5, 300), Poisson(0.5), sessions=SESSIONS)
TURNS_OF_3 = replace(SPEC, num_requests=9, sessions=Sessions(Fixed(3), FixedTime(10)))


def drawn(spec=SPEC, seed=5, count=None):
    return list(draw_trace(spec, seed, "", count))


def conversations(requests):
    """The requests by conversation, each in the order of its turns; for specs without shared prefixes."""
    found = defaultdict(list)
    for request in sorted(requests, key=lambda request: request.request_id):
        found[request.prefix_ids[0]].append(request)
    return list(found.values())


@pytest.mark.parametrize(
    "changes",
    [{"sessions": Sessions(Fixed(4), FixedTime(1))}, {"shared_prefix": SharedPrefix(1, Fixed(2**31 - 1), 1.0)}],
)
def test_prompts_that_share_more_than_can_be_named_are_refused(changes):
    with pytest.raises(InputError, match=r"conversation has [0-9,]+ tokens; expected at most 16,777,216"):
        drawn(replace(SPEC, **({"output_len": Fixed(2**23), "sessions": None} | changes)))


def test_every_prompt_is_all_that_was_said_and_a_new_message():
    messages = [request.prompt_len for request in drawn(replace(SPEC, sessions=None))]
    for turns in conversations(drawn()):
        assert turns[0].prompt_len == messages[turns[0].request_id]
        for earlier, later in pairwise(turns):
            said = earlier.prompt_len + earlier.output_len
            assert later.prompt_len == said + messages[later.request_id]
            assert (prompt_tokens(later, 99, 0)[: earlier.prompt_len] == prompt_tokens(earlier, 99, 0)).all()


def test_reserved_tokens_bound_what_was_answered():
    for turns in conversations(drawn(replace(SPEC, reserve="fixed:20", prompt_len=Fixed(100)))):
        for earlier, later in pairwise(turns):
            assert earlier.output_len <= 20
            assert later.prompt_len == earlier.prompt_len + earlier.output_len + 100


def test_conversations_share_nothing():
    requests = drawn()
    known = sum(turns[index].prompt_len for turns in conversations(requests) for index in range(len(turns) - 1))
    assert tokens_seen_before(requests) == known


def test_turns_and_think_times_are_as_asked_for():
    found = conversations(drawn(replace(SPEC, num_requests=20_000, prompt_len=Fixed(1), output_len=Fixed(1))))
    assert sum(map(len, found)) == 20_000
    assert 20_000 / len(found) == pytest.approx(3.0, rel=0.03)
    waits_s = [later.arrival_s - earlier.arrival_s for turns in found for earlier, later in pairwise(turns)]
    assert min(waits_s) >= 0
    assert sum(waits_s) / len(waits_s) == pytest.approx(20.0, rel=0.03)
    starts_s = [turns[0].arrival_s for turns in found]
    assert (starts_s[-1] - starts_s[0]) / (len(starts_s) - 1) == pytest.approx(2.0, rel=0.05)


def test_arrivals_of_a_small_example():
    requests = drawn(replace(TURNS_OF_3, arrival=AllAtOnce(), num_requests=8))
    assert [(request.arrival_s, request.request_id) for request in requests] == [
        (0, 0),
        (0, 3),
        (0, 6),
        (10, 1),
        (10, 4),
        (10, 7),
        (20, 2),
        (20, 5),
    ]


def test_a_longer_drawing_begins_with_the_same_conversations():
    longer = {request.request_id: request for request in drawn()}
    shorter = drawn(count=101)
    assert sorted(request.request_id for request in shorter) == list(range(101))
    assert all(longer[request.request_id] == request for request in shorter)
    assert drawn(replace(SPEC, num_requests=101)) == shorter


def test_a_change_of_one_stream_leaves_the_others_alone():
    slower = drawn(replace(SPEC, sessions=Sessions(Geometric(3.0), ExponentialTime(90.0))))
    by_id = {request.request_id: request for request in slower}
    for request in drawn():
        assert structs.replace(by_id[request.request_id], arrival_s=request.arrival_s) == request


@pytest.mark.parametrize("length", [700, 1024])
def test_conversations_that_begin_with_a_shared_prefix(length):
    requests = drawn(replace(TURNS_OF_3, shared_prefix=SharedPrefix(1, Fixed(length))))
    plain = {request.request_id: request for request in drawn(TURNS_OF_3)}
    for request in requests:
        runs = request.prefix_runs()
        assert runs[:2] == [(0, 512), (1, length - 512)]
        assert request.prompt_len == plain[request.request_id].prompt_len + length
        assert sum(length for _, length in runs) == request.prompt_len
    assert tokens_seen_before(requests) == tokens_seen_before(plain.values()) + 8 * length


def test_identity():
    others = [replace(SPEC, sessions=None), replace(SPEC, sessions=Sessions(Geometric(2.0), ExponentialTime(20.0)))]
    assert len({draw_trace(spec, 0, "", 1).sha256 for spec in (SPEC, *others)}) == 3


def test_sessions_that_routers_see_have_the_numbers_of_their_first_requests(tmp_path):
    path = tmp_path / "trace.jsonl"
    given = [7, None, 3, 7, None, 3, 5]
    rows = [
        {"request_id": at, "arrival_s": at, "prompt_len": 4, "output_len": 2}
        | ({} if session is None else {"session_id": session})
        for at, session in enumerate(given)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    trace = load_trace(str(path), RunConfig())
    columns = columns_of(trace.requests)
    assert session_numbers(columns).tolist() == [0, 1, 2, 0, 3, 2, 4]
    assert [row.session_id for row in trace] == given
    write_trace(trace.requests, tmp_path / "again.jsonl")
    again = load_trace(str(tmp_path / "again.jsonl"), RunConfig())
    assert list(again) == list(trace)
    # Their requests do not wait for each other, so that they are divided in turn.
    share = load_trace(str(path), RunConfig(replica="1/2"))
    assert [row.request_id for row in share] == [0, 2, 4, 6]
