"""The command itself: its help without heavy imports, its errors and exit statuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ifbbench import __version__, compiled
from ifbbench.cli.main import COMMANDS, DEFECT, main
from ifbbench.errors import IfbbenchError, InputError

HEAVY = ("torch", "pandas", "matplotlib", "numpy", "triton", "transformers", "rich", "yaml")


@pytest.fixture
def replaced_run(monkeypatch):
    """Makes `ifbbench run` raise what the test chooses."""

    def replace(error: BaseException) -> None:
        def raise_error(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr("ifbbench.cli.run.given_config", raise_error)

    return replace


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["sweep", "--help"], ["plot", "--help"]])
def test_help_imports_nothing_heavy(arguments):
    code = (
        "import sys; from ifbbench.cli.main import main; main(sys.argv[1:], standalone_mode=False); "
        f"print('imported', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "imported []"


def test_help_names_every_command():
    printed = CliRunner().invoke(main, ["--help"]).output
    assert all(f"  {name} " in printed for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_be_loaded(name):
    done = CliRunner().invoke(main, [name, "--help"])
    assert done.exit_code == 0, done.output


def test_version():
    expected = f"ifbbench, version {__version__}, {compiled.description()}\n"
    assert CliRunner().invoke(main, ["--version"]).output == expected


def test_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "ifbbench", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: ifbbench ")


@pytest.mark.parametrize(("error", "status"), [(InputError("no such trace"), 2), (IfbbenchError("it broke"), 1)])
def test_an_error_is_one_line_and_an_exit_status(replaced_run, error, status):
    replaced_run(error)
    done = CliRunner().invoke(main, ["run"])
    assert done.exit_code == status
    assert done.stderr == f"Error: {error}\n"
    assert done.stdout == ""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        ImportError("/x/groupby.so: failed to map segment from shared object"),
        ImportError("libfoo.so: cannot allocate memory in static TLS block"),
    ],
)
def test_no_memory_left_is_no_defect(replaced_run, error):
    replaced_run(error)
    done = CliRunner().invoke(main, ["run"])
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: there is not enough memory (")
    assert "ulimit -v" in done.stderr
    assert DEFECT not in done.stderr


def test_an_interrupt_tells_where_results_are_kept(replaced_run):
    interrupt = KeyboardInterrupt()
    interrupt.add_note("The run is kept in results/x.")
    replaced_run(interrupt)
    done = CliRunner().invoke(main, ["run"])
    assert done.exit_code == 130
    assert done.stderr == "Interrupted. The run is kept in results/x.\n"


@pytest.mark.parametrize("arguments", [["rnu"], ["run", "--polcy", "x"], ["run", "a", "b"], ["sweep"], ["plot"]])
def test_bad_usage_is_status_2(arguments):
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert "Error: " in done.stderr


def test_debug_shows_the_traceback(replaced_run):
    replaced_run(InputError("no such trace"))
    for arguments in (["--debug", "run"], ["run", "--debug"]):
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 2
        lines = done.stderr.splitlines()
        assert lines[0] == "Traceback (most recent call last):"
        assert lines[-1] == "Error: no such trace"


def test_an_interrupt_before_a_run_speaks_of_no_directory(replaced_run):
    replaced_run(KeyboardInterrupt())
    done = CliRunner().invoke(main, ["run"])
    assert (done.exit_code, done.stderr) == (130, "Interrupted.\n")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["dataset", "info", "documentation"], ["report", "RUN"]]
)
def test_a_reader_that_has_seen_enough_is_no_error(arguments, tmp_path):
    command = [sys.executable, "-m", "ifbbench"]
    if "RUN" in arguments:
        run = ["run", "documentation", "--device", "null", "--time_scale", "0", "--quiet", "--output", "RUN"]
        subprocess.run([*command, *run], cwd=tmp_path, check=True)
    done = subprocess.Popen([*command, *arguments], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.stdout is not None
    assert done.stderr is not None
    done.stdout.close()
    assert (done.wait(timeout=300), done.stderr.read()) == (0, b"")
    done.stderr.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("run --num_requests 3", "No such option: --num_requests. Did you mean --max_num_samples?"),
        ("run --num-prompts=3", "No such option: --num-prompts. Did you mean --max-num-samples?"),
        ("run --n-batch 8", "Did you mean --max-num-tokens?"),
        ("capacity --tp 8", "Did you mean --tp_size?"),
        ("run --input_file x", "No such option: --input_file. Give the trace as an argument: ifbbench run TRACE."),
        ("run --goodput 3", "No such option: --goodput. Did you mean --slo?"),
        ("run --max-batchsize 3", "No such option: --max-batchsize. Did you mean --max-batch-size"),
        ("report --output_cvs x", "Did you mean --output_csv?"),
        ("dataset synth multi-turn --num-reqests 3", "No such option: --num-reqests. Did you mean --num-requests"),
        ("run --output_csv --quiet", "--output_csv needs a value, but --quiet follows it."),
        ("report run --output-csv --debug", "--output_csv needs a value, but --debug follows it."),
    ],
)
def test_options_that_do_not_exist_are_explained_in_their_own_spelling(arguments, words):
    done = CliRunner().invoke(main, arguments.split())
    assert done.exit_code == 2
    assert words in done.stderr


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_an_output_that_is_not_utf_8_has_other_characters_and_no_error(
    environment: dict[str, str], tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-m",
        "ifbbench",
        "run",
        "documentation",
        "--device",
        "null",
        "--time_scale",
        "0",
        "--quiet",
        "--output",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONCOERCECLOCALE": "0"} | environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"Requests completed" in done.stdout
    if "PYTHONIOENCODING" in environment:
        assert b"documentation ? guaranteed_no_evict" in done.stdout


@pytest.mark.parametrize("backend", ["nonsense", "TkAgg"])
def test_charts_do_not_depend_on_the_backend_of_the_environment(backend: str, tmp_path: Path) -> None:
    directory = str(tmp_path / "run")
    run = ["run", "documentation", "--device", "null", "--time_scale", "0", "--quiet", "--output", directory]
    assert CliRunner().invoke(main, run).exit_code == 0
    command = [sys.executable, "-m", "ifbbench", "plot", directory, "--only", "timeline", "--format", "png"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"MPLBACKEND": backend})
    assert done.returncode == 0, done.stderr
