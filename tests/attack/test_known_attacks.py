"""Inputs that brought a command down once, each with what it answers now."""

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from ifbbench import BatchManager
from ifbbench.clock import NANOSECONDS
from ifbbench.engine.passes import NullExecutor
from ifbbench.errors import InputError
from ifbbench.replay.single import engine_for
from ifbbench.serving.texts import ChatTemplate
from ifbbench.settings.config import RunConfig, settings
from ifbbench.virtual_clock import VirtualClock, tick
from ifbbench.workload.load import load_trace
from tests.attack.commands import Outcomes
from tests.attack.inputs import NULL, ROWS, SIMULATED
from tests.attack.model_parts import TOKENIZER
from tests.attack.models import MODEL
from tests.endpoint.fake_endpoint import STREAM, Received, Writer, fake_endpoint, token
from tests.torch.model.test_lora_files import save_adapter

pytestmark = pytest.mark.usefixtures("small_model")

SPEC = "num_requests: 5\nprompt_len: {distribution: fixed, value: %s}\noutput_len: {distribution: fixed, value: 3}\n"


def ends(status: int, *arguments: str) -> str:
    """What `ifbbench ARGUMENTS` prints; it must end with `status`, without a traceback."""
    outcomes = Outcomes("known")
    text = outcomes.attack(arguments)
    assert not outcomes.problems, outcomes.problems
    assert dict(outcomes.statuses) == {status: 1}, text
    return text


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return written(tmp_path, *ROWS)


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(status: int, trace: Path, *options: str) -> str:
    return ends(status, "run", str(trace), *SIMULATED, "--output", str(trace.parent / "run"), *options)


# Time.


def test_time_stamps_since_1970_count_from_the_first(tmp_path: Path) -> None:
    rows = [{"arrival_s": 1601944424.251 + gap, "prompt_len": 10, "output_len": 3} for gap in (0.5, 0.0)]
    run(0, written(tmp_path, *rows))
    lines = [json.loads(line) for line in (tmp_path / "run" / "requests.jsonl").read_text().splitlines()]
    assert sorted(line["arrival_s"] for line in lines) == pytest.approx([0.0, 0.5], abs=1e-6)


@pytest.mark.parametrize("options", [(), ("--wait_sleep", "1")])
def test_arrivals_beyond_2_to_the_53_nanoseconds_end(tmp_path: Path, options: tuple[str, ...]) -> None:
    rows = [{"arrival_s": arrival_s, "prompt_len": 10, "output_len": 3} for arrival_s in (0.0, 1601944424.251)]
    run(0, written(tmp_path, *rows), *options)


def test_a_rate_below_one_in_a_hundred_days_ends(trace: Path) -> None:
    run(0, trace, "--request_rate", "1e-7", "--enable_exp_delays", "--max_num_samples", "3")


@pytest.mark.parametrize("options", [("--time_scale", "1e9"), ("--request_rate", "1e-300")])
def test_arrivals_of_more_than_a_hundred_years_are_refused(trace: Path, options: tuple[str, ...]) -> None:
    rows = [row | {"arrival_s": row["arrival_s"] * 100} for row in ROWS[:3]]
    text = run(2, written(trace.parent, *rows), *options)
    assert "expected at most 3.16e+09 s (100 years)" in text


def test_a_clock_reaches_any_time() -> None:
    draw, clock = random.Random(3), VirtualClock()
    for seconds in sorted(draw.uniform(0, 10 ** draw.uniform(-9, 12)) for _ in range(2_000)):
        clock.wait_until_ns(tick(seconds))
        assert clock.now() >= seconds
        clock.wait_until(tick(seconds) / NANOSECONDS)
        assert clock.now() >= seconds


def test_a_run_that_waits_for_days_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"arrival_s": arrival_s, "prompt_len": 10, "output_len": 3} for arrival_s in (0.0, 360_000.0)]
    config = RunConfig(device="null")
    with engine_for(load_trace(written(tmp_path, *rows), config), config):
        assert "the last request arrives after 100.0 h on the wall clock" in caplog.text


