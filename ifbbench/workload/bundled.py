"""The workloads that come with ifbbench."""

from pathlib import Path

from ifbbench.errors import InputError

SUFFIXES = (".yaml", ".yml", ".toml", ".jsonl", ".json", ".csv")


def bundled_path(name: str) -> Path | None:
    """The bundled file called `name`, with or without its suffix; None if there is none."""
    for path in _bundled_files():
        if name in (path.name, path.stem):
            return path
    return None


def bundled_names() -> list[str]:
    """Names that `bundled_path` knows, without suffixes."""
    return [path.stem for path in _bundled_files()]


def _bundled_files() -> list[Path]:
    return sorted(path for path in _directory().iterdir() if path.suffix in SUFFIXES)


def _directory() -> Path:
    """`datasets` inside an installed package, or beside it in a checkout."""
    package = Path(__file__).parent.parent
    candidates = (package / "datasets", package.parent / "datasets")
    for directory in candidates:
        if directory.is_dir():
            return directory
    raise InputError(
        f"the bundled datasets are missing; expected {' or '.join(map(str, candidates))}. Install ifbbench again, or "
        "give the path of a trace."
    )
