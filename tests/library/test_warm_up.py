"""A warm-up does once whatever the run will do, so that nothing is compiled or allocated in the middle of it."""

import dataclasses
from typing import Any

import pytest

from ifbbench.build import engine as engine_module
from ifbbench.build.engine import build_engine, warm_up
from ifbbench.engine.batch import Batch
from ifbbench.engine.sampling_params import SamplingParams
from ifbbench.settings.config import RunConfig


def warmed_with(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[Batch]:
    """The batches of a warm-up as a GPU has it, with the short prompt of one of 10 tokens."""
    monkeypatch.setattr(engine_module, "LONG_WARM_UP_PROMPT_LEN", 10)
    config = RunConfig(device="cpu", max_tokens_in_paged_kvcache=1280, max_seq_len=128, tokens_per_block=8, **settings)
    engine = build_engine(config)
    batches: list[Batch] = []
    submit = engine.executor.submit

    def note(batch: Batch) -> None:
        batches.append(batch)
        submit(batch)

    monkeypatch.setattr(engine.executor, "submit", note)
    try:
        warm_up(dataclasses.replace(engine, device="cuda"))
    finally:
        engine.executor.close()
    return batches


@pytest.mark.parametrize(("window", "longest"), [(None, 10), ("24", 25), ("24,40", 41)])
def test_a_prompt_is_longer_than_every_window(
    window: str | None, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = warmed_with(monkeypatch, max_attention_window=window)
    assert max(chunk.length for batch in batches for chunk in batch.context) == longest
    assert any(len(batch.slots) and batch.context for batch in batches)
    assert any(len(batch.slots) and not batch.context for batch in batches)


def test_tokens_are_chosen_as_the_run_will_choose_them(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = warmed_with(monkeypatch, temperature=0.7, top_k=5, top_p=0.9, seed=3, repetition_penalty=1.2)
    asked = {chunk.request.sampling for batch in batches for chunk in batch.context}
    assert asked == {SamplingParams(0.7, 5, 0.9, 3, 1.2)}
