"""A run that is killed leaves a directory that can be read up to its last flush."""

from pathlib import Path

import pytest

from ifbbench.report.load import load_run
from tests.recording.virtual_run import Interrupted, limits, run, trace_of


def test_a_killed_run_is_readable_with_its_open_spans(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    # Killed in the middle, as if the process were gone: nothing is closed.
    rows = [(0.0, 40, 20)] * 40
    with pytest.raises(Interrupted):
        run(trace_of(rows), limits("guaranteed_no_evict"), directory, kill_after=700)
    data = load_run(directory)
    assert data.partial
    assert data.summary is None
    last_flushed = int(data.iterations["iteration_counter"].max())
    assert 300 < last_flushed < 700
    # The requests that were running then are in the spans up to that iteration.
    running = data.spans[data.spans["last_iteration"] == last_flushed]
    scheduled = int(data.iterations["scheduled_requests"].iloc[-1])
    assert int(running["phase"].isin(["context", "generation", "recompute"]).sum()) == scheduled
    assert not data.spans.duplicated(["request_id", "first_iteration"]).any()
