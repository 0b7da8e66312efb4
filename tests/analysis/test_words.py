"""The words of engines, and the names and colours of limits."""

import pytest

from ifbbench.analysis.words import BINDING, LIMITS, TENSORRT_LLM, VLLM, words_of
from ifbbench.engine.plan import Limit
from ifbbench.report.colours import LIMIT_COLOURS, limit_colours
from tests.conftest import REPOSITORY


def test_every_reason_of_the_engine_has_a_name_a_colour_and_a_description() -> None:
    reasons = {limit.value for limit in Limit}
    documented = (REPOSITORY / "docs/results.md").read_text()
    for name in {*reasons, *BINDING}:
        assert LIMIT_COLOURS[name]
        assert name == "none" or (f"\n| `{name}` | " in documented and LIMITS[name].column)
    assert len({LIMIT_COLOURS[name] for name in {*reasons, "none"}}) == len(reasons) + 1
    assert BINDING[-1] == "none"


@pytest.mark.parametrize("limit", ["num_tokens", "none"])
def test_parts_of_an_attribution_are_named_in_words(limit: str) -> None:
    behind = {"num_tokens": "a request that waits for the token budget", "none": "another request"}[limit]
    assert TENSORRT_LLM.part_name(f"waiting_head_of_line_{limit}") == f"waiting behind {behind}"
    assert TENSORRT_LLM.part_name("waiting_reuse_delay") == "waiting for another request's prefix"
    assert TENSORRT_LLM.part_name("waiting_iteration") == "waiting for an iteration to begin"
    assert TENSORRT_LLM.part_name("until_first_token") == "until first token"


def test_reasons_of_a_users_policy_are_their_own_names_and_have_colours_that_differ() -> None:
    assert (TENSORRT_LLM.limit_name("fairness"), TENSORRT_LLM.waits_for("fairness")) == ("fairness", "fairness")
    assert TENSORRT_LLM.waits_for("batch_size") == "a batch slot"
    assert TENSORRT_LLM.waits_for(None) == "a decision that is not recorded"
    colours = limit_colours(["fairness", "none", "kv_blocks", "deadline"])
    assert list(colours) == ["kv_blocks", "none", "deadline", "fairness"]
    assert len(set(colours.values())) == 4


def test_each_engine_has_its_own_words_and_several_engines_those_of_tensorrt_llm() -> None:
    runs: list[dict[str, str]] = [{"engine": "vllm"}, {"engine": "trtllm"}, {}, {"engine": "my.module:Scheduler"}]
    assert [words_of(config) for config in runs] == [VLLM, *[TENSORRT_LLM] * 3]
    assert (words_of(runs[0], runs[0]), words_of(runs[0], runs[1]), words_of()) == (VLLM, TENSORRT_LLM, TENSORRT_LLM)
    assert [(words.pauses, words.part_name("paused")) for words in (TENSORRT_LLM, VLLM)] == [
        ("pauses", "paused"),
        ("pre-emptions", "pre-empted"),
    ]
    assert [VLLM.setting_name(limit) for limit in ("batch_size", "num_tokens", "watermark", "none")] == [
        "max_num_seqs",
        "max_num_batched_tokens",
        "watermark",
        "",
    ]
    assert VLLM.limits.keys() == TENSORRT_LLM.limits.keys()
