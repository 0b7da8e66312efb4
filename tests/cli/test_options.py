"""Options and config files become the settings of a run."""

import re

import click
import pytest
from click.testing import CliRunner

from ifbbench.cli.given_settings import given_config
from ifbbench.cli.main import main
from ifbbench.cli.options import SettingsCommand
from ifbbench.serving.routing.config import serve_settings
from ifbbench.settings.config import RunConfig, settings
from ifbbench.settings.names import from_mapping


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
    done = CliRunner().invoke(main, ["run", "--quiet", *arguments])
    assert done.exit_code == 2, done.output
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.fixture(scope="module")
def help_of_all() -> str:
    return CliRunner().invoke(main, ["run", "--help", "all"]).output


@pytest.mark.parametrize("setting", list(settings()), ids=lambda setting: setting.name)
def test_help_of_all_shows_each_setting_with_its_aliases(setting, help_of_all):
    printed = help_of_all
    for name in (setting.name, *setting.aliases):
        assert re.search(rf"--{name}\b", printed)
        assert bool(re.search(rf"--no_{name}\b", printed)) == (setting.type is bool)


def listed(*words: str) -> dict[str, list[str]]:
    """The first name of each option in the help of a command, by section."""
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    sections = re.split(r"^([A-Z ]+) OPTIONS:$", done.stdout, flags=re.MULTILINE)[1:]
    names = [re.findall(r"^  (?:-\w, )?--(\w+)", text, re.MULTILINE) for text in sections[1::2]]
    return dict(zip(sections[::2], names, strict=True))


def test_help_of_all_has_a_section_for_each_group():
    assert list(listed("run", "--help", "all")) == [
        "COMMAND",
        "REPLAY",
        "FLEET",
        "ENDPOINT",
        "SCHEDULING",
        "VLLM",
        "SGLANG",
        "KV CACHE",
        "LORA",
        "EXECUTION",
        "RECORDING",
    ]


@pytest.mark.parametrize(
    ("command", "most"), [("run", 30), ("sweep", 35), ("tune", 31), ("generate", 30), ("serve", 45)]
)
def test_help_lists_the_common_options_and_names_the_way_to_the_others(command, most):
    few, every = listed(command, "--help"), listed(command, "--help", "all")
    shown = [name for names in few.values() for name in names]
    assert len(shown) <= most
    assert {"max_batch_size", "max_num_tokens", "policy", "device", "model", "help"} <= {*shown}
    assert {*shown} < {name for names in every.values() for name in names}
    rest = sum(map(len, every.values())) - len(shown)
    printed = " ".join(CliRunner().invoke(main, [command, "-h"]).stdout.split())
    assert f"--help all lists {rest} more options, --help GROUP those of a group: " in printed


@pytest.mark.parametrize(
    "words", [["--help", "kv_cache"], ["--help=kv-cache"], ["-h", "KV cache"], ["chat", "-h", "kv-cache"]]
)
def test_help_of_a_group_is_that_section_of_all(words):
    assert listed("run", *words) == {"KV CACHE": listed("run", "--help", "all")["KV CACHE"]}


def test_help_of_one_option():
    assert listed("run", "--help", "max-num-tokens") == {"SCHEDULING": ["max_num_tokens"]}
    assert listed("tune", "--help", "max_gpus") == {"COMMAND": ["max"]}  # --max-gpus


def test_help_of_an_unknown_group_says_which_there_are():
    done = CliRunner().invoke(main, ["run", "--help", "cach"])
    assert done.exit_code == 2
    assert (
        "expected all, command, replay, fleet, endpoint, scheduling, vllm, sglang, kv-cache, lora, execution, recording"
        in done.stderr
    )
    assert "`--help all`" in CliRunner().invoke(main, ["run", "--help-all"]).stderr


def test_groups_of_help_are_completed(monkeypatch):
    monkeypatch.setenv("COMP_WORDS", "ifbbench run --help k")
    monkeypatch.setenv("COMP_CWORD", "3")
    done = CliRunner().invoke(main, prog_name="ifbbench", env={"_IFBBENCH_COMPLETE": "bash_complete"})
    assert done.stdout.splitlines() == ["plain,kv-cache"]


def test_texts_of_all_sections_begin_in_one_column():
    texts = re.findall(r"^(  -.*?  +)\S", CliRunner().invoke(main, ["run", "--help"]).stdout, re.MULTILINE)
    assert {len(text) for text in texts if len(text) <= 34} == {34}


