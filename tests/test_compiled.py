"""The compiled modules: when they run, that they write the same files, and what a build does without a compiler."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ifbbench
from benchmarks.recorded_runs import differences
from ifbbench import compiled

REPOSITORY = Path(ifbbench.__file__).parents[1]
IS_COMPILED = compiled.description() == "compiled"
NOT_COMPILED = "the loop is not compiled here; `pip install -e .` compiles it where there is a C compiler"
# With chunks and pauses, beams, several windows, and reuse; `.ci/run` compares all recorded runs.
RUNS = ("chat_mu_chunked_small_pool", "chat_beams_mu", "chat_two_windows", "turns_reuse_host")


def python(*arguments: str, pure: bool = True) -> str:
    """Standard output of a Python process."""
    environment = {**os.environ, compiled.ENVIRONMENT: "1" if pure else "", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, *arguments], env=environment, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The description of a build of one module, to be changed and written."""
    monkeypatch.setattr(compiled, "DIRECTORY", tmp_path)
    monkeypatch.delenv(compiled.ENVIRONMENT, raising=False)
    source = compiled.source_of("ifbbench.clock")
    return {"suffix": EXTENSION_SUFFIXES[0], "sources": {"ifbbench.clock": compiled.digest(source)}}


def used(build: dict[str, Any]) -> tuple[frozenset[str], str]:
    (compiled.DIRECTORY / compiled.BUILD).write_text(json.dumps(build))
    return compiled._build.__wrapped__()


def test_a_build_of_the_sources_is_used(build: dict[str, Any]) -> None:
    assert used(build) == (frozenset({"ifbbench.clock", compiled.LIBRARY}), "compiled")


def test_without_a_build_the_sources_run(build: dict[str, Any]) -> None:
    assert compiled._build.__wrapped__() == (frozenset(), "pure Python")


def test_a_build_of_other_sources_is_not_used(build: dict[str, Any]) -> None:
    build["sources"]["ifbbench.clock"] = "of another source"
    assert used(build) == (frozenset(), "pure Python (clock.py has changed since the build)")
    build["sources"] = {"ifbbench.removed": ""}
    assert used(build) == (frozenset(), "pure Python (removed.py has changed since the build)")


def test_a_build_for_another_python_is_not_used(build: dict[str, Any]) -> None:
    build["suffix"] = ".cpython-310-x86_64-linux-gnu.so"
    assert used(build) == (frozenset(), "pure Python (the build is for another version of Python)")


def test_the_version_reports_whether_the_loop_is_compiled() -> None:
    arguments = ("-m", "ifbbench", "--version")
    expected = f"ifbbench, version {ifbbench.__version__}, pure Python (IFBBENCH_PURE_PYTHON is set)\n"
    assert python(*arguments) == expected
    if IS_COMPILED:
        assert python(*arguments, pure=False) == f"ifbbench, version {ifbbench.__version__}, compiled\n"


@pytest.mark.skipif(not IS_COMPILED, reason=NOT_COMPILED)
def test_the_loop_runs_compiled() -> None:
    found = python("-c", "import ifbbench.engine.loop as loop; print(loop.__file__)", pure=False)
    assert Path(found.strip()).parent == compiled.DIRECTORY


@pytest.mark.skipif(not IS_COMPILED, reason=NOT_COMPILED)
def test_compiled_runs_write_the_same_files(tmp_path: Path) -> None:
    for name, is_pure in (("pure", True), ("compiled", False)):
        python("-m", "benchmarks.recorded_runs", "write", str(tmp_path / name), *RUNS, pure=is_pure)
    assert list(differences(tmp_path / "pure", tmp_path / "compiled", RUNS)) == []


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[bool, list[str]]]:
    """Builds a package of one module, `ifbbench/one.py`; returns whether it is compiled, and the warnings."""
    pytest.importorskip("hatchling")
    monkeypatch.syspath_prepend(str(REPOSITORY))
    monkeypatch.delenv(compiled.ENVIRONMENT, raising=False)
    import hatch_build

    package = tmp_path / "ifbbench"
    package.mkdir()
    (package / "compiled.py").write_text(Path(compiled.__file__).read_text())

    def build() -> tuple[bool, list[str]]:
        warnings: list[str] = []
        build_data: dict[str, Any] = {"artifacts": [], "pure_python": True}
        nothing: Any = None
        app: Any = SimpleNamespace(display_warning=warnings.append)
        hook = hatch_build.CompileHook(str(tmp_path), {"modules": ["ifbbench.one"]}, nothing, nothing, "", "wheel", app)
        hook.initialize("standard", build_data)
        is_compiled = bool(build_data["artifacts"])
        assert build_data["pure_python"] is not is_compiled
        assert (package / compiled.DIRECTORY.name).exists() is is_compiled
        return is_compiled, warnings

    return build


def test_a_module_that_does_not_compile_leaves_pure_python(
    built: Callable[[], tuple[bool, list[str]]], tmp_path: Path
) -> None:
    (tmp_path / "ifbbench" / "one.py").write_text("number: int = 'a text'\n")
    is_compiled, warnings = built()
    assert not is_compiled
    assert len(warnings) == 1
    assert warnings[0].startswith("ifbbench is built as pure Python")


def test_a_build_of_the_same_sources_is_kept(
    built: Callable[[], tuple[bool, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import metadata

    import hatch_build

    calls: list[object] = []

    def compile_modules(root: Path, package: Any, modules: Sequence[str]) -> None:
        calls.append(modules)
        package.DIRECTORY.mkdir()

    monkeypatch.setattr(hatch_build, "compile_modules", compile_modules)
    source = tmp_path / "ifbbench" / "one.py"
    for text, count in (("x = 1", 1), ("x = 1", 1), ("x = 2", 2)):
        source.write_text(text)
        assert built() == (True, [])
        assert len(calls) == count
    source.with_name("types.py").write_text("")  # which the module may import
    assert built() == (True, [])
    assert len(calls) == 3
    monkeypatch.setattr(metadata, "version", lambda name: "another mypyc")
    assert built() == (True, [])
    assert len(calls) == 4


def test_listed_modules_exist() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    modules = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["modules"]
    assert [module for module in modules if not compiled.source_of(module).is_file()] == []