# Sizes.


def test_every_number_has_an_upper_bound() -> None:
    for one in settings():
        if one.type in (int, float):
            assert one.maximum is not None
            with pytest.raises(InputError, match=rf"--{one.name} is .*(at most| to )"):
                one.check("1e300" if one.type is float else 10**30)


@pytest.mark.parametrize("length", [2**31, 2**32 + 1, 2**63, 10**30])
def test_a_length_that_would_wrap_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC % length)
    assert "prompt_len: value is" in run(2, path)


def test_lengths_whose_sum_would_wrap_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(
        SPEC % (2**31 - 1) + "sessions: {turns: {distribution: fixed, value: 3}, think_time: "
        "{distribution: fixed, value: 1}}\n"
    )
    assert "a conversation has 6,442,450,947 tokens; expected at most 16,777,216" in run(2, path)


def test_tables_beyond_memory_are_refused_with_their_size(trace: Path) -> None:
    text = ends(
        2,
        "run",
        str(trace),
        "--device",
        "null",
        "--max_batch_size",
        "1000000",
        "--max_seq_len",
        "2000000000",
        "--output",
        str(trace.parent / "run"),
    )
    assert "the block tables of 1,000,008 requests" in text
    assert not (trace.parent / "run").exists()


# Texts.


@pytest.mark.parametrize("arguments", [("run", ""), ("run", "--output="), ("run", "--output", ""), ("report", "")])
def test_an_unset_variable_is_an_error(arguments: tuple[str, ...]) -> None:
    assert "Is a shell variable unset?" in ends(2, *arguments)