def test_nothing_given_is_all_defaults(config_of):
    assert config_of() == from_mapping({}, command_line=True)


def test_underscores_and_dashes_are_the_same(config_of):
    assert config_of("--max-batch-size", "4", "--max_num_tokens=64") == from_mapping(
        {"max_batch_size": 4, "max_num_tokens": 64}, command_line=True
    )


@pytest.mark.parametrize(
    ("option", "value"), [("--enable_chunked_context", True), ("--no-enable-chunked-context", False)]
)
def test_booleans_come_in_pairs(config_of, option, value):
    assert config_of(option).enable_chunked_context is value


def test_aliases(config_of):
    config = config_of("--scheduler_policy", "max_utilization", "--random-seed", "7")
    assert (config.policy, config.seed) == ("max_utilization", 7)


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["--type", "IFB"], {"type": "inflight_fused"}),
        (["--type=v1"], {"type": "v1"}),
        (["--type", "UIFB"], {"type": "inflight_unfused"}),
        (["--early-stopping", "never"], {"early_stopping": "never"}),
        (["--scheduler-policy", "GUARANTEED_NO_EVICT"], {"policy": "guaranteed_no_evict"}),
        (["--policy", "own.policies:Mine"], {"policy": "own.policies:Mine"}),
        (["--enable_trt_overlap"], {"enable_trt_overlap": True}),
        (["--beam_width", "2", "--max_beam_width", "4"], {"beam_width": 2, "max_beam_width": 4}),
        (["--static_emulated_batch_size", "8"], {"static_emulated_batch_size": 8}),
        (["--static_emulated_timeout", "20"], {"static_emulated_timeout": 20}),
        (["--end_id", "-1", "--pad-id=0"], {"eos_id": -1, "pad_id": 0}),
        (["--streaming", "--return_log_probs"], {"streaming": True, "return_log_probs": True}),
        (["--return-context-logits"], {"return_context_logits": True}),
        (["--return_generation_logits"], {"return_generation_logits": True}),
        (["--exclude_input_in_output_seq"], {"exclude_input_in_output_seq": True}),
        (["--concurrency", "3", "--wait_sleep", "25"], {"concurrency": 3, "wait_sleep": 25}),
        (["--repetition_penalty", "1.2"], {"repetition_penalty": 1.2}),
        (["--length_penalty", "-0.5"], {"length_penalty": -0.5}),
        (["--max_tokens", "640"], {"max_tokens_in_paged_kvcache": 640}),
        (["--log_iteration_data"], {"log_iteration_data": True}),
        (["--no_enable_block_reuse", "--sink_token_length", "0", "--host_cache_size", "0"], {}),
        (["--enable_kv_cache_reuse"], {"enable_kv_cache_reuse": True}),
        (
            ["--enable-block-reuse", "--no_enable_partial_reuse", "--no_copy_on_partial_reuse"],
            {"enable_kv_cache_reuse": True, "enable_partial_reuse": False, "copy_on_partial_reuse": False},
        ),
        (["--max_attention_window", "512,1024"], {"max_attention_window": "512,1024"}),
        (["--sink_token_len", "4", "--window_mode", "Linear"], {"sink_token_len": 4, "window_mode": "linear"}),
        (["--host_cache_size", "1000000"], {"kv_host_cache_bytes": 1_000_000}),
        (["--kv_host_cache_bytes", "40GiB"], {"kv_host_cache_bytes": 40 * 2**30}),
        (["--kv_host_cache_bytes", "40GB"], {"kv_host_cache_bytes": 40 * 10**9}),
        (
            ["--kv_cache_dtype", "fp8", "--kv_cache_type=contiguous"],
            {"kv_cache_dtype": "fp8", "kv_cache_type": "contiguous"},
        ),
    ],
)
def test_gpt_manager_benchmarks_options(config_of, arguments, values):
    assert config_of(*arguments) == from_mapping(values, command_line=True)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--kv_cache_type", "contiguous", "--enable_kv_cache_reuse"], "enable_kv_cache_reuse"),
        (["--kv_cache_type", "contiguous", "--host_cache_size", "9999999"], "kv_host_cache_bytes"),
        (["--kv_cache_type", "contiguous", "--policy", "max_utilization"], "kv_cache_type contiguous"),
        (["--max_attention_window", "512,1024", "--enable-block-reuse"], "enable_kv_cache_reuse"),
        (["--max_attention_window", "512,1024", "--host_cache_size", "9999999"], "kv_host_cache_bytes"),
        (["--max_attention_window", "512,many"], "max_attention_window: '512,many'"),
        (["--max_attention_window", "0"], "max_attention_window: '0'"),
        (["--max_attention_window", "64", "--sink_token_len", "64"], "sink_token_len: 64"),
        (["--kv_cache_dtype", "int8"], "kv_cache_dtype is 'int8'"),
        (["--kv_cache_type", "piecewise"], "kv_cache_type is 'piecewise'"),
        (["--window_mode", "round"], "window_mode is 'round'"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "null"])
