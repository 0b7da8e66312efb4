"""Block keys: equal for equal tokens, and ordered so that neighbours have the longest common prefixes."""

from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ifbbench.engine.tokens import BlockTokens, KnownTokens, SymbolicTokens, TokenIds, block_ranges
from tests.drawing import holds

Token = tuple[int, int]

ids = st.sampled_from([-(2**31), -256, -1, 0, 1, 2, 255, 256, 65536, 2**31 - 1])
extra_ids = st.sampled_from([-1, 0, 1, 2**40])
plain_tokens = st.lists(st.tuples(ids, st.just(0)), max_size=7)
extra_tokens = st.lists(st.tuples(ids, extra_ids), max_size=7)
# Many consecutive numbers, so that runs join, split and end at different positions.
symbols = st.lists(st.tuples(st.sampled_from([-5, -4, 0, 1, 2, 7]), st.integers(1, 4)), max_size=4).map(
    lambda runs: [(number, 0) for first, length in runs for number in range(first, first + length)]
)


def plain(tokens: list[Token]) -> TokenIds:
    return TokenIds(np.array([token for token, _ in tokens], np.int32))


def with_extra_ids(tokens: list[Token]) -> TokenIds:
    return TokenIds(
        np.array([token for token, _ in tokens], np.int32), np.array([extra for _, extra in tokens], np.int64)
    )


def symbolic(tokens: list[Token]) -> SymbolicTokens:
    return SymbolicTokens([(number, 1) for number, _ in tokens])


