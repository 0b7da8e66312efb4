"""The names and colours of limits."""

from ifbbench.engine.policies.policy import Limit
from ifbbench.report.limits import BINDING, LIMITS, limit_colours, limit_name, waits_for


def test_every_limit_of_the_engine_has_a_name_and_binding_ones_a_colour() -> None:
    assert {limit.value for limit in Limit} - {"none"} <= LIMITS.keys()
    assert all(LIMITS[name].colour for name in BINDING)
    assert BINDING[-1] == "none"


def test_reasons_of_a_users_policy_are_their_own_names_and_have_colours_that_differ() -> None:
    assert (limit_name("fairness"), waits_for("fairness")) == ("fairness", "fairness")
    assert waits_for("batch_size") == "a batch slot"
    assert waits_for(None) == "a decision that is not recorded"
    colours = limit_colours(["fairness", "none", "kv_blocks", "deadline"])
    assert list(colours) == ["kv_blocks", "none", "deadline", "fairness"]
    assert len(set(colours.values())) == 4