@pytest.mark.parametrize("name", ["../../x", "/x", "..", "a/b", "x" * 300, "a\\u001b[31m"])
def test_a_specification_cannot_name_another_folder(tmp_path: Path, name: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(f'name: "{name}"\n' + SPEC % 7)
    assert "name is" in run(2, path)


@pytest.mark.parametrize("suffix", ["yaml", "toml"])
@pytest.mark.parametrize("command", [("run",), ("run", "--config")])
def test_deep_nesting_is_refused(tmp_path: Path, suffix: str, command: tuple[str, ...]) -> None:
    path = tmp_path / f"deep.{suffix}"
    path.write_text(("a = " if suffix == "toml" else "a: ") + "[" * 5_000 + "]" * 5_000)
    ends(2, *command, str(path), *SIMULATED)


@pytest.mark.parametrize("command", [("run",), ("run", "--config")])
def test_aliases_that_multiply_are_refused_at_once(tmp_path: Path, command: tuple[str, ...]) -> None:
    path = tmp_path / "aliases.yaml"
    lists = "".join(f"a{depth}: &a{depth} [{', '.join([f'*a{depth - 1}'] * 9)}]\n" for depth in range(1, 25))
    path.write_text(f"a0: &a0 [x]\n{lists}num_requests: *a24\nmax_batch_size: *a24\n")
    ends(2, *command, str(path), *SIMULATED)


def test_escape_sequences_do_not_reach_the_terminal(tmp_path: Path) -> None:
    text = run(2, written(tmp_path, {"\x1b[31mred": 1, "\x1b]0;title\x07": 2}))
    assert "red" in text
    assert "\x1b" not in text


def test_a_long_file_name_is_refused(trace: Path) -> None:
    ends(2, "run", "x" * 300, *SIMULATED)
    ends(2, "run", str(trace), *SIMULATED, "--config", "x" * 300 + ".yaml")


# Models.


def test_a_weight_index_cannot_name_another_folder(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    index = {"weight_map": {"model.embed_tokens.weight": "../other/model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    text = ends(
        2,
        "run",
        str(trace),
        "--model",
        str(tmp_path),
        "--device",
        "cpu",
        "--quiet",
        "--max_seq_len",
        "64",
        "--output",
        str(tmp_path / "run"),
    )
    assert "expected the name of a file beside the index" in text


# Policies.

POLICY = """
import os
import time

from ifbbench.schedulers.tensorrt_llm.policies import CapacityDecision, LeftOut, Pause

class Exits:
    def __init__(self, max_num_requests):
        pass
    def schedule(self, active, kv_cache):
        raise SystemExit(0)

class Slow(Exits):
    def schedule(self, active, kv_cache):
        time.sleep(0.5)
        raise ValueError("late")

class Leaves(Exits):
    def schedule(self, active, kv_cache):
        raise GeneratorExit

class Answers(Exits):
    answer = None
    def schedule(self, active, kv_cache):
        return self.answer

class Decides(Exits):
    def schedule(self, active, kv_cache):
        decision, requests = CapacityDecision(admitted=list(active.context)), list(active)
        exec(os.environ["ATTACK"])
        return decision
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "attacking_policies.py").write_text(POLICY)
    monkeypatch.chdir(tmp_path)


def test_what_ends_the_program_is_no_policy(trace: Path) -> None:
    assert "is of type builtin_function_or_method, not a class" in run(2, trace, "--policy", "os:_exit")


@pytest.mark.usefixtures("module")
def test_a_policy_that_exits_has_failed(trace: Path) -> None:
    text = run(1, trace, "--policy", "attacking_policies:Exits")
    assert "policy attacking_policies:Exits failed: SystemExit: 0" in text
    assert "attacking_policies.py, line 11" in text


@pytest.mark.usefixtures("module")
def test_a_policy_that_ends_its_generator_has_failed(trace: Path) -> None:
    text = run(1, trace, "--policy", "attacking_policies:Leaves")
    assert "policy attacking_policies:Leaves failed: GeneratorExit" in text


@pytest.mark.usefixtures("module")
def test_a_policy_that_answers_nothing_has_failed(trace: Path) -> None:
    text = run(1, trace, "--policy", "attacking_policies:Answers")
    assert "policy attacking_policies:Answers failed: TypeError: schedule() returned None" in text


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("decision.admitted = None", "admitted is None; expected list"),
        ("decision.admitted = [5]", "admitted has 5; expected Request"),
        ("decision.admitted *= 2", "request 0 is named twice; expected in one list, once"),
        ("decision.held = requests", "held has Request("),
        ("decision.paused = [Pause(requests[0], requests[0], 'x')]", "expected requests that have started"),
        ("decision.left_out = requests[0]", "expected LeftOut"),
        ("decision.left_out = LeftOut(requests[0], 5)", "limit of LeftOut is 5; expected a text"),
        ("decision.left_out = LeftOut(requests[0], '\\ud800')", "limit of LeftOut is"),
        ("active.context.pop()", "schedule() changed the active requests"),
    ],
)
def test_a_decision_that_cannot_be_done_is_the_policys_error(
    trace: Path, change: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTACK", change)
    text = run(1, trace, "--policy", "attacking_policies:Decides")
    assert "policy attacking_policies:Decides failed: " in text
    # A compiled CapacityDecision refuses other types itself.
    assert message in text or " object expected; got " in text


# The suite sees what a failed run hides.


@pytest.mark.parametrize("kind", [TypeError, KeyError, OverflowError, RecursionError, UnicodeEncodeError])
def test_a_defect_behind_a_failed_run_is_a_traceback(
    kind: type[Exception], trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(self: NullExecutor, batch: object) -> None:
        raise kind(*(("utf-8", "x", 0, 1, "no") if kind is UnicodeEncodeError else ("x",)))

    monkeypatch.setattr(NullExecutor, "submit", submit)
    outcomes = Outcomes("defects")
    outcomes.attack(["run", str(trace), *NULL, "--output", str(trace.parent / "run")])
    assert dict(outcomes.statuses) == {1: 1}
    assert f"{kind.__name__}: " in outcomes.tracebacks[0]


def test_an_error_of_a_device_is_none(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(self: NullExecutor, batch: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(NullExecutor, "submit", submit)
    ends(1, "run", str(trace), *NULL, "--output", str(trace.parent / "run"))


def test_a_limit_that_is_reached_is_a_hang() -> None:
    outcomes = Outcomes("loops")

    def loop() -> int:
        signal.setitimer(signal.ITIMER_PROF, 0.01)  # in place of the limit, which is longer
        while True:
            pass

    outcomes.call(loop, "a loop")
    assert len(outcomes.hangs) == outcomes.tries == 1


# Servers, endpoints and the library.


@pytest.mark.parametrize("url", ["http://" + "x" * 300, "http://" + "a." * 200, "http://x:99999", "http://a b"])
def test_an_address_that_no_host_has_is_refused(trace: Path, url: str) -> None:
    run(2, trace, "--endpoint", url)


@pytest.mark.parametrize(
    ("counts", "status", "words"),
    [
        ({"completion_tokens": 0}, 0, "usage_contradicts_stream"),
        ({"completion_tokens": 3, "prompt_tokens": 10**30}, 1, "an event is no chunk of the API"),
        ({"completion_tokens": 2**40}, 1, "an event is no chunk of the API"),
        ({"completion_tokens": -1}, 1, "an event is no chunk of the API"),
    ],
)
def test_counts_of_tokens_that_no_answer_has(tmp_path: Path, counts: dict[str, int], status: int, words: str) -> None:
    async def answer(_: Received, writer: Writer) -> None:
        await writer.raw(STREAM)
        for event in (token(" a"), {"choices": [], "usage": counts}, "[DONE]"):
            await writer.event(event)
        await writer.end()

    trace = written(tmp_path, {"arrival_s": 0.0, "prompt_len": 4, "output_len": 1})
    with fake_endpoint(answer) as endpoint:
        command = ["run", str(trace), "--endpoint", endpoint.url, "--warm_up", "0", "--output", str(tmp_path / "run")]
        ends(status, *command)
    assert words in (tmp_path / "run" / "requests.jsonl").read_text()


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "x" * 300])
def test_a_model_of_triton_cannot_name_another_folder(tmp_path: Path, name: str) -> None:
    text = ends(2, "triton", "--model_repository", str(tmp_path / "models"), "--triton_model_name", name)
    assert "--triton_model_name" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("parameters", ["max_batch_size=4", [("max_batch_size", 4)], 5])
def test_parameters_of_a_manager_are_a_mapping(parameters: Any) -> None:
    with pytest.raises(InputError, match="optional_params: expected a mapping"):
        BatchManager(
            "tiny",
            "ifb",
            1,
            "max_utilization",
            lambda number: [],
            lambda *answer: None,
            optional_params=parameters,
            start=False,
        )


# What comes with models.


@pytest.mark.parametrize("template", ["{% for", "{{ ''|none_such }}"])
def test_a_chat_template_that_cannot_be_read_is_named(template: str) -> None:
    with pytest.raises(InputError, match="the model's chat template cannot be read: Template"):
        ChatTemplate(template, {})


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / (messages|length - 1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ messages.x.y }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    ],
)
def test_a_chat_template_that_fails_is_named(template: str) -> None:
    with pytest.raises(InputError, match="the model's chat template does not take them"):
        ChatTemplate(template, {}).render([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("text", ["nan", "inf", "1e308"])
def test_numbers_of_options_are_finite(text: str) -> None:
    for words in (("capacity", "tiny", "--memory-gib"), ("tune", "--gpu-hour-price"), ("watch", "x", "--interval")):
        assert f"is {text!r}; expected a finite number" in ends(2, *words, text)


def test_a_vocabulary_beyond_token_ids_is_refused() -> None:
    assert "expected an integer from 1 to 2147483647" in ends(
        2, "dataset", "convert", "default", "--to", "gpt-manager", "-o", "-", "--vocab-size", "9007199254740992"
    )


def test_the_settings_of_a_tokenizer_are_an_object(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("5")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(InputError, match=r"tokenizer_config.json: cannot be read"):
        ChatTemplate.of(tmp_path)


def test_a_chat_template_of_another_type_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [5]}))
    with pytest.raises(InputError, match=r"tokenizer_config.json: cannot be read"):
        ChatTemplate.of(tmp_path)


def test_a_tokenizer_without_a_token_for_a_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(TOKENIZER | {"model": {**TOKENIZER["model"], "unk_token": "none"}}))
    trace = written(tmp_path, {"text": "zzz", "n": 3})
    text = run(2, trace, "--columns", "prompt=text,output_len=n", "--tokenizer", str(path))
    assert "the text 'zzz' cannot be tokenized" in text


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("9" * 30, {}, "expected an integer from 0 to"),
        ("0", {"alpha_pattern": ["a"]}, "alpha_pattern is ['a']; expected keys and values"),
        ("0", {"alpha_pattern": {"(": 1}}, "alpha_pattern: '(' is no regular expression"),
        ("0", {"lora_alpha": 1e300}, "lora_alpha is 1e+300; expected a finite number"),
    ],
)
def test_fields_of_an_adapter(trace: Path, name: str, change: dict[str, Any], message: str) -> None:
    save_adapter(trace.parent / "adapters" / name, changes=change)
    assert message in run(2, trace, "--lora_dir", str(trace.parent / "adapters"))


def test_more_adapters_than_a_table_holds_are_refused(trace: Path) -> None:
    assert "--num_loras is '1000000'" in run(2, trace, "--num_loras", "1000000")


@pytest.mark.parametrize("options", [("--repeat", "1" + "0" * 16), ("--processes", "99999999")])
def test_more_runs_than_anyone_waits_for_are_refused(trace: Path, options: tuple[str, str]) -> None:
    ends(2, "sweep", str(trace), *SIMULATED, "--over", "max_batch_size=1,2", *options)


# Results.


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("summary.json", {"ttft_s": "fast"}, "Expected `object`, got `str` - at `$.ttft_s`"),
        ("summary.json", {"requests": {"total": "3", "completed": 3, "failed": 0}}, "$.requests.total"),
        ("run.json", {"config": {"iteration_stats_every": "often"}}, "config.--iteration_stats_every is 'often'"),
    ],
)
def test_a_field_of_another_type_is_named(trace: Path, file: str, change: dict[str, Any], message: str) -> None:
    run(0, trace)
    path = trace.parent / "run" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    text = ends(2, "report", str(path.parent))
    assert file in text
    assert message in text


def test_a_line_of_another_type_is_named(trace: Path) -> None:
    run(0, trace)
    path = trace.parent / "run" / "requests.jsonl"
    lines = path.read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | {"prompt_len": "long"})
    path.write_text("".join(f"{line}\n" for line in lines))
    text = ends(2, "report", str(path.parent))
    assert "requests.jsonl, line 2: Expected `int`, got `str` - at `$.prompt_len`" in text


@pytest.mark.parametrize("line", ["[" * 100_000, '{"output_len": '])
@pytest.mark.parametrize("name", ["trace", "iterations"])
def test_lines_that_cannot_be_read_are_named(trace: Path, name: str, line: str) -> None:
    run(0, trace)
    path = trace.parent / "run" / f"{name}.jsonl"
    path.write_bytes(f"{line}\n".encode("latin-1") + path.read_bytes())
    for command in (("watch", "--once"), ("why", "--budget", "0")):
        if (name, command[0]) != ("iterations", "watch"):  # which leaves such lines out
            assert f"{name}.jsonl, line 1: " in ends(2, command[0], str(path.parent), *command[1:])


def test_a_request_that_completed_has_its_latencies(trace: Path) -> None:
    run(0, trace)
    path = trace.parent / "run" / "requests.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    del lines[2]["ttft_s"]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert "requests.jsonl, line 3: Object missing required field `ttft_s`" in ends(2, "why", str(path.parent))


def test_a_line_that_is_no_text_is_named(trace: Path) -> None:
    run(0, trace)
    path = trace.parent / "run" / "iterations.jsonl"
    path.write_bytes(b'{"\xed": 1}\n' + path.read_bytes())
    assert "iterations.jsonl, line 1: " in ends(2, "why", str(path.parent))