KINDS: dict[str, tuple[Callable[[list[Token]], TokenIds | SymbolicTokens], st.SearchStrategy[list[Token]]]] = {
    "token ids": (plain, plain_tokens),
    "token ids with extra ids": (with_extra_ids, extra_tokens),
    "symbolic": (symbolic, symbols),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def num_common(tokens: list[Token], others: list[Token]) -> int:
    count = 0
    for one, other in zip(tokens, others, strict=False):
        if one != other:
            break
        count += 1
    return count


def whole_key(tokens: TokenIds | SymbolicTokens):
    return tokens.key(0, len(tokens))


@pytest.mark.parametrize(
    ("num_tokens", "with_partial", "ranges"),
    [
        (0, True, []),
        (3, True, [(0, 3)]),
        (3, False, []),
        (8, True, [(0, 4), (4, 8)]),
        (9, True, [(0, 4), (4, 8), (8, 9)]),
        (9, False, [(0, 4), (4, 8)]),
    ],
)
def test_a_prompt_is_cut_into_blocks(num_tokens, with_partial, ranges):
    assert block_ranges(num_tokens, 4, with_partial) == ranges


def test_tokens_with_and_without_extra_ids_are_of_different_kinds():
    tokens = [(1, 0), (2, 0)]
    assert with_extra_ids(tokens).kind != plain(tokens).kind
    assert len({plain(tokens).kind, with_extra_ids(tokens).kind, symbolic(tokens).kind}) == 3


def test_output_has_no_extra_ids():
    tokens = with_extra_ids([(1, 9)])
    tokens.append(np.array([5], np.int32))
    assert tokens.key(0, 2) == with_extra_ids([(1, 9), (5, 0)]).key(0, 2)


def test_adjacent_runs_are_joined():
    whole = SymbolicTokens([(512, 1024)])
    parts = SymbolicTokens([(512, 512), (1024, 1), (1025, 0), (1025, 511)])
    assert whole.key(100, 900) == parts.key(100, 900)
    assert whole.num_common_tokens(whole.key(0, 1000), parts.key(0, 700)) == 700


def test_a_long_prompt_has_a_short_key():
    assert len(SymbolicTokens([(0, 100_000), (-7, 100_000)]).key(99_999, 150_000)) == 4


@every_kind
@given(data=st.data())
def test_keys_are_equal_if_and_only_if_their_tokens_are(kind, data):
    make, texts = KINDS[kind]
    first, second = data.draw(texts), data.draw(texts)
    start = data.draw(st.integers(0, len(first)))
    stop = data.draw(st.integers(start, len(first)))
    offset = data.draw(st.integers(0, max(len(second) - (stop - start), 0)))
    one, other = make(first).key(start, stop), make(second).key(offset, min(offset + stop - start, len(second)))
    are_equal = first[start:stop] == second[offset : offset + stop - start]
    assert (one == other) == are_equal
    if are_equal:
        assert hash(one) == hash(other)


@every_kind
@given(data=st.data(), size=st.integers(1, 4))
def test_keys_of_full_blocks_are_those_of_their_tokens(kind, data, size):
    make, texts = KINDS[kind]
    text = data.draw(texts)
    known = KnownTokens(make(text))
    keys = [known.tokens.key(end - size, end) for end in range(size, len(text) + 1, size)]
    for count in data.draw(st.lists(st.integers(0, len(keys)), max_size=3)):
        assert known.block_keys(count, size) == keys[:count]
    assert known.block_keys(len(keys), size) == keys


@every_kind
@given(data=st.data())
def test_numbers_of_tokens_and_of_common_tokens_of_keys(kind, data):
    make, texts = KINDS[kind]
    first, second = data.draw(texts), data.draw(texts)
    # The second often has a common prefix with the first.
    second = first[: data.draw(st.integers(0, len(first)))] + second
    one, other = make(first), make(second)
    assert (len(one), one.num_tokens(whole_key(one))) == (len(first), len(first))
    common = num_common(first, second)
    assert one.num_common_tokens(whole_key(one), whole_key(other)) == common
    assert one.num_common_tokens(whole_key(other), whole_key(one)) == common


@every_kind
@holds(60, 1000, data=st.data())
def test_a_neighbour_of_a_key_has_the_longest_common_prefix(kind, data):
    make, texts = KINDS[kind]
    stem = data.draw(texts)
    alike = st.builds(lambda cut, rest: stem[:cut] + rest, st.integers(0, len(stem)), texts)
    text, others = data.draw(alike), data.draw(st.lists(alike, min_size=1, max_size=12))
    tokens: BlockTokens = make(text)
    key = tokens.key(0, len(text))
    keys = sorted({whole_key(make(other)) for other in others})
    index = bisect_left(keys, key)
    common = [tokens.num_common_tokens(key, other) for other in keys]
    assert max(common) == max(common[max(index - 1, 0) : index + 1])
    # A key further away never has more in common.
    assert common[:index] == sorted(common[:index])
    assert common[index:] == sorted(common[index:], reverse=True)


@given(tokens=st.lists(st.tuples(ids, extra_ids), max_size=9), cut=st.integers(0, 9), has_extra=st.booleans())
def test_appended_tokens_equal_tokens_given_at_once(tokens, cut, has_extra):
    make = with_extra_ids if has_extra else plain
    grown = make(tokens[:cut])
    more = make(tokens[cut:])
    rest = tokens[cut:]
    grown.append(
        np.array([token for token, _ in rest], np.int32),
        np.array([extra for _, extra in rest], np.int64) if has_extra else None,
    )
    assert len(grown) == len(tokens[:cut]) + len(more)
    assert whole_key(grown) == whole_key(make(tokens))


@given(tokens=symbols, cuts=st.lists(st.integers(0, 16)), grows=st.booleans(), data=st.data())
def test_keys_do_not_depend_on_how_runs_are_split(tokens, cuts, grows, data):
    numbers = [number for number, _ in tokens]
    breaks = [index for index in range(1, len(numbers)) if numbers[index] != numbers[index - 1] + 1]
    ends = sorted({0, len(numbers), *breaks, *(min(cut, len(numbers)) for cut in cuts)})
    runs = [(numbers[start], stop - start) for start, stop in pairwise(ends)]
    if grows:
        split = SymbolicTokens([])
        for first, length in runs:
            split.append(first, length)
    else:
        split = SymbolicTokens(runs)
    start = data.draw(st.integers(0, len(numbers)))
    stop = data.draw(st.integers(start, len(numbers)))
    assert len(split) == len(numbers)
    assert split.key(start, stop) == symbolic(tokens).key(start, stop)
