"""How charts are written; without matplotlib, which takes long to import and which pages of runs do not need."""

from dataclasses import dataclass
from pathlib import Path

FORMATS = ("png", "svg")


@dataclass(frozen=True)
class Output:
    """How charts are written.

    directory: the directory, None for `charts` in the run directory.
    title: title in place of the chart's own.
    """

    directory: Path | None = None
    formats: tuple[str, ...] = FORMATS
    dpi: float | None = None
    title: str | None = None
