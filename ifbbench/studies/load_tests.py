"""Load tests as measurements: a row of lengths, load and mean figures becomes sums over the iterations that it took."""

import csv
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ifbbench.build.engine import Engine, build_engine
from ifbbench.engine.interfaces import Unobserved
from ifbbench.engine.records import IterationRecord
from ifbbench.errors import InputError
from ifbbench.replay.client import ReplayClient
from ifbbench.replay.requests import request_maker
from ifbbench.schedulers.engines import make_loop
from ifbbench.settings.config import RunConfig
from ifbbench.settings.fields import integer, located, number
from ifbbench.settings.names import from_mapping
from ifbbench.simulated.step_work import StepWork
from ifbbench.studies.fit import Floats, Observation
from ifbbench.studies.log import Log
from ifbbench.studies.measure import TimingExecutor
from ifbbench.workload.trace import Trace, TraceRequest

MILLISECONDS = 1000
# Columns by the names that benchmark clients give them. Times are in milliseconds.
COLUMNS = {
    "input_len": "input isl prompt_len input_length random_input_len avg_isl",
    "output_len": "output osl output_length random_output_len avg_osl",
    "concurrency": "max_concurrency concurrent_requests",
    "rate": "request_rate",
    "tp": "tp_size tensor_parallel_size",
    "num_requests": "num_prompts requests",
    "throughput": "output_tokens_per_s output_throughput throughput_tokens_per_s",
    "ttft": "ttft_ms mean_ttft_ms ttft_mean_ms ttft_ms_mean",
    "itl": "itl_ms mean_itl_ms itl_mean_ms itl_ms_mean tpot_ms mean_tpot_ms",
    "enable_chunked_context": "chunked_context enable_chunked_prefill",
    "max_num_tokens": "max_num_batched_tokens",
    "max_batch_size": "max_num_seqs",
}
# Columns that are settings of the server.
SETTINGS = ("enable_chunked_context", "max_num_tokens", "max_batch_size")
FIGURES = ("throughput", "ttft", "itl")
# Columns that must not differ between rows: one profile describes one model on one device under one engine.
OF_ALL_ROWS = {
    "model": "model",
    "gpu": "",
    "dtype": "dtype",
    "kv_cache_dtype": "kv_cache_dtype",
    "engine": "",
    "version": "",
}
# Rounds of a closed loop, where a row does not say how many requests it had.
ROUNDS = 3
MIN_REQUESTS = 8
# Means of TTFT under load contain waits for other requests, which depend on when a client's requests arrive.
WEIGHT_OF_WAITS = 0.1


@dataclass(frozen=True, slots=True)
class LoadTest:
    """One row. Exactly one of concurrency and rate (requests per second) is given. Throughput in output tokens per
    second, times in seconds; None if the row does not have them.

    settings: settings of the server, by name.
    """

    line: int
    input_len: int
    output_len: int
    concurrency: int | None
    rate: float | None
    tp_size: int
    num_requests: int
    throughput: float | None
    ttft_s: float | None
    itl_s: float | None
    settings: Mapping[str, str]


def is_load_tests(text: str) -> bool:
    """Whether the first line of `text` names columns of load tests."""
    names = {_column(name) for name in next(csv.reader(text[:10_000].splitlines()[:1]), [])}
    return {"input_len", "output_len"} <= names


