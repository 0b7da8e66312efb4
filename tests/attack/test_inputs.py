"""Hostile input of every kind: no traceback, no hang, and an exit status of 0, 1, 2 or 130."""

import random
from pathlib import Path

import pytest

from tests.attack.commands import Outcomes
from tests.attack.inputs import Try, name_try, settings_try, specification_try, trace_try
from tests.attack.models import model_try
from tests.attack.results import result_try

ALL: dict[str, Try] = {
    "traces": trace_try,
    "specifications": specification_try,
    "settings": settings_try,
    "names": name_try,
    "model files": model_try,
    "result files": result_try,
}
# Tries of each kind, which takes about 40 s in all on a free core; and those of a long attack.
SHORT = {"traces": 40, "specifications": 120, "settings": 30, "names": 100, "model files": 100, "result files": 10}
LONG = dict.fromkeys(SHORT, 8400)


def attack(kind: str, seeds: range, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tries of these seeds. Prints the counts, which `pytest -s` shows."""
    outcomes = Outcomes(kind)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    for seed in seeds:
        place = folder / str(seed)
        place.mkdir()
        monkeypatch.chdir(place)
        ALL[kind](outcomes, place, random.Random(f"{kind} {seed}"))
    print(outcomes.report())
    assert outcomes.tries == len(seeds)
    assert not outcomes.problems, "\n\n".join([outcomes.report(), *outcomes.problems[:5]])


def test_every_kind_is_tried() -> None:
    assert list(SHORT) == list(LONG) == list(ALL)


@pytest.mark.parametrize("kind", SHORT)
def test_hostile_input(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attack(kind, range(SHORT[kind]), tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("part", range(10))
def test_much_hostile_input(kind: str, part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = LONG[kind] // 10
    attack(kind, range(10_000 + part * size, 10_000 + (part + 1) * size), tmp_path, monkeypatch)
