"""JSON in which no key is there twice: libraries keep the last value, and the one before it has no effect."""

import json
from typing import Any

from ifbbench.errors import InputError
from ifbbench.settings.fields import shown


def check_keys(text: str | bytes) -> None:
    """InputError for a key that an object in `text` has twice, at any depth; ValueError or RecursionError for what is
    no JSON."""
    json.loads(text, object_pairs_hook=_with_each_key_once)


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> None:
    keys = [key for key, _ in pairs]
    if len(keys) != len(set(keys)):
        doubled = next(key for key in keys if keys.count(key) > 1)
        raise InputError(f"the key {shown(doubled)} is there twice; expected each key once.")
