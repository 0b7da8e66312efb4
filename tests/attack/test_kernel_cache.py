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
from ifbbench.torch.model import compiled

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
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
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


def unusable(path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> str:
    """Make the user's cache unusable; returns what the message says of it. path: a file."""
    path.write_text("")
    monkeypatch.delenv("XDG_CACHE_HOME")
    if kind == "home":
        monkeypatch.setenv("HOME", str(path))
        return f"because {path}/.cache/ifbbench cannot be used (Not a directory)"
    if kind == "cache":
        monkeypatch.setenv("XDG_CACHE_HOME", str(path))
        return f"because {path}/ifbbench cannot be used (Not a directory)"
    if kind == "read-only":
        monkeypatch.setenv("XDG_CACHE_HOME", str(path.with_name("read_only")))
        access = os.access
        monkeypatch.setattr(os, "access", lambda where, mode: "read_only" not in str(where) and access(where, mode))
        return f"because {path.with_name('read_only')}/ifbbench cannot be used (it cannot be written)"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    return "because there is no home directory"


@pytest.mark.parametrize("kind", ["home", "cache", "read-only", "nobody"])
def test_kernels_go_to_a_temporary_directory_where_the_cache_cannot_be_used(
    kind: str, compiled_count: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    reason = unusable(tmp_path / "file", monkeypatch, kind)
    path = loaded()
    assert path.parent == tmp_path / "tmp" / f"ifbbench-{os.geteuid()}"
    assert stat.S_IMODE(path.parent.stat().st_mode) == stat.S_IRWXU
    assert loaded() == path
    assert compiled_count() == 1
    (message,) = caplog.messages  # of the first run; the second compiles nothing
    assert f"compiled with {tmp_path / 'compiler'} into {path.parent}, {reason}; later runs" in message


@as_root
def test_a_temporary_directory_of_another_user_is_not_used(
    compiled_count: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unusable(tmp_path / "file", monkeypatch, "home")
    taken = tmp_path / f"tmp/ifbbench-{os.geteuid()}"
    taken.mkdir()
    os.chown(taken, NOBODY, NOBODY)
    assert f"{taken} cannot be used: it belongs to another user" in str(compiled.find_kernels())
    taken.rmdir()
    taken.symlink_to(tmp_path / "elsewhere")
    assert f"{taken} is a link" in str(compiled.find_kernels())
    assert compiled_count() == 0


def test_the_first_run_reports_that_it_compiles_kernels(
    compiled_count: Callable[[], int], tmp_path: Path, caplog
) -> None:
    for _ in range(2):
        loaded()
    assert caplog.messages == [
        f"The kernels for this CPU are compiled with {tmp_path / 'compiler'} into "
        f"{tmp_path / 'cache/ifbbench'}; later runs load them from there."
    ]


@pytest.mark.parametrize("home", ["home", "file"])
def test_the_cache_of_triton(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    (tmp_path / "file").write_text("")
    preferred = tmp_path / home / ".triton/cache"
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.home_dir, triton.knobs.compilation.listener = str(tmp_path / home), None
        try:
            compiled.keep_triton_kernels()
            directory = Path(triton.knobs.cache.dir)
            for cache_hit in (True, False, False):
                triton.knobs.compilation.listener(src=None, times=None, cache_hit=cache_hit)
        finally:
            os.environ.pop("TRITON_CACHE_DIR", None)
    reason = "" if home == "home" else f", because {preferred} cannot be used (Not a directory)"
    assert directory == (tmp_path / f"ifbbench-{os.geteuid()}/triton" if reason else preferred)
    assert caplog.messages == [
        f"The kernels for this GPU are compiled by Triton into {directory}{reason}; later runs load them from there."
    ]


@pytest.mark.usefixtures("small_model")
def test_a_run_without_compiled_kernels_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled._kernels.cache_clear()
    monkeypatch.setenv("CC", "false")
    arguments = [
        "run",
        "documentation",
        "--device",
        "cpu",
        "--time_scale",
        "0",
        "--max_num_samples",
        "1",
        "--quiet",
        "--max_prompt_len",
        "8",
        "--output",
        str(tmp_path / "run"),
    ]
    try:
        done = CliRunner().invoke(main, arguments)
        report = CliRunner().invoke(main, ["report", str(tmp_path / "run")])
    finally:
        compiled._kernels.cache_clear()
    assert done.exit_code == 0, done.output
    assert "false failed" in json.loads((tmp_path / "run/run.json").read_text())["model"]["missing_kernels"]
    assert "Without compiled kernels, so slower: false failed" in " ".join(report.output.split())
