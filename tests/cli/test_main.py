"""The command itself: its help without heavy imports, its errors and exit statuses."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from ifbbench import __version__
from ifbbench.cli.main import COMMANDS, main
from ifbbench.errors import IfbbenchError, InputError

HEAVY = ("torch", "pandas", "matplotlib", "numpy", "triton", "transformers", "rich", "yaml")


@pytest.fixture
def replaced_run(monkeypatch):
    """Makes `ifbbench run` raise what the test chooses."""

    def replace(error: BaseException) -> None:
        def raise_error(*_: object) -> None:
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
    assert CliRunner().invoke(main, ["--version"]).output == f"ifbbench, version {__version__}\n"


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
