"""The slowest part of expert parallelism against drawn tokens."""

import numpy as np
import pytest

from ifbbench.errors import InputError
from ifbbench.simulated.expert_load import ExpertLoad, load_shares

DRAWS = 200


@pytest.mark.parametrize("exponent", ["0", "0.5", "1"])
@pytest.mark.parametrize(("parts", "redundant"), [(8, 0), (8, 32), (32, 32)])
@pytest.mark.parametrize("tokens", [16, 256])
def test_the_slowest_part_is_that_of_drawn_tokens(exponent, parts, redundant, tokens):
    load = ExpertLoad(256, 8, parts, redundant, load_shares(exponent, 256))
    random, rows, hit = np.random.default_rng(1), [], []
    for _ in range(DRAWS):
        chosen = random.random((tokens, *load._chances.shape)) < load._chances
        rows.append(chosen.sum(axis=(0, 2)).max())
        hit.append(chosen.any(axis=0).sum(axis=1).max())

    assert load.rows(tokens) == pytest.approx(np.mean(rows), rel=0.07)
    assert load.hit(tokens) == pytest.approx(np.mean(hit), rel=0.03)


def test_every_token_chooses_its_number_of_experts():
    for exponent in ("0", "1", "3"):
        chances = ExpertLoad(64, 8, 4, shares=load_shares(exponent, 64))._chances
        assert chances.sum() == pytest.approx(8)
        assert chances.max() <= 1


def test_redundant_experts_even_out_the_load():
    shares = load_shares("1", 256)
    skewed, copied = ExpertLoad(256, 8, 8, 0, shares), ExpertLoad(256, 8, 8, 32, shares)

    assert skewed.rows(4096) > 1.5 * 4096
    assert copied.rows(4096) < 1.05 * 4096
    assert copied.experts_per_part == 36


def test_one_part_has_all_rows():
    assert ExpertLoad(8, 2).rows(100) == 200
    assert ExpertLoad(8, 2, shares=load_shares("2", 8)).hit(1) == pytest.approx(2)


def test_loads_from_a_file(tmp_path):
    path = tmp_path / "loads.json"
    path.write_text("[4, 2, 1, 1]", encoding="utf-8")

    assert load_shares(str(path), 4) == (4, 2, 1, 1)
    with pytest.raises(InputError, match="a list of 8 numbers"):
        load_shares(str(path), 8)


@pytest.mark.parametrize("given", ["none", "-1", "nan"])
def test_other_loads_are_refused(given):
    with pytest.raises(InputError, match="--expert_load"):
        load_shares(given, 4)


@pytest.mark.parametrize("redundant", [3, 64 * 4])
def test_copies_that_cannot_be_divided_are_refused(redundant):
    with pytest.raises(InputError, match="--redundant_experts"):
        ExpertLoad(64, 8, 4, redundant)
