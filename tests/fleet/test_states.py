"""What routers and autoscalers see of replicas, and what replicas do: as one iteration at a time, however many run
together."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from ifbbench.replay.run import run_trace
from tests.fleet.test_conservation import draw_fleet
from tests.fleet.test_fleet import config_of, write_rows


def draw_reading(draw: Random, path: Path) -> dict[str, Any]:
    """Settings of a fleet in which states are read."""
    asked = draw_fleet(draw, path) | {"router": "least_kv", "router_state_age": draw.choice((0.0, 0.0, 0.013, 0.3))}
    if draw.random() < 0.3:
        asked |= {"router": "least_requests", "router_state_age": 0.0}
        measure = draw.choice(("queue=1", "kv_use=0.01"))
        asked["autoscale"] = f"{measure},min=1,max=5,every=0.2s,cool_down=0.5s"
    return asked


def draw_running_ahead(draw: Random, path: Path) -> dict[str, Any]:
    """Settings of a fleet whose replicas run past arrivals: nothing lets a request arrive, and none has a store."""
    asked = draw_fleet(draw, path)
    stores = [name for name in asked if name.startswith(("kv_disk", "kv_remote", "kv_tier"))]
    asked = {name: value for name, value in asked.items() if name not in (*stores, "concurrency")}
    if asked["engine"] == "trtllm" and draw.random() < 0.6:  # micro batches in turn, or several windows
        return asked | draw.choice(
            (
                {"pp_size": 2, "overlap": None},
                {"max_attention_window": "1024,4096", "enable_kv_cache_reuse": False, "kv_host_cache_bytes": 0},
            )
        )
    if asked["engine"] == "sglang":
        return asked | {"tokens_per_block": draw.choice((1, 16))}
    return asked


def files_of(path: Path, trace: Path, asked: dict[str, Any]) -> dict[str, bytes]:
    """All files of the run but its settings, by name."""
    run_trace(str(trace), config_of(**asked, output=str(path)))
    written = [found for found in sorted(path.rglob("*")) if found.is_file() and found.name != "run.json"]
    return {str(found.relative_to(path)): found.read_bytes() for found in written}


def check_states(seed: int, path: Path) -> None:
    """A router and a rule see what they see if replicas run one iteration at a time."""
    path.mkdir()
    draw = Random(f"states {seed}")
    trace = write_rows(
        path / "trace.jsonl", draw, draw.randint(5, 40), sessions=draw.random() < 0.3, priorities=draw.random() < 0.3
    )
    check_files(path, trace, draw_reading(draw, path))


def check_running_ahead(seed: int, path: Path) -> None:
    """Replicas that run past arrivals do what they do one iteration at a time."""
    path.mkdir()
    draw = Random(f"ahead {seed}")
    trace = write_rows(path / "trace.jsonl", draw, draw.randint(20, 80), priorities=draw.random() < 0.3)
    asked = draw_running_ahead(draw, path)
    if draw.random() < 0.5:
        asked |= {"router": "least_kv", "router_state_age": draw.choice((0.0, 0.0, 0.013))}
    check_files(path, trace, asked)


def check_files(path: Path, trace: Path, asked: dict[str, Any]) -> None:
    """A fleet has the files of one whose replicas run one iteration at a time."""
    together = files_of(path / "together", trace, asked)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("ifbbench.engine.predicted_loop.MAX_ITERATIONS_AT_ONCE", 1)
        single = files_of(path / "single", trace, asked)
    assert together.keys() == single.keys()
    assert [name for name, content in together.items() if content != single[name]] == []


@pytest.mark.parametrize("seed", range(6))
def test_routers_of_random_fleets_see_the_states_of_single_iterations(seed: int, tmp_path: Path) -> None:
    check_states(seed, tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 300))
def test_routers_of_more_random_fleets_see_the_states_of_single_iterations(seed: int, tmp_path: Path) -> None:
    check_states(seed, tmp_path / "one")


@pytest.mark.parametrize("seed", range(6))
def test_replicas_of_random_fleets_run_past_arrivals_as_single_iterations(seed: int, tmp_path: Path) -> None:
    check_running_ahead(seed, tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 300))
def test_replicas_of_more_random_fleets_run_past_arrivals_as_single_iterations(seed: int, tmp_path: Path) -> None:
    check_running_ahead(seed, tmp_path / "one")