def read_load_tests(log: Log, text: str, tp_size: int) -> list[LoadTest]:
    """The rows of a CSV file. tp_size: where there is no such column. InputError names the row and the column."""
    reader = csv.DictReader(text.splitlines())
    columns = {_column(name): name for name in reader.fieldnames or ()}
    if not columns.keys() & set(FIGURES):
        given = ", ".join(reader.fieldnames or ())
        raise InputError(f"{log.path}: has no column throughput, ttft or itl, but {given}; expected one of them.")
    if not columns.keys() & {"concurrency", "rate", "all_at_once"}:
        raise InputError(f"{log.path}: has neither a column concurrency nor rate; expected one of them.")
    tests = []
    found = defaultdict(set)
    for row in reader:
        values = {name: row[column] or None for name, column in columns.items()}
        with located(f"{log.path}, line {reader.line_num}"):
            if None in row or None in row.values():
                log.notes.append(f"it is cut in line {reader.line_num}, which has too few columns or too many.")
                break
            tests.append(_load_test(values, reader.line_num, tp_size))
        for name in OF_ALL_ROWS.keys() & columns.keys():
            found[name].add(values[name] or "not given")
    for name, texts in found.items():
        if len(texts) > 1:
            raise InputError(
                f"{log.path}: {name} is {' and '.join(sorted(map(str, texts))[:3])}: the rows are mixed, and a profile "
                f"is of one {name}. Give the rows of one."
            )
        if OF_ALL_ROWS[name] and texts != {"not given"}:
            log.facts[OF_ALL_ROWS[name]] = texts.pop()
    return tests


def _column(name: str) -> str:
    """The column that is meant by `name`."""
    folded = re.sub(r"[ .-]", "_", name.strip().lower())
    return next((column for column, others in COLUMNS.items() if folded in (column, *others.split())), folded)


def _load_test(row: Mapping[str, str | None], line: int, default_tp_size: int) -> LoadTest:
    def optional(name: str, unit: float = 1.0) -> float | None:
        given = row.get(name)
        return None if given is None else number(given, name, above=0, from_text=True) / unit

    if str(row.get("rate")).lower() == "inf":  # clients that send all requests as concurrency permits
        row = {**row, "rate": None}
    rate, load = optional("rate"), row.get("concurrency")
    if load is None and str(row.get("all_at_once")).lower() == "true":
        load = row.get("num_requests")
    if (load is None) == (rate is None):
        raise InputError("gives both concurrency and rate, or neither; expected one of them.")
    at_once = None if load is None else integer(load, "concurrency", 1, from_text=True)
    num_requests = integer(
        row.get("num_requests") or max(ROUNDS * (at_once or 1), MIN_REQUESTS), "num_requests", 1, from_text=True
    )
    return LoadTest(
        line,
        integer(row["input_len"], "input_len", 1, from_text=True),
        integer(row["output_len"], "output_len", 1, from_text=True),
        at_once,
        rate,
        integer(row.get("tp") or default_tp_size, "tp", 1, from_text=True),
        num_requests if at_once else max(num_requests, MIN_REQUESTS * ROUNDS),
        optional("throughput"),
        optional("ttft", MILLISECONDS),
        optional("itl", MILLISECONDS),
        {name: value for name in SETTINGS if (value := row.get(name)) is not None},
    )


class LoadTests:
    """The iterations of load tests on a simulated device. With a fixed concurrency they do not depend on how long each
    one takes, so that the figures are sums of iterations under any constants.

    Requests of one row are equally long, and those of a row with a rate arrive at equal distances.
    """

    def __init__(self, tests: Sequence[tuple[Path, LoadTest]], config: RunConfig) -> None:
        self._tests = tests
        self._config = config

    @property
    def depend_on_times(self) -> bool:
        """Whether the iterations of a test depend on how long each takes."""
        return any(test.rate is not None for _, test in self._tests)

    def observations(self, device: str) -> list[Observation]:
        """The figures of all rows as sums of iterations, scheduled on `device`."""
        observations = []
        for path, test in self._tests:
            with located(f"{path}, line {test.line}"):
                config = self._config.with_values(device=device, tp_size=test.tp_size)
                engine = build_engine(from_mapping({**config.as_dict(), **test.settings}))
                observations += _observations(test, *_schedule(engine, test))
        return observations


class _TokenTimes(Unobserved):
    """The iterations in which each request gets its first and its last token, by index, and when each ends."""

    def __init__(self, count: int) -> None:
        self.first, self.last = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        self.start_s: list[float] = []
        self.end_s: list[float] = []

    def iteration(self, record: IterationRecord) -> None:
        """Take in one iteration."""
        for chunk in record.context:
            if chunk.is_last:
                self.first[chunk.request.index] = len(self.end_s)
        for request in record.finished:
            self.last[request.index] = len(self.end_s)
        self.start_s.append(record.start_s)
        self.end_s.append(record.end_s)


