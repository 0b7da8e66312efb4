"""How much of the prompts was seen before: against comparing every two prompts, token by token."""

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from ifbbench.workload.prompts import tokens_seen_before, with_prefix
from ifbbench.workload.trace import PREFIX_BLOCK, TraceRequest

# Few ids and lengths, so that prompts have much in common.
prefixes = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 2, PREFIX_BLOCK])), min_size=1, max_size=4)
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def named(runs):
    return with_prefix(TraceRequest(0, 0.0, sum(length for _, length in runs) + 3, 1, 1), runs)


def recorded(prompt):
    return TraceRequest(0, 0.0, len(prompt), 1, 1, prompt_tokens=tuple(prompt))


def one_by_one(prompts):
    def common(some, others):
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False)))

    return sum(
        max((common(prompt, earlier) for earlier in prompts[:index]), default=0) for index, prompt in enumerate(prompts)
    )


@given(st.lists(prefixes, max_size=8), st.lists(tokens, max_size=8))
def test_as_counted_one_by_one(with_ids, with_tokens):
    spelt = [[(number, offset) for number, length in runs for offset in range(length)] for runs in with_ids]
    requests = [*map(named, with_ids), *map(recorded, with_tokens)]
    expected = one_by_one(spelt) + one_by_one(with_tokens) if requests else None
    assert tokens_seen_before(requests) == expected


def test_unknown_tokens():
    lengths_only = TraceRequest(0, 0.0, 9, 1, 1)
    assert tokens_seen_before([lengths_only]) is None
    assert tokens_seen_before([lengths_only, recorded([1, 2]), lengths_only, recorded([1, 3])]) == 1
