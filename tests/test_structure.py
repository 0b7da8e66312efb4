"""The imports of the package, the number of files that an iteration executes, and the words of its prose."""

import ast
import json
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterable
from graphlib import TopologicalSorter
from pathlib import Path
from types import FrameType
from typing import Any

import grimp
import pytest

import ifbbench
from ifbbench import compiled
from ifbbench.engine.loop import TokenGenerationLoop
from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig

PACKAGE = Path(ifbbench.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
PAGES = [PACKAGE.parent / "README.md", *(PACKAGE.parent / "docs").glob("*.md")]

# Files with functions that a steady iteration executes, their lines of code, and such files of a whole simulated run.
MAX_FILES_OF_A_STEADY_STEP, MAX_LINES_OF_A_STEADY_STEP, MAX_FILES_OF_A_REQUEST = 12, 2_070, 56
# Files that name a limit, and those of schedulers that may: there it is the token budget of an object with all limits.
MAX_FILES_OF_A_LIMIT = 33
LIMIT, MAY_NAME_IT = re.compile(r"\bmax_num_tokens\b"), {"schedulers/limits.py", "schedulers/refusals.py"}
OUTPUT_LEN = 70
NO_CODE = {tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
NO_CODE |= {tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
traces_functions = pytest.mark.skipif(compiled.description() == "compiled", reason="compiled functions are not traced")

# A share or a number of bytes that is formatted in place.
OTHER_FORMATS = re.compile(r"\{[^{}]*:,?\.\d%\}|:,\} bytes")
# Words that are not the field's: see the names that TensorRT-LLM's documentation uses.
PRIVATE_WORDS = re.compile(
    r"\b(nobody|somebody|whoever|whosesoever|com(e|es|ing) round|hears? (of|from)|(is|are|was) told|let go|brought back"
    r"|bring(s|ing)? back|push(ed|es) off|spelt out|under way|made anew|goes? alike|of its own accord|whose turn"
    r"|no more than that|how far it is|nothing of it|who (has|is|are|lacks|needs|runs|waits|left|goes)"
    r"|most_(?!common|likely)\w+|(?<!in )(?<!in-)flights?)\b",
    re.IGNORECASE,
)

# What begins without the subject of a sentence.
TELEGRAMS = re.compile(r'("""|^\s*# )(Of |That of |Those (of|that) |The same (of|as|for) )')
# A description of an attribute, in a class or a function, without a noun.
NO_NOUN = re.compile(r'^\s+(""")?[a-z_]\w*(, [a-z_]\w*)*: (\[[^]]*\], )?of ')

# One or several attributes or parameters described in a docstring, `name: what it is`, with the end of the text before.
NAME = r"`?[a-z_][A-Za-z0-9_]*(?:\([^)\n]*\))?`?"
DESCRIPTION = re.compile(rf"(?:^|[.;?)]\s+)(?P<names>{NAME}(?:(?:, | and |, and | or ){NAME})*):\s", re.MULTILINE)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """One request."""
    row = {"request_id": 0, "arrival_s": 0.0, "prompt_len": 100, "output_len": OUTPUT_LEN, "max_new_tokens": OUTPUT_LEN}
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return path


def executed_files(action: Callable[[], Any]) -> set[str]:
    """Files of the package whose functions run during `action`."""
    names: set[str] = set()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            names.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return {str(Path(name).relative_to(PACKAGE)) for name in names if name.startswith(str(PACKAGE))}


def lines_of_code(path: Path) -> int:
    """Lines with code: without docstrings, comments and empty lines, so that no explanation is left out to fit."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(tree)
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None
    }
    lines: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in NO_CODE and token.start not in docstrings:
                lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def test_imports_have_no_circles() -> None:
    """Also not through imports inside functions, or for types only."""
    graph = grimp.build_graph("ifbbench")
    TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}).prepare()


@traces_functions
def test_a_steady_iteration_executes_few_files(trace: Path, tmp_path: Path, monkeypatch) -> None:
    """All steps between a request's first token and its last one, also those that take a new block."""
    steps: list[set[str]] = []
    step = TokenGenerationLoop.step

    def counted(loop: TokenGenerationLoop) -> bool:
        result: list[bool] = []
        steps.append(executed_files(lambda: result.append(step(loop))))
        return result[0]

    monkeypatch.setattr(TokenGenerationLoop, "step", counted)
    run_trace(str(trace), RunConfig(device="null", max_seq_len=4096, output=str(tmp_path / "run")))
    steady = steps[1 : OUTPUT_LEN - 1]
    assert len(steady) == OUTPUT_LEN - 2
    files = set().union(*steady)
    assert "engine/loop.py" in files
    lines = {name: lines_of_code(PACKAGE / name) for name in sorted(files)}
    assert len(lines) <= MAX_FILES_OF_A_STEADY_STEP, lines
    assert sum(lines.values()) <= MAX_LINES_OF_A_STEADY_STEP, lines


@traces_functions
def test_a_simulated_request_executes_few_files(trace: Path, tmp_path: Path) -> None:
    def run(name: str) -> None:
        run_trace(str(trace), RunConfig(device="sim:h100-sxm", model="llama-3.1-8b", output=str(tmp_path / name)))

    run("first")  # imports
    files = executed_files(lambda: run("second"))
    assert "simulated/cost_model.py" in files
    assert len(files) <= MAX_FILES_OF_A_REQUEST, sorted(files)


def test_a_limit_is_known_in_few_files() -> None:
    """It is resolved once; what decides with it asks the object that has all limits."""
    naming = {str(path.relative_to(PACKAGE)) for path in FILES if LIMIT.search(path.read_text(encoding="utf-8"))}
    assert len(naming) <= MAX_FILES_OF_A_LIMIT, sorted(naming)
    assert {name for name in naming if name.startswith(("engine/", "kv/", "schedulers/"))} == MAY_NAME_IT


@pytest.mark.skipif(compiled.description() != "compiled", reason="the tests above ran")
def test_files_are_counted_in_pure_python() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-k", "executes_few_files", __file__]
    done = subprocess.run(command, env={**os.environ, compiled.ENVIRONMENT: "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def offending(paths: Iterable[Path], pattern: re.Pattern[str]) -> list[str]:
    """File, number and text of each line that matches."""
    return [
        f"{path.relative_to(PACKAGE.parent)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]


def test_prose_has_no_private_words() -> None:
    assert offending([*FILES, *PAGES], PRIVATE_WORDS) == []


def test_docstrings_and_comments_are_sentences() -> None:
    assert offending(FILES, TELEGRAMS) == []
    assert offending(FILES, NO_NOUN) == []


def run_on_descriptions(docstring: str) -> list[str]:
    """Names that are described, but not at the beginning of a line."""
    starts = [match.start("names") for match in DESCRIPTION.finditer(docstring)]
    run_on = [start for start in starts if start and docstring[start - 1] != "\n"]
    return [docstring[start:].split(":")[0] for start in run_on] if len(starts) > 1 else []


@pytest.mark.parametrize(
    ("docstring", "names"),
    [
        ("A pool. size: of a block.", []),
        ("A pool.\n\nsize: of a block.\ncount: of blocks, as long\n    as they are free: all.", []),
        ("A pool. size: of a block. count: of blocks.", ["size", "count"]),
        ("A pool.\n\nsize: of a block; `count`: of blocks.", ["`count`"]),
        ("A pool.\n\nsize: of a block. first, last(n):\n    positions. It raises: nothing.", ["first, last(n)"]),
    ],
)
def test_run_on_descriptions_are_found(docstring: str, names: list[str]) -> None:
    assert run_on_descriptions(docstring) == names


def test_docstrings_describe_one_attribute_a_line() -> None:
    """A docstring that describes several attributes or parameters has each on a line of its own."""
    offending = [
        f"{path.relative_to(PACKAGE.parent)}:{node.lineno} {node.name}: {', '.join(names)}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if (names := run_on_descriptions(ast.get_docstring(node) or ""))
    ]
    assert offending == []


def test_shares_and_sizes_are_written_by_one_function() -> None:
    """`number_texts.percent` and `fields.memory_size`: no `62%` beside `43 %`, and no counts of bytes in messages.

    trtllm-bench writes 90.00%, and its report is copied as it is."""
    assert offending([path for path in FILES if path.name != "trtllm_text.py"], OTHER_FORMATS) == []


def test_a_simulated_run_and_its_report_read_no_tables(trace: Path, tmp_path: Path) -> None:
    """pandas takes longer to import than such a run; neither does it need what draws or computes, the schedulers of
    other engines, or `importlib.metadata`, which parses descriptions of packages as e-mails."""
    program = (
        "import sys\n"
        "from ifbbench.cli.main import main\n"
        "main(sys.argv[1:], standalone_mode=False)\n"
        "engines = {f'ifbbench.schedulers.{engine}.scheduler' for engine in ('vllm', 'sglang')}\n"
        "others = {'pandas', 'matplotlib', 'scipy', 'torch', 'pyarrow', 'importlib.metadata'} | engines\n"
        "print(sorted(others & sys.modules.keys()))\n"
    )
    options = ["--device", "sim:h100-sxm", "--model", "llama-3.1-8b", "--output", str(tmp_path / "run")]
    command = [sys.executable, "-c", program, "run", str(trace), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Output throughput" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