def _schedule(engine: Engine, test: LoadTest) -> tuple[list[StepWork], _TokenTimes, Floats]:
    """The work of each iteration of `test`, when tokens are made, and when requests arrive, in seconds."""
    distance_s = 0.0 if test.rate is None else 1 / test.rate
    requests = [
        TraceRequest(
            index, index * distance_s, test.input_len, max_new_tokens=test.output_len, output_len=test.output_len
        )
        for index in range(test.num_requests)
    ]
    limits, clock = engine.limits, engine.clock
    if test.input_len > limits.max_input_len or test.input_len + test.output_len > limits.max_seq_len:
        raise InputError(
            f"a request of {test.input_len} tokens in and {test.output_len} out is longer than the engine takes; raise "
            "--max_num_tokens or --max_seq_len, or add --enable_chunked_context, as on the measured server."
        )
    client = ReplayClient(
        Trace("load test", requests, sha256="", source="load test"),
        clock,
        request_maker(engine),
        concurrency=test.concurrency,
        keeps_arrivals=test.concurrency is None,
        keeps_outputs=False,
    )
    executor, times = TimingExecutor(engine.executor, clock), _TokenTimes(len(requests))
    loop = make_loop(limits, executor, clock, client.get_requests, client.send_response, times, client.queued)
    while not client.done:
        if not loop.step() and not client.done:
            client.wait()
    while loop.step():
        pass
    make_request = request_maker(engine)
    arrivals = np.array([client.arrival_s(make_request(index, request)) for index, request in enumerate(requests)])
    return [sample.work for sample in executor.samples()], times, arrivals


def _observations(test: LoadTest, works: Sequence[StepWork], times: _TokenTimes, arrivals: Floats) -> list[Observation]:
    count, end_s = test.num_requests, np.array(times.end_s)
    begin_s = np.concatenate([[0.0], end_s[:-1]])
    found = []

    def add(kind: str, seconds: float, shares: Floats, weight: float = 1.0) -> None:
        found.append(Observation(seconds, _merged(works, shares), kind, tp_size=test.tp_size, weight=weight))

    if test.throughput is not None and test.rate is None:
        # Under a fixed rate, throughput is the rate.
        add("throughput", 1 / test.throughput, np.full(len(works), 1 / (count * test.output_len)))
    if test.ttft_s is not None:
        shares = np.zeros(len(works))
        for arrival_s, first in zip(arrivals, times.first, strict=True):
            # The iteration that runs when a request arrives counts in part.
            part = np.clip((end_s - arrival_s) / np.maximum(end_s - begin_s, 1e-12), 0, 1)
            part[np.array(times.start_s) >= arrival_s] = 1
            shares[: first + 1] += part[: first + 1] / count
        add("TTFT", test.ttft_s, shares, 1.0 if test.concurrency == 1 else WEIGHT_OF_WAITS)
    if test.itl_s is not None and test.output_len > 1:
        changes = np.zeros(len(works) + 1)
        np.add.at(changes, times.first + 1, 1 / (count * (test.output_len - 1)))
        np.add.at(changes, times.last + 1, -1 / (count * (test.output_len - 1)))
        add("ITL", test.itl_s, changes.cumsum()[:-1])
    return found


def _merged(works: Sequence[StepWork], shares: Floats) -> tuple[tuple[StepWork, float], ...]:
    """Iterations and their shares, those of equal counts as one: a time is linear in what they differ in."""
    groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for index in np.flatnonzero(shares > 1e-12).tolist():
        work = works[index]
        groups[work.context_tokens, work.context_requests, work.generation_tokens, work.outputs].append(index)
    merged = []
    for indices in groups.values():
        weights = shares[indices]
        means = np.average(np.array([works[index] for index in indices], dtype=float), axis=0, weights=weights)
        merged.append((StepWork(*np.rint(means).astype(int).tolist()), float(weights.sum())))
    return tuple(merged)
