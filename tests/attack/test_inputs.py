"""Hostile input of every kind: no traceback, no hang, and an exit status of 0, 1, 2 or 130."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attack.commands import Outcomes
from tests.attack.inputs import Try, name_try, settings_try, specification_try, trace_try
from tests.attack.library import manager_try, policy_try, request_try
from tests.attack.model_parts import adapter_try, tokenizer_try
from tests.attack.models import model_try
from tests.attack.programs import command_try, config_try, engine_try, line_try, pair_try
from tests.attack.results import result_try
from tests.attack.servers import body_try, endpoint_try, start_try, traffic_try

ALL: dict[str, Try] = {
    "traces": trace_try,
    "specifications": specification_try,
    "settings": settings_try,
    "names": name_try,
    "model files": model_try,
    "result files": result_try,
    "commands": command_try,
    "pairs of settings": pair_try,
    "settings of engines": engine_try,
    "config files": config_try,
    "server lines": line_try,
    "server settings": start_try,
    "bodies": body_try,
    "recorded traffic": traffic_try,
    "endpoints": endpoint_try,
    "requests": request_try,
    "managers": manager_try,
    "policies": policy_try,
    "tokenizers": tokenizer_try,
    "adapters": adapter_try,
}
# Tries of each kind: 430, which take about 13 s of processor time in all; and those of a long attack.
SHORT = {
    "traces": 40,
    "specifications": 50,
    "settings": 35,
    "names": 35,
    "model files": 45,
    "result files": 15,
    "commands": 15,
    "pairs of settings": 25,
    "settings of engines": 40,
    "config files": 15,
    "server lines": 40,
    "server settings": 15,
    "bodies": 5,
    "recorded traffic": 5,
    "endpoints": 5,
    "requests": 5,
    "managers": 15,
    "policies": 15,
    "tokenizers": 5,
    "adapters": 5,
}
LONG = {
    "traces": 6000,
    "specifications": 6000,
    "settings": 5000,
    "names": 4000,
    "model files": 6000,
    "result files": 3000,
    "commands": 3000,
    "pairs of settings": 4000,
    "settings of engines": 4000,
    "config files": 2000,
    "server lines": 4000,
    "server settings": 2000,
    "bodies": 2000,
    "recorded traffic": 1500,
    "endpoints": 1000,
    "requests": 1500,
    "managers": 2000,
    "policies": 2000,
    "tokenizers": 1000,
    "adapters": 1000,
}


RecordProperty = Callable[[str, object], None]


def attack(
    kind: str, seeds: range, folder: Path, monkeypatch: pytest.MonkeyPatch, record_property: RecordProperty
) -> None:
    """The tries of these seeds; their counts are printed at the end of the tests."""
    outcomes = Outcomes(kind)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    for seed in seeds:
        place = folder / str(seed)
        place.mkdir()
        monkeypatch.chdir(place)
        ALL[kind](outcomes, place, random.Random(f"{kind} {seed}"))
        monkeypatch.chdir(folder)
        shutil.rmtree(place, ignore_errors=True)
    record_property("tries", outcomes.report())
    assert outcomes.tries == len(seeds)
    assert not outcomes.problems, "\n\n".join([outcomes.report(), *outcomes.problems[:5]])


def test_every_kind_is_tried() -> None:
    assert list(SHORT) == list(LONG) == list(ALL)
    assert sum(SHORT.values()) >= 300
    assert sum(LONG.values()) >= 50_000


@pytest.mark.parametrize("kind", SHORT)
def test_hostile_input(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: RecordProperty
) -> None:
    attack(kind, range(SHORT[kind]), tmp_path, monkeypatch, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("part", range(10))
def test_much_hostile_input(
    kind: str, part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: RecordProperty
) -> None:
    size = LONG[kind] // 10
    attack(kind, range(10_000 + part * size, 10_000 + (part + 1) * size), tmp_path, monkeypatch, record_property)
