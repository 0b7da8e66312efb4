"""Histograms of prompt and output lengths: measured from a trace, or read from a CSV or JSON file."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ifbbench.compressed import read_text
from ifbbench.errors import InputError
from ifbbench.settings import fields
from ifbbench.settings.fields import located
from ifbbench.workload.distributions import Histogram
from ifbbench.workload.trace import MAX_LENGTH

MEASURED_BINS = 200
CSV_COLUMNS = ("min", "max", "prompts", "outputs")
JSON_KEYS = {"prompt_len": "prompt_tokens", "output_len": "output_tokens"}  # ours, and those of `dataset info --json`
UNDERSTOOD = (
    "Expected a .csv file with the columns min, max, prompts, outputs (requests with a prompt, and with an output, of "
    "min to max tokens), or a .json file with prompt_len and output_len, each {edges, counts}, as `ifbbench dataset "
    "info --json` prints them."
)


def measured(lengths: Sequence[int], bins: int) -> Histogram:
    """The histogram of `lengths` in at most `bins` bins.

    They grow by a constant factor: lengths are skewed, and in equal bins a long tail would hide the rest.
    """
    values = np.asarray(lengths, dtype=np.int64)
    low, high = int(values.min()), int(values.max())
    edges = np.unique(np.rint(np.geomspace(low, high + 1, bins + 1)).astype(np.int64))
    counts, _ = np.histogram(values, bins=edges)
    return Histogram(tuple(edges.tolist()), tuple(counts.tolist()))


def read_histograms(path: Path) -> dict[str, Histogram]:
    """The histograms `prompt_len` and `output_len` of the file at `path`; InputError names what is wrong in it."""
    with located(str(path), UNDERSTOOD):
        try:
            text = read_text(path, "utf-8-sig")
            if path.suffix.lower() == ".csv":
                return _from_csv(text)
            return _from_json(json.loads(text))
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}.") from error
        except (ValueError, RecursionError, csv.Error) as error:
            raise InputError(f"not a text file of such values ({str(error)[:100]}).") from error


def _from_json(document: Any) -> dict[str, Histogram]:
    table, found = fields.table(document, "the histogram file"), {}
    for name, measured_name in JSON_KEYS.items():
        where, content = name, table.get(name)
        if content is None and isinstance(table.get(measured_name), dict):
            where, content = f"{measured_name}.histogram", table[measured_name].get("histogram")
        values = fields.table(content, where, ("edges", "counts"), ("edges", "counts"))
        with located(where):
            found[name] = Histogram(
                *(tuple(values[key]) if isinstance(values[key], list) else values[key] for key in ("edges", "counts"))
            )
    return found


def _from_csv(text: str) -> dict[str, Histogram]:
    rows = csv.DictReader(text.splitlines())
    fields.table(dict.fromkeys(rows.fieldnames or (), True), "the header", None, CSV_COLUMNS)
    edges: list[int] = []
    counts: dict[str, list[float]] = {"prompt_len": [], "output_len": []}
    for row in rows:
        with located(f"line {rows.line_num}"):
            low = fields.integer(row["min"], "min", 1, MAX_LENGTH - 1, from_text=True)
            high = fields.integer(row["max"], "max", low, MAX_LENGTH - 1, from_text=True)
            if edges and low < edges[-1]:
                raise InputError(f"min is {low}; expected more than the max of the row before ({edges[-1] - 1}).")
            if not edges:
                edges.append(low)
            if low > edges[-1]:  # no request is between two rows
                edges.append(low)
                for name in counts:
                    counts[name].append(0)
            edges.append(high + 1)
            for name, column in zip(counts, ("prompts", "outputs"), strict=True):
                counts[name].append(fields.number(row[column], column, 0, from_text=True))
    if not edges:
        raise InputError("there is no row.")
    found = {}
    for name in counts:
        with located(name):
            found[name] = Histogram(tuple(edges), tuple(counts[name]))
    return found
