"""Result files with a key removed or a value replaced: each command that reads them answers, or names the place."""

import csv
import io
import itertools
import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure

from ifbbench.cli.main import main
from ifbbench.compressed import open_to_write, read_pieces
from ifbbench.errors import InputError
from ifbbench.report import sweep_charts
from ifbbench.report.figure_files import save
from ifbbench.report.style import STYLE
from ifbbench.studies.point_table import read_sweep
from tests.attack import commands as commands_module
from tests.attack.commands import Outcomes

SETTINGS = ("trace.jsonl", "--device", "sim:h100-sxm", "--model", "tiny", "--quiet", "--slo", "ttft=1s")
RUN = ("run", *SETTINGS, "--policy", "max_utilization", "--max_tokens_in_paged_kvcache", "128")
SWEEP = ("sweep", *SETTINGS, "--over", "max_batch_size=2,4", "--processes", "1", "--output", "damaged")
REMOVED = object()
# The values that JSON has no Python value for are texts here, until they are written.
VALUES: tuple[Any, ...] = (
    REMOVED,
    None,
    "\x1b]0;title\x07",
    [1],
    {},
    True,
    float("nan"),
    "@1e400@",
    -1,
    2**70,
    "@nested@",
)
TEXTS = ("text", "nan", "1e400", "-1", str(2**70), "[1]", "True", "9" * 5000, "\x1b]0;title\x07")
READ_RUN = (
    "report damaged",
    "report damaged --json",
    "why damaged --budget 0",
    "why damaged --json --budget 0",
    "why damaged --request 3",
    "why damaged --iteration 5",
    "compare run damaged",
    "watch damaged --once",
    "export damaged",
    "export damaged --format perfetto",
    "dataset info damaged",
    "config show --config damaged",
    "run --config damaged --quiet --output again --overwrite",
    "plot damaged --html",
    "plot damaged --only ttft",
    "calibrate --from damaged --device sim:h100-sxm --model tiny --output profile.toml --overwrite",
    "explain-step llama-3.1-8b --device sim:h100-sxm --generation 4x100 --config damaged",
    "report damaged --output-csv a --report-json b --request-json c --iteration-log d --result-json e --overwrite",
)
READ_TABLE = (
    "report damaged",
    "report damaged --json",
    "plot damaged --html",
    "plot damaged",
    " ".join(SWEEP),
    " ".join((*SWEEP, "--overwrite")),
)
READ_POINTS = (" ".join(SWEEP), " ".join((*SWEEP, "--overwrite")))
READ_KEYS = ("config show --config damaged", "sweep --config damaged --quiet --output again --overwrite")
READ_REPEATS = ("report damaged", "report damaged --json", "compare damaged repeats")
QUICK, LONG = 45, 2_000


class Damage(NamedTuple):
    """One change of a file of `source`, and the commands that read it."""

    source: str
    file: str
    what: str
    content: str
    commands: tuple[str, ...]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, one with the executor's statistics, a sweep without its charts, which no command reads, and repeats."""
    folder = tmp_path_factory.mktemp("results")
    rows = [
        {
            "request_id": number,
            "arrival_s": number / 100,
            "prompt_len": 30 + number,
            "output_len": 6,
            "class": "ab"[number % 2],
        }
        for number in range(12)
    ]
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcomes = Outcomes("preparation")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        outcomes.attack([*RUN, "--output", "run"])
        outcomes.attack([*RUN, "--output", "executor", "--iteration_stats_format", "trtllm"])
        outcomes.attack([*RUN, "--output", "repeats", "--repeat", "2"])
        patch.setattr(sweep_charts, "save", lambda figure, directory, name: [directory / name])
        outcomes.attack(SWEEP)
    (folder / "damaged").rename(folder / "sweep")
    assert outcomes.statuses == {0: 4}, outcomes.problems
    return folder


