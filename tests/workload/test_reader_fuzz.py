"""Random changes of valid files of every format: each is read, or refused with a clear message."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.workload.sample_files import NAMES, SAMPLES, read_or_refused, rows_of

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(0, 9)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["0", "1", "-1", "1e9", "nan", 2**63, -(2**63)])
    | st.sampled_from(["2024-05-10 00:00:00", "9999-12-31 23:59:59-23:59", "0001-01-01 00:00:00+23:59"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
UNCHECKED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
slow_machine = settings(deadline=None, suppress_health_check=UNCHECKED)


def change_row(draw: Any, row: dict[str, Any]) -> Any:
    """`row` with one key changed, added or removed, at any depth; or another value."""
    what = draw(st.sampled_from(["value", "value", "value", "inner", "remove", "add", "replace"]))
    if what == "replace" or not row:
        return draw(values)
    key = draw(st.sampled_from(sorted(row)))
    if what == "remove":
        return {name: value for name, value in row.items() if name != key}
    if what == "add":
        others = [
            "arrival_s",
            "delay",
            "timestamp",
            "hash_ids",
            "prompt",
            "messages",
            "turns",
            "task_id",
            "session_id",
            "request_id",
            "prefix_ids",
            "prefix_lens",
            "stop_ids",
            "beam_width",
            "priority",
            "class",
        ]
        return row | {draw(st.sampled_from(others) | st.text(max_size=6)): draw(values)}
    inner = row[key]
    if what == "inner" and isinstance(inner, dict):
        return row | {key: change_row(draw, inner)}
    if what == "inner" and isinstance(inner, list) and inner:
        position = draw(st.integers(0, len(inner) - 1))
        one = inner[position]
        changed = change_row(draw, one) if isinstance(one, dict) else draw(values)
        return row | {key: [*inner[:position], changed, *inner[position + 1 :]]}
    return row | {key: draw(values)}


@st.composite
def changed_samples(draw: Any) -> tuple[str, bytes]:
    """The name of a sample, and its content with a row changed."""
    name = draw(st.sampled_from(NAMES))
    rows, write = rows_of(name)
    position = draw(st.integers(0, len(rows) - 1))
    changed = [*rows[:position], change_row(draw, rows[position]), *rows[position + 1 :]]
    if not any(isinstance(row, dict) and row for row in changed):
        changed.append(rows[0])
    return name, write(changed).encode("utf-8", "surrogatepass")


def check(folder: Path, content: bytes) -> None:
    path = folder / "fuzzed"
    path.write_bytes(content)
    for skip_bad_rows in (False, True):
        read_or_refused(path, skip_bad_rows=skip_bad_rows)


@given(changed_samples())
@slow_machine
def test_changed_rows(tmp_path: Path, sample: tuple[str, bytes]) -> None:
    check(tmp_path, sample[1])


@given(st.sampled_from(NAMES), st.randoms(use_true_random=False))
@slow_machine
def test_changed_bytes(tmp_path: Path, name: str, dice: random.Random) -> None:
    check(tmp_path, mutated((SAMPLES / name).read_bytes(), dice))


@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,ab01\n\t \\-.', max_size=80).map(str.encode))
@slow_machine
def test_any_bytes(tmp_path: Path, content: bytes) -> None:
    check(tmp_path, content)


def mutated(content: bytes, dice: random.Random) -> bytes:
    """`content` with some of its bytes changed, removed, repeated or inserted."""
    changed = bytearray(content)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(changed) + 1)
        what = dice.randrange(5)
        if what == 0:
            changed[at : at + 1] = bytes([dice.randrange(256)])
        elif what == 1:
            changed[at : at + 1] = dice.choice(b'{}[]",:-.0e\n\t\\/'.decode()).encode()
        elif what == 2:
            del changed[at : at + dice.randint(1, 20)]
        elif what == 3:
            changed[at:at] = changed[at : at + dice.randint(1, 40)]
        else:
            changed[at:at] = dice.choice([b"null", b"NaN", b"-", b"1e999", b"\0", b"\xff", b"\r", b'"'])
    return bytes(changed)


@pytest.mark.slow
@settings(slow_machine, max_examples=5_000)
@given(changed_samples())
def test_many_changed_rows(tmp_path: Path, sample: tuple[str, bytes]) -> None:
    check(tmp_path, sample[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_changed_bytes(tmp_path: Path, name: str) -> None:
    dice, content = random.Random(name), (SAMPLES / name).read_bytes()
    for _ in range(1_000):
        check(tmp_path, mutated(content, dice))
