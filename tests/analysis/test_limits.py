"""The names and colours of limits."""

from ifbbench.analysis.limits import BINDING, limit_name, part_name, waits_for
from ifbbench.engine.plan import Limit
from ifbbench.report.colours import LIMIT_COLOURS, limit_colours
from ifbbench.report.sweep_table import SHORT_NAMES
from tests.conftest import REPOSITORY


def test_every_reason_of_the_engine_has_a_name_a_colour_and_a_description() -> None:
    reasons = {limit.value for limit in Limit}
    documented = (REPOSITORY / "docs/results.md").read_text()
    assert reasons <= SHORT_NAMES.keys()
    for name in {*reasons, *BINDING}:
        assert LIMIT_COLOURS[name]
        assert name == "none" or f"\n| `{name}` | " in documented
    assert len({LIMIT_COLOURS[name] for name in {*reasons, "none"}}) == len(reasons) + 1
    assert BINDING[-1] == "none"


def test_parts_of_an_attribution_are_named_in_words() -> None:
    assert part_name("waiting_head_of_line_num_tokens") == "waiting behind a request that waits for the token budget"
    assert part_name("waiting_head_of_line_none") == "waiting behind another request"
    assert part_name("waiting_reuse_delay") == "waiting for another request's prefix"
    assert part_name("waiting_iteration") == "waiting for an iteration to begin"
    assert part_name("until_first_token") == "until first token"


def test_reasons_of_a_users_policy_are_their_own_names_and_have_colours_that_differ() -> None:
    assert (limit_name("fairness"), waits_for("fairness")) == ("fairness", "fairness")
    assert waits_for("batch_size") == "a batch slot"
    assert waits_for(None) == "a decision that is not recorded"
    colours = limit_colours(["fairness", "none", "kv_blocks", "deadline"])
    assert list(colours) == ["kv_blocks", "none", "deadline", "fairness"]
    assert len(set(colours.values())) == 4
