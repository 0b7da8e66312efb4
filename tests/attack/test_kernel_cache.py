"""The cache of compiled kernels: a library is loaded only if it is undamaged and no other user can have written it."""

import ctypes
import json
import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.model import compiled

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library as it is cached, without its checksum."""
    kernels = compiled.find_kernels()
    if isinstance(kernels, str):
        pytest.skip(kernels)
    whole = Path(str(kernels._name)).read_bytes()
    path = tmp_path_factory.mktemp("library") / "kernels.so"
    path.write_bytes(whole[: -compiled.CHECKSUM_BYTES])
    return path


@pytest.fixture
def compiled_count(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The number of compilations so far, by a quick compiler, with an empty cache in `cache`."""
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(
        "#!/bin/sh\n"
        'for word in "$@"; do [ "$before" = -o ] && output="$word"; before="$word"; done\n'
        f'case "$*" in *-shared*) echo linked >> {log}; cp {library} "$output";; *) : > "$output";; esac\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda: len(log.read_text().splitlines()) if log.exists() else 0


def loaded() -> Path:
    """The path of the library that is loaded."""
    kernels = compiled.find_kernels()
    assert isinstance(kernels, ctypes.CDLL), kernels
    return Path(str(kernels._name))


def test_a_library_is_compiled_once(compiled_count: Callable[[], int], tmp_path: Path) -> None:
    assert loaded() == loaded()
    assert compiled_count() == 1
    path = loaded()
    assert path.is_relative_to(tmp_path / "cache")
    for one in (path, path.parent):
        assert not stat.S_IMODE(one.stat().st_mode) & 0o022
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_a_damaged_library_is_compiled_again(compiled_count: Callable[[], int]) -> None:
    path, draw = loaded(), random.Random(0)
    whole = path.read_bytes()
    damaged = [whole[:size] for size in (0, 1, 31, 32, 33, 4096, len(whole) // 2, len(whole) - 1)]
    damaged += [whole + b"\0", b"\0" * len(whole)]
    for _ in range(40):
        flipped = bytearray(whole)
        flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        damaged.append(bytes(flipped))
    for number, content in enumerate(damaged, start=2):
        path.unlink()  # the one that is loaded is not changed
        path.write_bytes(content)
        path.chmod(0o700)
        assert not compiled._is_trusted(path)
        if number % 10 == 0 or number < 12:
            before = compiled_count()
            assert loaded() == path
            assert compiled_count() == before + 1
            assert path.read_bytes() == whole


@as_root
@pytest.mark.parametrize("whose", ["library", "directory"])
def test_a_library_of_another_user_is_not_loaded(compiled_count: Callable[[], int], whose: str) -> None:
    path = loaded()
    os.chown(path if whose == "library" else path.parent, NOBODY, NOBODY)
    assert compiled_count() == 1
    found = loaded()
    assert compiled_count() == 2
    assert (found == path) == (whose == "library")
    if whose == "library":
        assert path.stat().st_uid == 0


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
@pytest.mark.parametrize("whose", ["library", "directory"])
def test_what_others_can_write_is_not_loaded(compiled_count: Callable[[], int], whose: str, mode: int) -> None:
    path = loaded()
    (path if whose == "library" else path.parent).chmod(mode)
    assert loaded() == path
    assert compiled_count() == 2
    for one in (path, path.parent):
        assert not stat.S_IMODE(one.stat().st_mode) & 0o022


def test_a_link_is_not_loaded(compiled_count: Callable[[], int], tmp_path: Path) -> None:
    path = loaded()
    shutil.move(path, tmp_path / "elsewhere.so")
    path.symlink_to(tmp_path / "elsewhere.so")
    assert loaded() == path
    assert compiled_count() == 2
    assert not path.is_symlink()


def test_a_relative_cache_directory_is_ignored(
    compiled_count: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "planted")
    assert loaded().is_relative_to(tmp_path / "home/.cache/ifbbench")
    assert not (tmp_path / "planted").exists()


def test_without_a_directory_to_write_kernels_are_compiled_for_the_process(
    compiled_count: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = loaded()
    assert compiled_count() == 1
    assert not path.exists()


def test_a_run_without_compiled_kernels_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled._kernels.cache_clear()
    monkeypatch.setenv("CC", "false")
    arguments = ["run", "documentation", "--device", "cpu", "--time_scale", "0", "--max_num_samples", "1", "--quiet",
                 "--max_prompt_len", "8", "--output", str(tmp_path / "run")]  # fmt: skip
    try:
        done = CliRunner().invoke(main, arguments)
        report = CliRunner().invoke(main, ["report", str(tmp_path / "run")])
    finally:
        compiled._kernels.cache_clear()
    assert done.exit_code == 0, done.output
    assert "false failed" in json.loads((tmp_path / "run/run.json").read_text())["model"]["missing_kernels"]
    assert "Without compiled kernels, so slower: false failed" in " ".join(report.output.split())
