"""The lines of `spans.jsonl` and `requests.jsonl`. Optional fields are left out where they are UNSET."""

from msgspec import UNSET, Struct, UnsetType, field


class SpanLine(Struct, gc=False):
    """A line of `spans.jsonl`: consecutive iterations of a micro batch in which one request does one thing.

    cause: why it waits, or the id of the request that it was paused for. first_output: of generation, the position of
    the output token of the first iteration. chunks: of context and recompute, tokens of each iteration. produced:
    output tokens that were not there before. every: with several micro batches, of a span in which the request runs,
    their number: it runs in each so many iterations, from the first to the last. steps: of generation, tokens of each
    iteration, where draft tokens make it more than one in some.
    """

    request_id: int
    phase: str
    first_iteration: int
    last_iteration: int
    tokens: int
    cause: str | int | None
    first_output: int | UnsetType
    chunks: list[int] | UnsetType
    produced: int | UnsetType
    every: int | UnsetType = UNSET
    steps: list[int] | UnsetType = UNSET


class RequestLine(Struct, gc=False):
    """A line of `requests.jsonl`. Times are None, and attribution_s is empty, unless the request completed.

    attribution_s: seconds by what the request did or waited for, which add up to e2e_s. max_new_tokens: as requested.
    class, priority: where the trace gives them, the default priority left out. slo_met: whether the request
    met every objective of each request, where there are any. draft_tokens, accepted_draft_tokens: those verified, and
    those that became output, of requests with any.
    """

    request_id: int
    index: int
    arrival_s: float
    prompt_len: int
    output_len: int
    queue_time_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    first_scheduled_s: float | None
    first_token_s: float | None
    end_s: float | None
    max_new_tokens: int
    pauses: int
    recomputed_tokens: int
    reused_tokens: int
    attribution_s: dict[str, float]
    outcome: str
    error: str | None
    request_class: str | UnsetType = field(default=UNSET, name="class")
    priority: float | UnsetType = UNSET
    slo_met: bool | UnsetType = UNSET
    draft_tokens: int | UnsetType = UNSET
    accepted_draft_tokens: int | UnsetType = UNSET
