"""The size of the package, the files that one iteration executes, and the language of its prose."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import ifbbench
from ifbbench.config import RunConfig
from ifbbench.replay.run import run_trace

PACKAGE = Path(ifbbench.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
PROSE = [*FILES, *PACKAGE.rglob("*.c"), *PACKAGE.rglob("*.h"), *PACKAGE.rglob("*.toml")]
DOCUMENTS = [PACKAGE.parent / "README.md", *(PACKAGE.parent / "docs").glob("*.md"), PACKAGE.parent / "datasets" / "README.md"]

MAX_FILES = 120
MAX_LINES_OF_A_FILE = 350
MAX_LINES = 21_000
MAX_FILES_OF_A_STEP = 22
MAX_FILES_OF_A_REQUEST = 45

# Words of a private vocabulary; ../DESIGN of the project asks for the field's terms.
PRIVATE_WORDS = re.compile(
    r"\b(nobody|somebody|whoever|whosesoever|com(e|es|ing) round|hears? (of|from)|is told|are told|let go|brought back|"
    r"bring(s|ing)? back|push(ed|es) off|spelt out|under way|made anew|go(es)? alike|flights?|lockstep way|"
    r"of its own accord|whose turn|lets? in|who (has|is|are|lacks|needs|runs|waits|left))\b",
    re.IGNORECASE,
)


def executed_files(action: Callable[[], Any]) -> set[str]:
    """Files of the package whose functions run during `action`, relative to the package."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return {str(Path(name).relative_to(PACKAGE)) for name in found if name.startswith(str(PACKAGE))}


def simulate_one_request(trace: Path, directory: Path) -> None:
    config = RunConfig(device="sim:h100-sxm", model="llama-3.1-8b", output=str(directory), overwrite=True)
    run_trace(str(trace), config)
