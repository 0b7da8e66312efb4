"""Drawn requests that share system prompts."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from ifbbench.workload.arrival_processes import Poisson
from ifbbench.workload.distributions import Fixed, Uniform
from ifbbench.workload.draw import draw_trace
from ifbbench.workload.prompts import prompt_tokens
from ifbbench.workload.reuse import tokens_seen_before
from ifbbench.workload.spec import SharedPrefix, WorkloadSpec

SPEC = WorkloadSpec("some", 4_000, Uniform(600, 2_000), Uniform(5, 50), Poisson(4.0))
SHARED = SharedPrefix(pools=20, len=Uniform(100, 1_500), share=0.8, skew=1.0)


def drawn(shared=SHARED, seed=5, **others):
    return list(draw_trace(replace(SPEC, shared_prefix=shared, **others), seed, ""))


def pool_of(request):
    return request.prefix_ids and request.prefix_ids[0]


def test_share_and_skew_are_met():
    requests = drawn()
    pools = Counter(pool for pool in map(pool_of, requests) if pool is not None)
    assert sum(pools.values()) / len(requests) == pytest.approx(0.8, abs=0.02)
    weights = 1 / np.arange(1, 21)
    expected = (weights / weights.sum()).tolist()
    shares = [pools[pool] / sum(pools.values()) for pool in sorted(pools)]
    assert shares == pytest.approx(expected, abs=0.02)


def test_without_skew_all_pools_are_alike():
    pools = Counter(map(pool_of, drawn(replace(SHARED, share=1.0, skew=0.0))))
    assert len(pools) == 20
    assert min(pools.values()) > 4_000 / 20 * 0.75


def test_every_request_of_a_pool_begins_with_the_same_tokens_whatever_their_number():
    requests = drawn(SharedPrefix(3, Uniform(500, 900)), num_requests=30, prompt_len=Fixed(1_000))
    by_pool = {pool_of(request): request for request in requests}
    assert len(by_pool) == 3
    for request in requests:
        other = by_pool[pool_of(request)]
        assert request.prefix_runs() == other.prefix_runs()
        length = sum(length for _, length in request.prefix_runs())
        assert 500 <= length <= 900 < 512 * 2
        some, others = (prompt_tokens(each, 1000, seed=0) for each in (request, other))
        assert (some[:length] == others[:length]).all()
        assert request is other or (some[length:] != others[length:]).any()


def test_prompts_are_as_long_as_drawn_or_a_token_more_than_their_prefix():
    plain = list(draw_trace(SPEC, 5, ""))
    for request, without in zip(drawn(), plain, strict=True):
        prefix_len = sum(length for _, length in request.prefix_runs())
        assert request.prompt_len == max(without.prompt_len, prefix_len + 1)


def test_seen_before_is_each_prefix_after_its_first_request():
    requests = drawn(SharedPrefix(4, Fixed(700)), num_requests=50)
    assert tokens_seen_before(requests) == 46 * 700


def test_other_streams_are_left_alone():
    plain, with_prefixes = list(draw_trace(SPEC, 5, "")), drawn()
    for field in ("arrival_s", "output_len", "max_new_tokens"):
        assert [getattr(request, field) for request in plain] == [getattr(each, field) for each in with_prefixes]
    more_often = drawn(replace(SHARED, share=1.0))
    for request, other in zip(with_prefixes, more_often, strict=True):
        assert request.prefix_ids in (None, other.prefix_ids)


def test_first_requests_of_a_longer_workload():
    assert drawn(num_requests=100) == drawn()[:100]
    assert drawn() != drawn(seed=6)


def test_identity():
    specs = [SPEC, *(replace(SPEC, shared_prefix=shared) for shared in (SHARED, replace(SHARED, skew=2.0)))]
    assert len({draw_trace(spec, 0, "", 1).sha256 for spec in specs}) == 3
