"""Values that break programs, and changes of JSON-like documents with them."""

import random
from typing import Any

INTEGERS = (
    0, -1, 1, 2, 3, 7, 100, 2**15, 2**31 - 1, 2**31, 2**31 + 1, 2**32, 2**32 + 1, 2**53, 2**53 + 1, 2**62, 2**63 - 1, 2**63,
    2**64, -(2**31) - 1, -(2**63), -(2**63) - 1, 10**30, 10**308,
)  # fmt: skip
FLOATS = (0.0, -0.0, 0.5, 1.0, 2.5, -1.5, 1e-300, 5e-324, 1e-9, 1e9, 1e15, 1e19, 1601944424.251, 1e300, 1.7e308, float("nan"),
          float("inf"), float("-inf"))  # fmt: skip
TEXTS = (
    "", " ", "0", "1", "-1", "1e9", "1e400", "nan", "inf", "-inf", "none", "null", "true", "yes", "a", "x" * 300, "x" * 5000,
    "\0", "a\0b", "\ud800", "\udcff", "../../x", "/", ".", "..", "/dev/null", "\x1b[31mred\x1b[0m", "\n", "a,b", "a:b", "a=b",
    "٣", "1_000", "0x10", "9" * 5000, "é", "\u202e", "{", "[", "%s", "fixed:0", "factor:1e309", "gamma:0", "1..2", "1..1e9",
    "p50", "2024-05-10 00:00:00", "9999-12-31 23:59:59", "~", "-", "--", "os:_exit",
)  # fmt: skip


def nested(depth: int, draw: random.Random) -> Any:
    """Lists or objects within each other."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if draw.random() < 0.5 else {"a": value}
    return value


def value(draw: random.Random) -> Any:
    """Any value of JSON, mostly one that is next to a limit."""
    kind = draw.randrange(12)
    if kind < 4:
        return draw.choice(INTEGERS)
    if kind < 6:
        return draw.choice(FLOATS)
    if kind < 9:
        return draw.choice(TEXTS)
    if kind == 9:
        return draw.choice((None, True, False))
    if kind == 10:
        return [value(draw) for _ in range(draw.randrange(4))]
    if draw.random() < 0.1:
        return nested(draw.choice((3, 100)), draw)
    return {draw.choice(TEXTS[:40]): value(draw) for _ in range(draw.randrange(3))}


def changed(document: Any, draw: random.Random) -> Any:
    """`document` with one part, at any depth, replaced, removed, doubled or added."""
    if isinstance(document, dict) and document and draw.random() < 0.95:
        key = draw.choice(list(document))
        what = draw.random()
        if what < 0.08:
            return {name: part for name, part in document.items() if name != key}
        if what < 0.14:
            return document | {draw.choice((*TEXTS, "name", "index", "request_id", "kind")): value(draw)}
        return document | {key: changed(document[key], draw)}
    if isinstance(document, list | tuple) and document and draw.random() < 0.9:
        place = draw.randrange(len(document))
        what = draw.random()
        if what < 0.1:
            return [*document[:place], *document[place + 1 :]]
        if what < 0.15:
            return [*document, document[place]]
        return [*document[:place], changed(document[place], draw), *document[place + 1 :]]
    return value(draw)


def changed_bytes(content: bytes, draw: random.Random) -> bytes:
    """`content` cut off, with bytes replaced, with a part repeated, or with a number made larger."""
    what = draw.randrange(5)
    if what == 0 or not content:
        return content[: draw.randrange(len(content) + 1)]
    data = bytearray(content)
    if what == 1:
        for _ in range(draw.choice((1, 2, 20))):
            data[draw.randrange(len(data))] = draw.randrange(256)
    elif what == 2:
        begin = draw.randrange(len(data))
        data[begin:begin] = data[begin : begin + draw.randrange(200)] * draw.choice((1, 2, 50))
    elif what == 3:
        digits = [place for place, byte in enumerate(data) if 48 <= byte <= 57]
        if digits:
            place = draw.choice(digits)
            data[place : place + 1] = draw.choice(
                (b"9" * 5000, b"2147483648", b"4294967297", b"9223372036854775808", b"1e309", b"-1", b"NaN", b"")
            )
    else:
        place = draw.randrange(len(data))
        data[place:place] = draw.choice((b"[" * 100_000, b"{\"a\":" * 50_000, b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"'", b"- " * 5000))
    return bytes(data)
