"""Lines are written as Python's own JSON encoder writes them, and by few files."""

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ifbbench import compiled, rundir
from ifbbench.engine.records import IterationRecord
from ifbbench.rundir.line_types import InflightLine, StaticLine
from ifbbench.rundir.lines import encode, number
from ifbbench.rundir.recorder import Recorder
from ifbbench.rundir.statistics import IterationStatistics
from ifbbench.settings.modes import BatchingType
from tests.rundir.virtual_run import OWN_REASON, limits, run, trace_of

FILES = ("iterations.jsonl", "spans.jsonl", "requests.jsonl")
MAX_FILES_OF_AN_ITERATION = 4


@settings(max_examples=2000)
@given(st.floats(allow_nan=False, allow_infinity=False))
@example(0.0)
@example(-0.0)
@example(1e-05)
@example(0.0001)
@example(9.999999999999999e-05)
@example(2.5e-07)
@example(1e16)
@example(9999999999999998.0)
@example(5e-324)
@example(1.7976931348623157e308)
def test_floats_are_written_as_python_writes_them(value: float) -> None:
    assert encode([number(value)]).decode() == json.dumps([value])


@given(st.floats(1e-4, 1e16, exclude_max=True))
def test_usual_floats_need_no_text_of_their_own(value: float) -> None:
    assert type(number(value)) is float


@pytest.mark.parametrize(
    ("batching_type", "line"), [(BatchingType.V1, StaticLine), (BatchingType.INFLIGHT_FUSED, InflightLine)]
)
def test_lines_have_the_documented_names_in_their_order(batching_type: BatchingType, line: Any) -> None:
    assert line.__struct_encode_fields__ == (*IterationStatistics(batching_type, 4).names, "ifbbench")


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0.0, 2e-5, 0.01, 3e16]), st.integers(1, 40), st.integers(1, 20)),
        min_size=1,
        max_size=10,
    ).map(sorted),
    policy=st.sampled_from(["guaranteed_no_evict", "max_utilization", "tests.rundir.virtual_run:OneAtATime"]),
    batching_type=st.sampled_from([BatchingType.INFLIGHT, BatchingType.INFLIGHT_FUSED, BatchingType.V1]),
)
def test_every_line_is_what_json_would_write(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], policy: str, batching_type: BatchingType
) -> None:
    directory = tmp_path_factory.mktemp("runs") / "run"
    run(trace_of(rows), limits(policy, num_blocks=20, batching_type=batching_type), directory)
    for name in FILES:
        for line in (directory / name).read_text().splitlines():
            assert json.dumps(json.loads(line), separators=(",", ":")) == line


def test_errors_and_reasons_are_escaped(tmp_path: Path) -> None:
    policy = "tests.rundir.virtual_run:OneAtATime"
    run(trace_of([(0.0, 4, 2), (0.0, 4, 2)]), limits(policy), tmp_path / "run")
    assert json.dumps(OWN_REASON) in (tmp_path / "run" / "iterations.jsonl").read_text()


def test_a_steady_iteration_is_recorded_by_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests are in generation; none comes, ends or waits."""
    executed: set[str] = set()
    record_iteration = Recorder.iteration

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            executed.add(frame.f_code.co_filename)

    def iteration(recorder: Recorder, record: IterationRecord) -> None:
        if record.iteration == 5:
            sys.setprofile(note)
        record_iteration(recorder, record)
        sys.setprofile(None)

    monkeypatch.setattr(Recorder, "iteration", iteration)
    run(trace_of([(0.0, 4, 12)] * 3), limits("guaranteed_no_evict"), tmp_path / "run")
    folder = str(Path(rundir.__file__).parent)
    files = {name for name in executed if name.startswith(folder)}
    assert compiled.description() == "compiled" or 0 < len(files) <= MAX_FILES_OF_AN_ITERATION
