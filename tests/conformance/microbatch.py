"""Replays micro-batch scheduler cases: which requests run together, and how prompts are cut into chunks."""

from typing import Any

from ifbbench.engine.request import Request, RequestState
from ifbbench.kv.attention_window import UNLIMITED
from ifbbench.schedulers.tensorrt_llm.chunks import ChunkLimits, size_chunks
from ifbbench.schedulers.tensorrt_llm.micro_batch import MicroBatchScheduler
from tests.conformance.micro_batch_loop import MicroBatchLoop, Scheduled
from tests.conformance.outcome import Case, Mismatch, expect_equal, require_features

SUPPORTED = {"chunking", "draft_tokens", "overlap", "beam"}


def replay(case: Case) -> None:
    """Raise Skip or Mismatch, or return when the case passes."""
    require_features(case, SUPPORTED)
    {"forward_loop": _replay_loop, "chunking": _replay_chunking}[case["kind"]](case)


def _replay_loop(case: Case) -> None:
    config = case["config"]
    requests = {entry["id"]: _request(entry) for entry in case["requests"]}
    loop = MicroBatchLoop(_scheduler(config), list(requests.values()), config["num_micro_batches"])
    checks = {entry["iteration"]: entry for entry in case["expected"]["iterations"]}
    for iteration in range(case["expected"]["num_iterations"]):
        scheduled = loop.step()
        if iteration in checks:
            _check(scheduled, requests, checks[iteration])
        for action in case["actions"]:
            if action["after_iteration"] == iteration:
                for request_id, count in action["set_num_draft_tokens"].items():
                    requests[int(request_id)].set_draft_tokens(count)


def _check(scheduled: Scheduled, requests: dict[int, Request], expected: dict[str, Any]) -> None:
    where = f"iteration {expected['iteration']}"
    expect_equal(f"{where}, number scheduled", len(scheduled.ids), expected["num_scheduled"])
    missing = set(expected["scheduled_includes"] or ()) - set(scheduled.ids)
    surplus = set(expected["scheduled_excludes"] or ()) & set(scheduled.ids)
    if missing or surplus:
        raise Mismatch(f"{where}: {sorted(missing)} not scheduled, {sorted(surplus)} scheduled unexpectedly")
    for name, values in expected["after"].items():
        actual = {request_id: _value(requests[int(request_id)], name) for request_id in values}
        expect_equal(f"{where}, {name}", actual, values)


def _value(request: Request, name: str) -> int:
    if name == "generated_tokens":
        # A complete request has left the table that counts them.
        return request.max_new_tokens if request.state is RequestState.GENERATION_COMPLETE else request.num_generated
    return {"context_position": request.position, "num_draft_tokens": request.num_draft_tokens}[name]


def _request(entry: dict[str, Any]) -> Request:
    return Request(
        entry["id"],
        entry["prompt_len"],
        entry["max_new_tokens"],
        beam_width=entry["beam_width"],
        num_draft_tokens=entry["num_draft_tokens"],
    )


def limit_of(tokens: int | None) -> int:
    """A limit of a case, where None is none."""
    return UNLIMITED if tokens is None else tokens


def _scheduler(config: dict[str, Any]) -> MicroBatchScheduler:
    chunking = config["chunking"]
    if chunking is None:
        return MicroBatchScheduler(config["max_batch_size"], limit_of(config["max_num_tokens"]))
    limits = ChunkLimits(chunking["chunk_unit_size"], limit_of(config["max_context_length"]))
    return MicroBatchScheduler(config["max_batch_size"], limit_of(config["max_num_tokens"]), chunking["policy"], limits)


def _replay_chunking(case: Case) -> None:
    config, expected = case["config"], case["expected"]
    limits = ChunkLimits(config["chunk_unit_size"], limit_of(config["max_context_length"]))
    requests = [
        Request(index, length, 1, num_draft_tokens=drafts)
        for index, (length, drafts) in enumerate(zip(case["context_lengths"], case["draft_lengths"], strict=True))
    ]
    for iteration, positions in enumerate(expected["positions_after_iteration"]):
        unfinished = [request for request in requests if request.remaining_context > 0]
        size_chunks(unfinished, config["policy"], limit_of(config["ctx_tokens_capacity"]), limits)
        for request in unfinished:
            request.advance_context()
        expect_equal(f"positions after iteration {iteration}", [item.position for item in requests], positions)
    if expected["final_draft_lengths"] is not None:
        drafts = [request.num_draft_tokens for request in requests]
        expect_equal("draft tokens", drafts, expected["final_draft_lengths"])
