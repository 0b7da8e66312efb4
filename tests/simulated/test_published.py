"""Predictions against some published figures, and the policies with too small a cache.

All figures are in `benchmarks.published`.
"""

import pytest

from benchmarks.published import ROLES, SOURCES, compare, figures, policies
from ifbbench.models.named_models import built_in_models
from ifbbench.simulated.hardware import hardware_names

FIGURES = figures()


def test_the_figures_are_of_known_devices_models_and_sources():
    assert {figure.role for figure in FIGURES} == set(ROLES)
    assert {figure.hardware for figure in FIGURES} <= set(hardware_names())
    assert {figure.model for figure in FIGURES} <= set(built_in_models())
    assert {figure.version for figure in FIGURES} == set(SOURCES)
    assert len(
        {(figure.setup, figure.prompt_tokens, figure.output_tokens, figure.max_batch_size) for figure in FIGURES}
    ) == len(FIGURES)


def test_no_table_is_both_fitted_and_held_out():
    setups = {role: {figure.setup for figure in FIGURES if figure.role == role} for role in ROLES}

    assert not (setups["fitted"] | setups["table"]) & setups["held_out"]


@pytest.mark.parametrize("lengths", [(128, 4096), (2048, 2048), (20_000, 2000)])
def test_the_table_of_an_h100_is_met(lengths):
    figure = next(figure for figure in FIGURES if (figure.prompt_tokens, figure.output_tokens) == lengths)
    assert figure.role == "table"

    row = compare(figure)

    assert abs(row["error"]) < 0.1
    assert row["ttft_p50_s"] > row["tpot_p50_s"] > 0


def test_max_utilization_starts_sooner_and_ends_later_than_guaranteed_no_evict():
    runs = policies()
    calm, eager = runs["guaranteed_no_evict"], runs["max_utilization"]

    assert eager["ttft_p50_s"] < calm["ttft_p50_s"]
    assert eager["tpot_p99_s"] > calm["tpot_p99_s"]
    assert eager["tokens_per_s"] < calm["tokens_per_s"]
    assert eager["pauses"] > 0 == calm["pauses"]
    assert eager["recomputed_tokens"] > 0
