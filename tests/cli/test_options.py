"""Options and config files become the settings of a run."""

import re

import click
import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.cli.options import SettingsCommand, given_config
from ifbbench.config import RunConfig, settings


@pytest.fixture
def config_of(monkeypatch):
    """The RunConfig that `ifbbench run` makes of its arguments."""

    def parse(*arguments: str) -> RunConfig:
        made: list[RunConfig] = []

        @click.command(cls=SettingsCommand)
        def keep(config_file, **options):
            made.append(given_config(config_file, options))

        monkeypatch.setattr("ifbbench.cli.run.run", keep)
        done = CliRunner().invoke(main, ["run", *arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return made[0]

    return parse


def error_of(*arguments: str) -> str:
    done = CliRunner().invoke(main, ["run", *arguments])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.parametrize("setting", list(settings()), ids=lambda setting: setting.name)
def test_help_shows_each_setting_with_its_aliases(setting):
    printed = CliRunner().invoke(main, ["run", "--help"]).output
    for name in (setting.name, *setting.aliases):
        assert re.search(rf"--{name}\b", printed)
        assert bool(re.search(rf"--no_{name}\b", printed)) == (setting.type is bool)


def test_nothing_given_is_all_defaults(config_of):
    assert config_of() == RunConfig()


def test_underscores_and_dashes_are_the_same(config_of):
    assert config_of("--max-batch-size", "4", "--max_num_tokens=64") == RunConfig(max_batch_size=4, max_num_tokens=64)


@pytest.mark.parametrize(
    ("option", "value"), [("--enable_chunked_context", True), ("--no-enable-chunked-context", False)]
)
def test_booleans_come_in_pairs(config_of, option, value):
    assert config_of(option).enable_chunked_context is value


def test_aliases(config_of):
    config = config_of("--scheduler_policy", "max_utilization", "--random-seed", "7")
    assert (config.policy, config.seed) == ("max_utilization", 7)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "first_come"], ["--policy", "'first_come'", "guaranteed_no_evict"]),
        (["--max_batch_size", "0"], ["--max_batch_size", "integer of at least 1"]),
        (["--max_num_tokens", "-1"], ["--max_num_tokens", "-1", "at least 1"]),
        (["--max_num_tokens", "many"], ["--max_num_tokens", "'many'", "an integer"]),
        (["--kv_cache_free_gpu_mem_fraction", "1.5"], ["at most 0.99"]),
    ],
)
def test_a_wrong_value_is_told_with_what_was_expected(arguments, words):
    error = error_of(*arguments)
    assert all(word in error for word in words)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", "scheduler-policy: max_utilization\nmax_batch_size: 8\ndevice: null\nquiet: true\n"),
        ("run.toml", 'scheduler-policy = "max_utilization"\nmax_batch_size = 8\ndevice = "null"\nquiet = true\n'),
    ],
)
def test_config_file(config_of, tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    wanted = RunConfig(policy="max_utilization", max_batch_size=8, device="null", quiet=True)
    assert config_of("--config", str(path)) == wanted


def test_the_command_line_wins_over_the_config_file(config_of, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("max_batch_size: 8\nseed: 3\nquiet: true\n")
    config = config_of("--config", str(path), "--max_batch_size", "4", "--no_quiet")
    assert (config.max_batch_size, config.seed, config.quiet) == (4, 3, False)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("run.yaml", "max_batch: 8\n", ["'max_batch' is not a setting", "max_batch_size"]),
        ("run.yaml", "max_batch_size: 0\n", ["max_batch_size", "at least 1"]),
        ("run.yaml", "enable_chunked_context: perhaps\n", ["enable_chunked_context", "true or false"]),
        ("run.yaml", "seed: [1, 2]\n", ["seed", "an integer", "list"]),
        ("run.yaml", "seed: 1\nrandom_seed: 2\n", ["seed is given twice"]),
        ("run.yaml", "- seed\n", ["a table of settings"]),
        ("run.yaml", "seed: [\n", ["not valid YAML"]),
        ("run.toml", "seed = \n", ["not valid TOML"]),
        ("run.ini", "seed = 1\n", [".toml, .yaml or .yml"]),
    ],
)
def test_a_bad_config_file_is_told_by_name(tmp_path, name, text, words):
    path = tmp_path / name
    path.write_text(text)
    error = error_of("--config", str(path))
    assert all(word in error for word in [str(path), *words])


def test_a_missing_config_file(tmp_path):
    assert "cannot be read" in error_of("--config", str(tmp_path / "none.yaml"))


def test_an_empty_config_file_changes_nothing(config_of, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("# nothing yet\n")
    assert config_of("--config", str(path)) == RunConfig()
