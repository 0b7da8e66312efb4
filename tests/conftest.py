"""What every test may use."""

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from ifbbench.models.config import ModelConfig
from ifbbench.torch import host
from tests.small_model import SMALL_MODEL

REPOSITORY = Path(__file__).resolve().parent.parent

# A busy CI machine is slow now and then, which says nothing about the code; a failure there must also come back here.
hypothesis.settings.register_profile(
    "ifbbench", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("ifbbench")


# Without a GPU, Triton's kernels are tested in its interpreter. Triton reads this when it is imported, and other
# libraries import it before `tests/torch/kernels` is collected.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# KV caches of runs on the CPU in this process take up to 64 MiB by default, and not 2 GiB: each run clears its own.
# Other modules import the value when they are imported, which is later.
host.MAX_CPU_KV_BYTES = 64 * 1024**2

# The processes of pytest-xdist share the cores. Threads of their own would spend the time waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests start hundreds of processes of this package. Without bytecode each of them would compile it again, and each
# process of pytest-xdist the tests.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    sys.dont_write_bytecode = False

# A shell without job control ignores Ctrl-C for its background jobs, and what they start inherits that: commands that
# tests interrupt would go on.
signal.signal(signal.SIGINT, signal.default_int_handler)


freeze = gc.freeze


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    """Restore the number of threads, which commands set for their process: small operations take several times as long
    with more than this one. Keep what is left after the last test of a file out of later collections of garbage."""
    try:
        return (yield)
    finally:
        torch, threads = sys.modules.get("torch"), int(os.environ["OMP_NUM_THREADS"])
        if torch is not None and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if nextitem is None or nextitem.path != item.path:
            gc.collect()
            freeze()


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder `shared` beside the repository: real traces and golden files, too large to keep in git."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the folder `shared` (traces, golden files) beside the repository")
    return folder


@pytest.fixture(scope="module")
def small_model() -> Iterator[None]:
    """Make the built-in model `tiny` of runs in this process a quarter as expensive, for tests of what holds whatever
    the model is: schedules, caches and files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelConfig, "tiny", classmethod(lambda _: SMALL_MODEL))
        yield


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """Searches, sweeps, trials and fleets simulate in this process: to fork one with all tests takes longer than runs
    of a few requests."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("studies.points", "studies.what_if", "replay.fleet"):
            patch.setattr(f"ifbbench.{module}.usable_cores", lambda: 1)
        yield


@pytest.fixture
def undrawn_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps in this process do not lay out and write their charts, for tests of everything else: it takes most of the
    time of a small sweep."""
    monkeypatch.setattr("ifbbench.report.sweep_charts.save", lambda figure, directory, name: [directory / name])


@pytest.fixture
def without_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts in this process are drawn where they are, for tests of everything else: their layout takes more than half
    of the time, and has tests in `tests/report/test_style.py`."""
    monkeypatch.setattr("matplotlib.layout_engine.ConstrainedLayoutEngine.execute", lambda engine, figure: None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Exclude what exists after pytest's collection from collections of garbage: a million objects of libraries and
    tests, which stay until the end. Else each takes a second, and so few come that models of finished runs fill memory.

    Let malloc use mmap in this process, which has runs on the CPU and simulated ones: without, zeroed arrays of
    gigabytes of which hardly a page is used (block tables of SGLang's scheduler) are written whole, and fill memory.
    """
    gc.disable()  # what is imported is no garbage
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        # A run freezes what exists, and at its end unfreezes everything, which would include those objects again.
        patch = pytest.MonkeyPatch()
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        patch.setattr(host, "keep_freed_memory", lambda: None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what attacks have counted, which processes of pytest-xdist would not."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    found = [one for report in reports if getattr(report, "when", "") == "call" for one in report.user_properties]
    lines = [str(value) for name, value in found if name == "tries"]
    if lines:
        terminalreporter.section("attacks")
        terminalreporter.write("".join(f"{line}\n" for line in lines))
