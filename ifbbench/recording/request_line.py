"""The lines of `requests.jsonl`."""

from collections.abc import Mapping
from typing import NamedTuple

from ifbbench.engine.request import Request
from ifbbench.recording.jsonl_writer import encode

TIMES = ("queue_time_s", "ttft_s", "tpot_s", "e2e_s", "first_scheduled_s", "first_token_s", "end_s")


class RequestTimes(NamedTuple):
    """When a completed request did what, on the run's clock, and its latencies; all in seconds."""

    first_scheduled_s: float
    first_token_s: float
    end_s: float
    queue_time_s: float
    ttft_s: float
    tpot_s: float | None
    e2e_s: float


def completed_line(
    request: Request, arrival_s: float, output_len: int, times: RequestTimes, attribution_s: Mapping[str, float]
) -> str:
    """Of a completed request. There are many, so this is a template: it takes half of the time that an encoder does."""
    spent = ",".join([f"{encode(name)}:{seconds!r}" for name, seconds in attribution_s.items()])
    tpot = "null" if times.tpot_s is None else repr(times.tpot_s)
    return (
        f'{{"request_id":{request.request_id},"index":{request.index},"arrival_s":{arrival_s!r},'
        f'"prompt_len":{request.original_prompt_len},"output_len":{output_len},"queue_time_s":{times.queue_time_s!r},'
        f'"ttft_s":{times.ttft_s!r},"tpot_s":{tpot},"e2e_s":{times.e2e_s!r},'
        f'"first_scheduled_s":{times.first_scheduled_s!r},"first_token_s":{times.first_token_s!r},'
        f'"end_s":{times.end_s!r},"max_new_tokens":{_asked_for(request)},"pauses":{request.pauses},'
        f'"recomputed_tokens":{request.recomputed_tokens},"reused_tokens":{request.reused_tokens},'
        f'"attribution_s":{{{spent}}},"outcome":"completed","error":null}}'
    )


def failed_line(request: Request, arrival_s: float, error: str | None) -> str:
    """Of a request that was refused, failed, or was stopped by its client (`error` None)."""
    return encode(
        {
            "request_id": request.request_id,
            "index": request.index,
            "arrival_s": arrival_s,
            "prompt_len": request.original_prompt_len,
            "output_len": request.num_outputs,
            **dict.fromkeys(TIMES),
            "max_new_tokens": _asked_for(request),
            "pauses": request.pauses,
            "recomputed_tokens": request.recomputed_tokens,
            "reused_tokens": 0,
            "attribution_s": {},
            "outcome": "stopped" if error is None else "failed",
            "error": error,
        }
    )


def _asked_for(request: Request) -> int:
    """Output tokens reserved at first: pauses join tokens to the prompt, and take as many off."""
    return request.max_new_tokens + request.prompt_len - request.original_prompt_len
