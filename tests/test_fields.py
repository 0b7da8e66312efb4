"""Fields: what each kind takes, what it refuses, and what the message says."""

import math
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ifbbench.errors import InputError
from ifbbench.settings import fields


def refused(message):
    return pytest.raises(InputError, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize("value", [0, 7, 2**63 - 1, -(2**63), np.int32(7), np.uint64(2**63 - 1)])
def test_integers(value):
    taken = fields.integer(value, "n")
    assert taken == value
    assert type(taken) is int


@pytest.mark.parametrize(
    "value", [True, False, 2.0, 2.5, "2", None, [], np.float64(2), np.bool_(True), math.nan, 2**63, np.uint64(2**63)]
)
def test_what_is_no_integer(value):
    with pytest.raises(InputError, match=r"^n is .*; expected an integer"):
        fields.integer(value, "n")


@pytest.mark.parametrize(("given", "taken"), [("12", 12), (" 12 ", 12), ("-3", -3), (4, 4)])
def test_integers_as_text(given, taken):
    assert fields.integer(given, "n", from_text=True) == taken


@pytest.mark.parametrize("value", ["", "1.5", "2.0", "true", "1e3", "٣", "9" * 500, True, 2.0])
def test_text_that_is_no_integer(value):
    with pytest.raises(InputError, match=r"^n is .*; expected an integer"):
        fields.integer(value, "n", from_text=True)


@pytest.mark.parametrize(
    ("value", "arguments", "message"),
    [
        (None, {}, "n is missing; expected an integer."),
        ("x", {"unit": "ms"}, "n is 'x'; expected an integer (ms)."),
        (0, {"minimum": 1}, "n is 0; expected an integer of at least 1."),
        (9, {"maximum": 8}, "n is 9; expected an integer of at most 8."),
        (0, {"minimum": 1, "maximum": 8, "unit": "beams"}, "n is 0; expected an integer from 1 to 8 (beams)."),
        (2**63, {"minimum": 1}, f"n is {2**63}; expected an integer from 1 to {2**63 - 1}."),
    ],
)
def test_message_of_an_integer(value, arguments, message):
    with refused(message):
        fields.integer(value, "n", **arguments)


def test_an_integer_of_more_digits_than_python_prints():
    with refused("n is a huge integer; expected an integer of at most 8."):
        fields.integer(10**5_000, "n", maximum=8)


@pytest.mark.parametrize("value", [0, -1.5, 3, 1e308, np.float32(0.5), np.int64(3), Fraction(1, 2)])
def test_numbers(value):
    taken = fields.number(value, "x")
    assert taken == value
    assert type(taken) is float


@pytest.mark.parametrize(
    "value", [True, np.bool_(False), "1", None, math.nan, math.inf, -math.inf, 10**400, np.float32("inf"), [1.0], 1j]
)
def test_what_is_no_number(value):
    with pytest.raises(InputError, match=r"^x is .*; expected a finite number"):
        fields.number(value, "x")


@pytest.mark.parametrize(("given", "taken"), [("0.5", 0.5), ("1e3", 1000.0), ("-2", -2.0), (3, 3.0)])
def test_numbers_as_text(given, taken):
    assert fields.number(given, "x", from_text=True) == taken


@pytest.mark.parametrize("value", ["nan", "inf", "", "x", "true", True])
def test_text_that_is_no_number(value):
    with pytest.raises(InputError, match=r"^x is .*; expected a finite number"):
        fields.number(value, "x", from_text=True)


@pytest.mark.parametrize(
    ("value", "arguments", "words"),
    [
        (-1, {"minimum": 0}, "a finite number of at least 0"),
        (0, {"above": 0}, "a finite number above 0"),
        (1, {"below": 1.0}, "a finite number below 1"),
        (0.0, {"above": 0, "maximum": 0.99}, "a finite number of at most 0.99 and above 0"),
        (2, {"minimum": 0.0, "maximum": 1.0, "unit": "share"}, "a finite number from 0 to 1 (share)"),
    ],
)
def test_ranges_of_numbers(value, arguments, words):
    with refused(f"x is {value}; expected {words}."):
        fields.number(value, "x", **arguments)


@given(st.integers() | st.floats() | st.booleans(), st.integers(-9, 9), st.integers(-9, 9))
def test_a_value_is_taken_exactly_if_it_is_in_the_range(value, minimum, maximum):
    is_in_range = type(value) is not bool and minimum <= value <= maximum
    for check, kinds in ((fields.integer, (int,)), (fields.number, (int, float))):
        if is_in_range and type(value) in kinds:
            assert check(value, "x", minimum, maximum) == value
        else:
            with pytest.raises(InputError):
                check(value, "x", minimum, maximum)


def test_booleans():
    assert fields.boolean(True, "b") is True
    assert fields.boolean("FALSE", "b", from_text=True) is False
    assert fields.boolean("1", "b", from_text=True) is True
    for value in (1, 0, 7, 0.5, "true", None):
        with pytest.raises(InputError, match="expected true or false"):
            fields.boolean(value, "b")
    for value in (1, 7, 0.5, "yes", ""):
        with pytest.raises(InputError, match="expected true or false"):
            fields.boolean(value, "b", from_text=True)


def test_texts():
    assert fields.text("a", "t") == "a"
    for value in ("", 3, None, b"a"):
        with pytest.raises(InputError, match=r"^t is .*; expected a text"):
            fields.text(value, "t")


def test_choices():
    assert fields.choice("Max-Utilization", "policy", ["max_utilization", "static"]) == "max_utilization"
    assert fields.choice("IFB", "type", ["inflight"], aliases={"ifb": "inflight"}) == "inflight"
    assert fields.choice("sim:H100", "device", ["cpu"], pattern="sim:.+", others="sim:PROFILE") == "sim:H100"
    with refused("device is 'gpu'; expected one of cpu, sim:PROFILE. Did you mean cpu?"):
        fields.choice("gpu", "device", ["cpu"], pattern="sim:.+", others="sim:PROFILE")
    with refused("device is 3; expected one of cpu."):
        fields.choice(3, "device", ["cpu"])


def test_lists_of_integers():
    assert fields.integers([1, 2], "ids", "token id", 0, 9) == (1, 2)
    assert set(map(type, fields.integers([np.int32(1), 2], "ids"))) == {int}
    for value, message in (
        ([], "ids is []; expected a list of at least one token id."),
        ("12", "ids is '12'; expected a list of at least one token id."),
        (None, "ids is missing; expected a list of at least one token id."),
        ([1, True], "ids[1] is True; expected an integer from 0 to 9."),
        ([1, 2, 10], "ids[2] is 10; expected an integer from 0 to 9."),
        ([1.0], "ids[0] is 1.0; expected an integer from 0 to 9."),
    ):
        with refused(message):
            fields.integers(value, "ids", "token id", 0, 9)


def test_tables():
    assert fields.table({"mean": 3}, "arrival", ["mean", "rate"], ["mean"]) == {"mean": 3}
    assert fields.table({"any": 3}, "arrival") == {"any": 3}
    for value, message in (
        (7, "arrival is 7; expected keys and values."),
        ({3: 4}, "arrival is {3: 4}; expected keys and values."),
        ({"maen": 3}, "arrival has an unknown key 'maen'; expected mean, rate. Did you mean mean?"),
        ({"colour": 3}, "arrival has an unknown key 'colour'; expected mean, rate."),
        ({"rate": 3}, "arrival has no key 'mean'; expected mean."),
        ({"mean": None}, "arrival has no key 'mean'; expected mean."),
    ):
        with refused(message):
            fields.table(value, "arrival", ["mean", "rate"], ["mean"])


def test_the_place_and_advice_are_added():
    message = "a.toml: x is 'y'; expected a finite number. Correct the file."
    with refused(message), fields.located("a.toml", "Correct the file."):
        fields.number("y", "x")


def test_long_values_are_cut_off():
    with pytest.raises(InputError, match=r"^t is \['aaa.{0,60}\.\.\.; expected") as raised:
        fields.text(["a" * 999], "t")
    assert len(str(raised.value)) < 100


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (4096, "4.00 KiB"),
        (19 << 20, "19.0 MiB"),
        (3 << 30, "3.00 GiB"),
        (85_899_345_920, "80.0 GiB"),
        (123_456_789, "118 MiB"),
        (9 << 50, "9,216 TiB"),
    ],
)
def test_sizes_in_memory_have_short_units(size: int, text: str):
    assert fields.memory_size(size) == text


@pytest.mark.parametrize(
    ("value", "taken"),
    [
        (1000, 1000),
        ("1000", 1000),
        ("1.5e9", 1_500_000_000),
        (1.5e9, 1_500_000_000),
        ("512M", 512_000_000),
        ("40GB", 40 * 10**9),
        ("40 gib", 40 * 2**30),
        ("1.5KiB", 1536),
        ("1.3KB", 1300),
        ("0.5Ki", 512),
        ("2b", 2),
    ],
)
def test_numbers_of_bytes(value, taken):
    assert fields.byte_count(value, "n") == taken


@pytest.mark.parametrize(
    "value",
    [
        "",
        "GB",
        "40XB",
        "40iB",
        "1.5",
        "1e",
        "-1",
        "1e-3",
        "1e9999999",
        "4_0",
        "٣",
        "9" * 500 + "GB",
        1.5,
        math.inf,
        True,
        None,
        "1e400",
    ],
)
def test_what_is_no_number_of_bytes(value):
    with pytest.raises(InputError, match=r"^n is .*; expected an integer .*bytes, as .*, 40GB .* or 40GiB"):
        fields.byte_count(value, "n")