def test_caches_that_cannot_be_are_refused_before_anything_is_written(arguments, name, device, tmp_path):
    error = error_of("--device", device, "--output", str(tmp_path / "run"), *arguments)
    assert error.startswith(f"Error: --{name}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--type", "continuous"], ["--type", "'continuous'", "v1, inflight_unfused, inflight_fused"]),
        (["--early_stopping", "soon"], ["--early_stopping", "always, heuristic, never"]),
        (["--eos_id", "-2"], ["--eos_id", "at least -1"]),
        (["--repetition_penalty", "0"], ["--repetition_penalty", "above 0"]),
        (["--concurrency", "0"], ["--concurrency", "at least 1 (requests)"]),
        (["--static_emulated_batch_size", "0"], ["--static_emulated_batch_size", "at least 1 (requests)"]),
        (
            ["--policy", "first_come", "--device", "null"],
            ["--policy", "'first_come'", "guaranteed_no_evict", "ifbbench.policies"],
        ),
        (["--max_batch_size", "0"], ["--max_batch_size", "integer of at least 1"]),
        (["--max_num_tokens", "-1"], ["--max_num_tokens", "-1", "at least 1"]),
        (["--max_num_tokens", "many"], ["--max_num_tokens", "'many'", "an integer"]),
        (["--kv_cache_free_gpu_mem_fraction", "1.5"], ["at most 0.99"]),
    ],
)
def test_a_wrong_value_is_reported_with_what_was_expected(arguments, words):
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
    wanted = RunConfig(
        policy="max_utilization", max_batch_size=8, device="null", quiet=True, enable_chunked_context=None
    )
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
        ("run.yaml", "seed: [1, 2]\n", ["seed is ['1', '2']", "an integer"]),
        ("run.yaml", "seed: 1\nrandom_seed: 2\n", ["seed is given twice"]),
        ("run.yaml", "- seed\n", ["a table of settings"]),
        ("run.yaml", "seed: [\n", ["not valid YAML"]),
        ("run.toml", "seed = \n", ["not valid TOML"]),
        ("run.ini", "seed = 1\n", [".toml, .yaml or .yml"]),
    ],
)
def test_a_bad_config_file_is_reported_by_name(tmp_path, name, text, words):
    path = tmp_path / name
    path.write_text(text)
    error = error_of("--config", str(path))
    assert all(word in error for word in [str(path), *words])


def test_a_missing_config_file(tmp_path):
    assert "cannot be read" in error_of("--config", str(tmp_path / "none.yaml"))


def test_an_empty_config_file_changes_nothing(config_of, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("# nothing yet\n")
    assert config_of("--config", str(path)) == from_mapping({}, command_line=True)


@pytest.mark.parametrize("name", [one.name for one in settings() if one.unit == "bytes"])
@pytest.mark.parametrize(("text", "suffix"), [("{}: 40GB", ".yaml"), ('{} = "40GB"', ".toml"), ("{} = 4e10", ".toml")])
def test_every_number_of_bytes_takes_units_in_files_and_options(config_of, tmp_path, name, text, suffix):
    path = tmp_path / f"config{suffix}"
    path.write_text(text.format(name))
    found = config_of("--config", str(path)), config_of(f"--{name}", "40GB")
    assert [getattr(config, name) for config in found] == [4 * 10**10] * 2
    help_text = CliRunner().invoke(main, ["run", "--help", name]).output
    assert "40GiB" in help_text


def test_other_numbers_of_bytes_take_units():
    server = {one.name: one for one in serve_settings()}
    assert server["max_body_bytes"].check("2MiB") == 2 * 2**20
    arguments = ["capacity", "tiny", "--json", "--memory-bytes"]
    texts = [CliRunner().invoke(main, [*arguments, size]).stdout for size in ("1GiB", str(2**30))]
    assert texts[0] == texts[1] != ""
    result = CliRunner().invoke(main, [*arguments, "1XB"])
    assert result.exit_code == 2
    assert "--memory-bytes is '1XB'" in result.stderr
