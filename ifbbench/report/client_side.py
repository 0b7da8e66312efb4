"""The report of a run against an endpoint: in words what its client saw."""

from typing import Any

from ifbbench.analysis.number_texts import count, percent, significant, time_unit
from ifbbench.rundir.client_side import (
    MORE_THAN_ASKED,
    USAGE_CONTRADICTS,
    ChunkTokens,
)
from ifbbench.rundir.reader import RunData

# A client that is later than this is part of what it measures.
LATE_S = 0.005
CHUNK_TOKENS_WORDS = {
    ChunkTokens.STREAM: "the stream itself",
    ChunkTokens.USAGE: "the usage at the end, one token for each chunk",
    ChunkTokens.TOKENIZER: "the tokenizer",
    ChunkTokens.EVENLY: "the usage at the end, divided evenly over the chunks",
    ChunkTokens.CHUNKS: "nothing: one for each chunk is assumed",
}

WARNING_WORDS = {
    MORE_THAN_ASKED: "have more tokens than were asked for, which are not counted",
    USAGE_CONTRADICTS: "have fewer or more tokens than the server reports; those of the stream are counted",
}


def client_warnings(run: RunData, known: dict[str, Any]) -> list[str]:
    """What a reader must know before the figures: errors, retries, and a client that was late or busy."""
    seen, completed = known["endpoint"], known["requests"]["completed"]
    found = []
    if seen["errors"]:
        found.append(f"Errors by kind: {_counts(seen['errors'])}.")
    if seen["retries"]:
        found.append(
            f"Attempts that were repeated, by kind of error: {_counts(seen['retries'])}. Latencies include them."
        )
    if seen.get("resent"):
        found.append(
            f"{count(seen['resent'])} requests were sent again because the server had closed the idle connection."
        )
    if seen["shorter_than_asked"]:
        found.append(
            f"{count(seen['shorter_than_asked'])} of {count(completed)} answers have fewer tokens than were asked for."
        )
    for kind, number in seen.get("warnings", {}).items():
        found.append(f"{count(number)} of {count(completed)} answers {WARNING_WORDS.get(kind, kind)}.")
    late_s = seen["send_delay_s"]["p99"]
    is_closed = run.config.get("concurrency") is not None
    if late_s is not None and late_s > LATE_S and not is_closed:
        unit, scale = time_unit([late_s])
        who = "router" if "backends" in seen else "client"
        found.append(
            f"The {who} sent 1 % of the requests {significant(late_s, scale)} {unit} or more after their "
            "arrival, which is part of their latencies."
        )
    uncertain = {
        name: number
        for name, number in seen["chunk_tokens"].items()
        if name in (ChunkTokens.EVENLY, ChunkTokens.CHUNKS)
    }
    for name, number in uncertain.items():
        found.append(
            f"The tokens of each chunk of {count(number)} answers are known from "
            f"{CHUNK_TOKENS_WORDS[ChunkTokens(name)]}; --tokenizer counts them."
        )
    return found


def client_sentences(known: dict[str, Any]) -> list[str]:
    """How the client saw tokens, what it took itself, and what is unknown."""
    seen = known["endpoint"]
    found = []
    sizes, gaps = seen["tokens_per_chunk"], seen["chunk_gap_s"]
    if sizes["mean"] is not None:
        words = f"A chunk had {significant(sizes['mean'])} tokens on average, {count(sizes['max'])} at most"
        if gaps["p50"] is not None:
            unit, scale = time_unit([gaps["p50"]])
            words += (
                f"; between chunks passed {significant(gaps['p50'], scale)} {unit} (p50) and "
                f"{significant(gaps['p99'], scale)} {unit} (p99)"
            )
        sources = [CHUNK_TOKENS_WORDS[ChunkTokens(name)] for name in seen["chunk_tokens"]]
        found.append(f"{words}. Token counts are from {', and '.join(sources)}.")
    if seen.get("client_cpu_s_per_request") is not None:
        delay_s = seen["send_delay_s"]
        late = ""
        if delay_s["p50"] is not None:
            unit, scale = time_unit([delay_s["p50"]])
            late = (
                f" Requests were sent {significant(delay_s['p50'], scale)} {unit} (p50) and "
                f"{significant(delay_s['max'], scale)} {unit} (max) after their arrival,"
            )
        found.append(
            f"The client took {significant(seen['client_cpu_s_per_request'] * 1e6)} µs of processor time for "
            f"each request, {percent(seen['client_cpu_share'])} of a core.{late} on "
            f"{count(seen['connections'])} connections."
        )
    if backends := seen.get("backends"):
        parts = [
            f"{one['url']} answered {count(one['completed'])}"
            + (f" ({count(one['failed'])} attempts failed)" if one["failed"] else "")
            for one in backends
        ]
        lag = known["delivery_lag_s"]
        found.append(
            f"{len(backends)} backends behind {seen['router']}: {', '.join(parts)}. The router passed chunks on "
            f"{significant(lag['mean'] * 1e3)} ms (mean) and {significant(lag['max'] * 1e3)} ms (max) after they came."
        )
    found.append(
        "Unknown, because the server is not ours: iterations, batches, limits, pauses, KV blocks, and how "
        "long requests waited in its queue; TTFT includes that."
    )
    return found


def _counts(numbers: dict[str, int]) -> str:
    return ", ".join(f"{name} {count(number)}" for name, number in numbers.items())