def paths_in(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each value; of a list, to the first one."""
    yield path
    if isinstance(document, dict):
        for name, value in document.items():
            yield from paths_in(value, (*path, name))
    elif isinstance(document, list) and document:
        yield from paths_in(document[0], (*path, 0))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> str:
    """`document` as JSON with `value` at `path`."""
    document = json.loads(json.dumps({"document": document}))
    part, keys = document, ("document", *path)
    for key in keys[:-1]:
        part = part[key]
    if value is REMOVED:
        del part[keys[-1]]
    else:
        part[keys[-1]] = value
    return _written(document.get("document", {}))


def as_csv(rows: list[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _written(document: Any) -> str:
    return json.dumps(document).replace('"@1e400@"', "1e400").replace('"@nested@"', "[" * 3000 + "]" * 3000)


def damages(results: Path, draw: random.Random, share: float) -> Iterator[Damage]:
    """This share of all damages."""
    objects = [
        ("run", "run.json", READ_RUN),
        ("run", "summary.json", READ_RUN),
        ("repeats", "summary.json", READ_REPEATS),
    ]
    for source, file, commands in objects:
        document = json.loads((results / source / file).read_text())
        for path in paths_in(document):
            for value in VALUES:
                if draw.random() < share:
                    yield Damage(source, file, f"{path} {value}", changed(document, path, value), commands)
    names = ("requests.jsonl", "iterations.jsonl", "spans.jsonl", "trace.jsonl")
    lines = [
        *((source, name, READ_RUN) for source in ("run", "executor") for name in names),
        ("sweep", "points.jsonl", READ_POINTS),
    ]
    for source, file, commands in lines:
        rows, seen = (results / source / file).read_text().splitlines(), set()
        for number, row in enumerate(rows):
            document = json.loads(row)
            for path in [path for path in paths_in(document) if path not in seen]:
                seen.add(path)
                for value in VALUES:
                    if draw.random() < share:
                        content = "\n".join([*rows[:number], changed(document, path, value), *rows[number + 1 :], ""])
                        yield Damage(source, file, f"line {number + 1} {path} {value}", content, commands)
    table = list(csv.reader(io.StringIO((results / "sweep" / "sweep.csv").read_text())))
    for column, name in enumerate(table[0]):
        for text in TEXTS:
            if draw.random() < share:
                changed_table = [table[0], [*table[1][:column], text, *table[1][column + 1 :]], *table[2:]]
                yield Damage("sweep", "sweep.csv", f"{name} {text[:9]}", as_csv(changed_table), READ_TABLE)
    keys = (results / "sweep" / "sweep.yaml").read_text().splitlines()
    for number, line in enumerate(keys[1:], start=1):
        for text in (*TEXTS, "{}", "[" * 3000, "&a [*a]", ""):
            if draw.random() < share:
                content = "\n".join([*keys[:number], f"{line.partition(':')[0]}: {text}", *keys[number + 1 :]])
                yield Damage("sweep", "sweep.yaml", f"{line} {text[:9]}", content, READ_KEYS)
    for source, file in (("run", "run.json"), ("run", "summary.json"), ("sweep", "sweep.csv"), ("sweep", "sweep.yaml")):
        content = (results / source / file).read_text()
        for length in (0, 1, len(content) // 2, len(content) - 3):
            if draw.random() < share:
                commands = READ_RUN if source == "run" else READ_TABLE
                yield Damage(source, file, f"cut to {length}", content[:length], commands)


def attack(results: Path, count: int, seed: int, folder: Path) -> Outcomes:
    draw, outcomes = random.Random(seed), Outcomes("damaged result files")
    found = list(damages(results, draw, min(1.0, 3 * count / 20_000)))
    draw.shuffle(found)
    for one in found[:count]:
        for name in ("damaged", "again"):
            shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(results / one.source, folder / "damaged")
        (folder / "damaged" / one.file).write_text(one.content)
        slow = draw.random() < 0.9
        command = draw.choice([text for text in one.commands if not (slow and text.startswith(("plot", "calibrate")))])
        printed = outcomes.attack(command.split(), f"after {one.source}/{one.file}: {one.what}")
        assert sum(line.startswith("Error: ") for line in printed.splitlines()) <= 1, printed
        assert "\x1b" not in printed, (command, one, printed)
    return outcomes


@pytest.mark.parametrize("count", [QUICK, pytest.param(LONG, marks=pytest.mark.slow)])
def test_damaged_results_are_named(
    count: int, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    figures = itertools.count()

    def save_some(figure: Figure, directory: Path, name: str) -> list[Path]:
        return save(figure, directory, name) if next(figures) % 8 == 0 else [directory / f"{name}.png"]

    if count == QUICK:  # charts take nearly all of the time
        request.getfixturevalue("without_layout")
        monkeypatch.setitem(STYLE, "savefig.dpi", 40)
        monkeypatch.setattr(sweep_charts, "save", save_some)
    monkeypatch.chdir(tmp_path)
    for name in ("trace.jsonl", "run", "repeats"):
        (tmp_path / name).symlink_to(results / name)
    outcomes = attack(results, count, 1, tmp_path)
    print(outcomes.report())
    assert outcomes.tries >= min(count, 3000)
    assert not outcomes.problems, "\n\n".join([outcomes.report(), *outcomes.problems[:5]])


@pytest.mark.usefixtures("undrawn_sweeps")
@pytest.mark.parametrize("kind", ["pipe", "endless device", "directory"])
@pytest.mark.parametrize(
    ("source", "file", "commands"),
    [
        *(
            ("run", name, READ_RUN)
            for name in ("run.json", "summary.json", "requests.jsonl", "iterations.jsonl", "spans.jsonl", "trace.jsonl")
        ),
        ("repeats", "summary.json", READ_REPEATS),
        ("sweep", "sweep.csv", READ_TABLE),
        ("sweep", "sweep.json", READ_TABLE),
        ("sweep", "points.jsonl", READ_POINTS),
        ("sweep", "sweep.yaml", READ_KEYS),
    ],
)
def test_what_is_no_file_ends_no_command_late(
    source: str,
    file: str,
    commands: tuple[str, ...],
    kind: str,
    results: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("trace.jsonl", "run", "repeats"):
        (tmp_path / name).symlink_to(results / name)
    outcomes = Outcomes(kind)
    for command in commands:
        if command.startswith(("plot", "calibrate")) and (file, kind) != ("iterations.jsonl", "pipe"):
            continue  # they take seconds, and read by the same functions
        for name in ("damaged", "again"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        shutil.copytree(results / source, tmp_path / "damaged")
        place = tmp_path / "damaged" / file
        place.unlink()
        if kind == "pipe":
            os.mkfifo(place)
        elif kind == "directory":
            place.mkdir()
        else:
            place.symlink_to("/dev/zero")
        printed = outcomes.attack(command.split(), f"where {source}/{file} is a {kind}")
        assert sum(line.startswith("Error: ") for line in printed.splitlines()) <= 1, printed
    assert not outcomes.problems, "\n\n".join([outcomes.report(), *outcomes.problems])


@pytest.mark.parametrize(
    "command",
    [
        "report",
        "why --budget 0",
        "why --request 3",
        "compare run",
        "plot --html",
        "plot",
        "export",
        "export --format perfetto",
    ],
)
@pytest.mark.parametrize(("every", "form"), [(1, "jsonl"), (3, "jsonl"), (1, "jsonl.gz")])
def test_a_span_of_a_billion_iterations_takes_no_memory(
    every: int, form: str, command: str, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands_module, "LIMIT_BYTES", 2 << 30)
    (tmp_path / "run").symlink_to(results / "run")
    (tmp_path / "trace.jsonl").symlink_to(results / "trace.jsonl")
    outcomes = Outcomes("a billion iterations")
    outcomes.attack([*RUN, "--output", "damaged", "--iteration_stats_every", str(every), "--recording_format", form])
    path = tmp_path / "damaged" / f"spans.{form}"
    rows = [json.loads(line) for line in b"".join(read_pieces(path)).splitlines()]
    rows[-1]["last_iteration"] = 10**9
    with closing(open_to_write(path)) as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    name, *words = command.split()
    printed = outcomes.attack([name, *words, "damaged"])
    assert not outcomes.problems, outcomes.problems
    if command not in ("report", "compare run"):  # which need no span
        assert "ends with iteration 1,000,000,000; the run has fewer than" in printed
    assert "not enough memory" not in printed


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    ("file", "field", "value", "expected"),
    [
        ("iterations.jsonl", "Iteration Counter", 3_000_000, "has iteration 3000000, but"),
        ("iterations.jsonl", "start_s", 1e19, "line"),
    ],
)
def test_a_number_far_beyond_those_of_the_run_is_refused(
    file: str,
    field: str,
    value: float,
    expected: str,
    every: int,
    results: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Arrays of all iterations, and times in nanoseconds, would not hold it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.jsonl").symlink_to(results / "trace.jsonl")
    shutil.copytree(results / "run", tmp_path / "run")
    outcomes = Outcomes("numbers")
    outcomes.attack([*RUN, "--output", "damaged", "--iteration_stats_every", str(every)], "a run")
    path = tmp_path / "damaged" / file
    lines = path.read_text().splitlines()
    row = json.loads(lines[1])
    (row if field in row else row["ifbbench"])[field] = value
    path.write_text("\n".join([lines[0], json.dumps(row), *lines[2:]]) + "\n")
    for command in ("why damaged --budget 0", "export damaged --format perfetto", "plot damaged --only timeline"):
        printed = outcomes.attack(command.split(), f"{field} of {value} in {file}")
        refused = field != "start_s" or command.startswith("export")
        assert not refused or (f"Error: damaged/{file}" in printed and expected in printed), f"{command}: {printed}"
    assert not outcomes.problems, "\n\n".join([outcomes.report(), *outcomes.problems])


@pytest.mark.parametrize(
    ("column", "text", "expected"),
    [
        ("ttft_s.p99", "fast", "ttft_s.p99 is 'fast'; expected a finite number."),
        ("ttft_s.p99", "nan", "ttft_s.p99 is 'nan'; expected a finite number."),
        ("slo.ttft.met", "perhaps", "slo.ttft.met is 'perhaps'; expected true or false."),
        ("max_batch_size", "-1", "--max_batch_size is '-1'; expected an integer of at least 1"),
        ("type", "none", "--type is 'none'; expected one of"),
    ],
)
def test_a_cell_of_another_type_is_named(column: str, text: str, expected: str, results: Path, tmp_path: Path) -> None:
    table = list(csv.reader(io.StringIO((results / "sweep" / "sweep.csv").read_text())))
    table[2][table[0].index(column)] = text
    (tmp_path / "sweep.csv").write_text(as_csv(table))
    with pytest.raises(InputError) as raised:
        read_sweep(tmp_path)
    assert f"sweep.csv, line 3: {expected}" in str(raised.value)


def test_a_row_that_was_cut_off_is_named(results: Path, tmp_path: Path) -> None:
    *rows, last = (results / "sweep" / "sweep.csv").read_text().splitlines(keepends=True)
    (tmp_path / "sweep.csv").write_text("".join(rows) + last[: len(last) // 2])
    with pytest.raises(InputError, match=r"sweep.csv, line 3: \d+ cells; expected \d+, one for each column"):
        read_sweep(tmp_path)


def test_cells_have_the_types_of_the_run(results: Path) -> None:
    described = json.loads((results / "sweep" / "sweep.json").read_text())
    for read, written in zip(read_sweep(results / "sweep").rows, described, strict=True):
        lists = [name for name, value in written.items() if isinstance(value, list)]
        for name, value in chain(written.items()):
            assert name in lists or read[name] == (None if value == "" else value), name
            assert name in lists or type(read[name]) is type(None if value == "" else value), name


@pytest.mark.parametrize(
    ("source", "file", "command"),
    [
        ("run", "run.json", "report damaged"),
        ("run", "summary.json", "report damaged --json"),
        ("run", "summary.json", "compare run damaged"),
        ("run", "run.json", "run --config damaged --quiet --output again"),
        ("repeats", "summary.json", "report damaged"),
    ],
)
def test_a_key_that_is_there_twice_is_refused(
    source: str, file: str, command: str, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").symlink_to(results / "run")
    shutil.copytree(results / source, tmp_path / "damaged")
    path = tmp_path / "damaged" / file
    inner = '"ttft_s": {' if file == "summary.json" else '"config": {'
    path.write_text(path.read_text().replace(inner, inner + '"mean": 1.0, "seed": 1, "seed": 1, "mean": 1.0, ', 1))
    done = CliRunner().invoke(main, command.split())
    assert done.exit_code == 2
    assert "damaged" in done.stderr
    assert "is there twice; expected each key once" in done.stderr
