"""Writes hardware profiles as files that `load_hardware` reads."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from ifbbench.simulation.hardware import HardwareProfile

UNITS = {
    "memory_bytes": "bytes",
    "memory_bandwidth": "bytes/s",
    "cache_bytes": "bytes",
    "link_bandwidth": "bytes/s and direction",
    "host_iteration_s": "seconds of the host for each iteration",
    "host_request_s": "the same for each request in it",
}
TITLES = {
    "peak_flops": "FLOP/s",
    "constants": "shares of these peaks, and seconds (*_s)",
    "calibration": "what was measured, and errors as shares of the measured time",
}


def write_profile(profile: HardwareProfile, path: Path, remark: str) -> None:
    """Write all of `profile` but its name, which is the file's, to `path`. remark: the first line."""
    path.write_text("\n".join([f"# {remark}", *_lines(profile)]) + "\n", encoding="utf-8")


def _lines(profile: HardwareProfile) -> Iterator[str]:
    values = dataclasses.asdict(profile)
    tables = {name: values.pop(name) for name in TITLES}
    del values["name"]
    yield from _pairs(values)
    for name, table in tables.items():
        if table:
            yield from ("", f"[{name}]  # {TITLES[name]}", *_pairs(table))


def _pairs(values: Mapping[str, object]) -> Iterator[str]:
    """As JSON writes them, which TOML reads; numbers that are measured to four digits, which is more than they are."""
    for name, value in values.items():
        text = f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
        yield f"{name} = {text}" + (f"  # {UNITS[name]}" if name in UNITS else "")
