"""Policies by name: built-in ones, a user's class, and entry points of installed packages."""

import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.errors import InputError
from ifbbench.schedulers.tensorrt_llm.policies import ENTRY_POINT_GROUP, POLICY_CLASSES, find_policy
from ifbbench.settings.groups.scheduling import POLICIES

MODULE = """
class Careful:
    def __init__(self, max_num_requests):
        self.limit = max_num_requests

    def schedule(self, active, kv_cache):
        return None


class NoSchedule:
    def __init__(self, max_num_requests):
        pass


class TooMany(Careful):
    def __init__(self, max_num_requests, colour):
        pass


class Failing(Careful):
    def __init__(self, max_num_requests):
        raise KeyError("weights")


class FailsLater(Careful):
    def schedule(self, active, kv_cache):
        if self.limit:
            return {}["fairness"]


class FailsWithin(Careful):
    def schedule(self, active, kv_cache):
        return kv_cache.blocks_for("abc")


def make(max_num_requests):
    return Careful(max_num_requests + 1)


def make_nothing(max_num_requests):
    return 5


NUMBER = 7
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """`own_policies.py` is in the current directory, from which Python does not import by itself."""
    (tmp_path / "own_policies.py").write_text(MODULE)
    (tmp_path / "broken_policies.py").write_text("import there_is_no_such_module\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield "own_policies"
    sys.modules.pop("own_policies", None)


@pytest.fixture
def installed(monkeypatch):
    """Pretends that packages with these entry points are installed."""

    def install(**values: str) -> None:
        entries = EntryPoints(EntryPoint(name, value, ENTRY_POINT_GROUP) for name, value in values.items())
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries.select(group=group))

    return install


def error_of(name: str) -> str:
    with pytest.raises(InputError) as caught:
        find_policy(name)(8)
    return str(caught.value)


@pytest.mark.parametrize("name", POLICIES)
def test_built_in_policies(name):
    assert type(find_policy(name)(8)) is POLICY_CLASSES[name]


def test_every_built_in_policy_is_a_choice_of_the_setting():
    assert tuple(POLICY_CLASSES) == POLICIES


@pytest.mark.parametrize(("attribute", "limit"), [("Careful", 8), ("make", 9)])
def test_a_class_in_the_current_directory(module, attribute, limit):
    path = list(sys.path)
    assert vars(find_policy(f"{module}:{attribute}")(8)) == {"limit": limit}
    assert sys.path == path


def test_an_entry_point(module, installed, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    installed(careful=f"{module}:Careful")
    assert vars(find_policy("careful")(8)) == {"limit": 8}


def test_an_unknown_name_is_reported_with_all_valid_ones(installed):
    installed(careful="own_policies:Careful")
    error = error_of("max_utilisation")
    assert "--policy: 'max_utilisation'" in error
    assert all(name in error for name in (*POLICIES, "careful", ENTRY_POINT_GROUP, "package.module:ClassName"))
    assert "Did you mean max_utilization?" in error


def test_an_unknown_name_without_any_installed_policy(installed):
    installed()
    error = error_of("zzz")
    assert "none here" in error
    assert "Did you mean" not in error


def test_an_entry_point_that_cannot_be_loaded(installed):
    installed(careful="there_is_no_such_module:Careful")
    error = error_of("careful")
    assert "'there_is_no_such_module:Careful' cannot be loaded" in error
    assert "ModuleNotFoundError" in error


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_policies:Careful", ["'no_such_policies' cannot be imported", "ModuleNotFoundError", "directory"]),
        ("broken_policies:Careful", ["'broken_policies' cannot be imported", "there_is_no_such_module"]),
        (":Careful", ["'' cannot be imported", "package.module:ClassName"]),
        ("own_policies:Carful", ["has no 'Carful'", "Did you mean Careful?"]),
        ("own_policies:", ["has no ''", "package.module:ClassName"]),
        ("own_policies:NUMBER", ["is of type int, not a class", "schedule(active, kv_cache)"]),
        ("own_policies:NoSchedule", ["no method `schedule`", "CapacityDecision"]),
        ("own_policies:make_nothing", ["no method `schedule`", "(int)"]),
        ("own_policies:TooMany", ["missing a required argument: 'colour'", "__init__(self, max_num_requests)"]),
        ("own_policies:Failing", ["cannot be made for 8 requests", "KeyError: 'weights'"]),
    ],
)
def test_what_is_no_policy_is_refused_by_name(module, name, words):
    error = error_of(name)
    assert all(word in error for word in [f"--policy: {name!r}", *words]), error


def line_with(text: str) -> int:
    """Number of the line of MODULE that contains `text`."""
    return MODULE[: MODULE.index(text)].count("\n") + 1


def run_with(policy: str, tmp_path):
    arguments = ["run", "--device", "null", "--quiet", "--policy", policy, "--output", str(tmp_path / "run")]
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize(
    ("attribute", "error", "line"),
    [("FailsLater", "KeyError: 'fairness'", '{}["fairness"]'), ("FailsWithin", "AttributeError: ", "blocks_for")],
)
def test_a_policy_that_raises_in_a_run_is_named_with_file_and_line(module, tmp_path, attribute, error, line):
    result = run_with(f"{module}:{attribute}", tmp_path)
    assert result.exit_code == 1
    assert f"policy {module}:{attribute} failed: {error}" in result.output
    assert f"{tmp_path / module}.py, line {line_with(line)})" in result.output


def test_a_class_that_cannot_be_made_is_shown_with_file_and_line(module, tmp_path):
    assert f"{tmp_path / module}.py, line {line_with('raise')})" in error_of(f"{module}:Failing")


def test_a_module_that_cannot_be_imported_is_shown_with_file_and_line(module, tmp_path):
    assert f"{tmp_path}/broken_policies.py, line 1)" in error_of("broken_policies:Careful")
    (tmp_path / "unreadable_policies.py").write_text("x = 1\nclass\n")
    error = error_of("unreadable_policies:X")
    assert f"SyntaxError: invalid syntax ({tmp_path}/unreadable_policies.py, line 2)" in error
