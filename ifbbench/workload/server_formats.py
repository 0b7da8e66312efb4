"""What servers record of their own traffic: spans of OpenTelemetry, and access logs with the usage of each request."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from ifbbench.errors import InputError
from ifbbench.settings.fields import integer
from ifbbench.workload.containers import SPANS, end_of_span, otlp_spans
from ifbbench.workload.formats import ReadOptions, Row, TraceFormat, json_object, objects, value_at
from ifbbench.workload.recorded_formats import MILLISECONDS, NANOSECONDS, Times
from ifbbench.workload.tool_formats import BAD_REQUEST
from ifbbench.workload.trace import EPOCH_S, MAX_LENGTH, TraceRequest

# Prompt and output tokens of a request, by the names that APIs and conventions give them.
API_USAGES = (("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens"))
SPAN_USAGES = (
    *((f"gen_ai.usage.{prompt}", f"gen_ai.usage.{output}") for prompt, output in API_USAGES),
    ("llm.token_count.prompt", "llm.token_count.completion"),
    ("llm.usage.prompt_tokens", "llm.usage.completion_tokens"),
)
# And by those of access logs: Envoy AI Gateway (two forms), Higress, Cloudflare, Azure, Bedrock (two forms), AI SDK.
USAGES = (
    *API_USAGES,
    ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"),
    ("genai_tokens_input", "genai_tokens_output"),
    ("input_token", "output_token"),
    ("tokens_in", "tokens_out"),
    ("PromptTokens", "CompletionTokens"),
    ("inputTokens", "outputTokens"),
    ("input.inputTokenCount", "output.outputTokenCount"),
    ("promptTokens", "completionTokens"),
)
# Tokens of a prompt that Anthropic's API does not count in input_tokens.
CACHED_INPUT = ("cache_read_input_tokens", "cache_creation_input_tokens")
NOT_GIVEN = (None, "-", "")
# Fields in which a row has JSON as text: of Docker and of loggers, the whole line; and parts of it.
LINES, PARTS = ("log", "message", "msg"), ("ai_log", "response", "response_body", "body")
DURATION = "request_time"
FAILURES = ("failure", "failed", "error")
MAX_TOKENS = "gen_ai.request.max_tokens"
SPAN_ERRORS = (2, "STATUS_CODE_ERROR", "ERROR")
# What time stamps since 1970 count, by their size: as seconds, the least of milliseconds is the year 5138.
STAMPS = ((1e17, NANOSECONDS), (1e14, 1_000_000), (1e11, MILLISECONDS))


def has_usage(row: Row) -> bool:
    """Whether a row has a usage where access logs have it."""
    row = with_objects(row)
    return any(usage_of(value_at(row, place) if place else row) for place in UsageLogFormat.PLACES)


def with_objects(row: Row) -> Row:
    """A row with the JSON objects that it has as texts; the fields of a line within it are fields of the row, and its
    times stand in place of those of the row."""
    found = dict[str, Any]()
    for name in (*LINES, *PARTS):
        if isinstance(value := row.get(name), str) and value.lstrip().startswith("{"):
            with suppress(InputError):
                found[name] = json_object(value.encode())
    if not found:
        return row
    within = {name: value for line in LINES for name, value in found.get(line, {}).items()}
    times = () if within.keys().isdisjoint(UsageLogFormat.TIMES) else UsageLogFormat.TIMES
    return {**{name: value for name, value in row.items() if name not in times}, **found, **within}


def usage_of(values: Any) -> tuple[str, str] | None:
    """The names under which `values` has the tokens of prompt and output; None if it has not both."""
    if not isinstance(values, Mapping):
        return None
    return next((pair for pair in USAGES if all(value_at(values, name) not in NOT_GIVEN for name in pair)), None)


class OpenTelemetryFormat(TraceFormat):
    """Spans of OpenTelemetry with the usage of a request (`gen_ai.usage.prompt_tokens` and `.completion_tokens`, or
    `.input_tokens` and `.output_tokens`), as vLLM's `llm_request` has: JSON of OTLP (`resourceSpans`; a document, or
    lines as the collector's file exporter writes them), or the JSON of Jaeger (`data` with `spans`).

    A request arrives at the start of its span; `gen_ai.request.max_tokens` is its reservation. Of spans with a usage
    that contain each other (a gateway's and a server's), the innermost counts. Failed spans are left out, and those
    without output, as of embeddings.
    """

    needs = ("resourceSpans|spans|startTimeUnixNano",)
    left_out = "rows without the span of an answered request"

    def __init__(self, keys: Collection[str], options: ReadOptions) -> None:
        super().__init__(keys, options)
        self._first: int | None = None  # start of the first request, in nanoseconds or (Jaeger) microseconds
        self._failed = 0
        self._around: set[str] = set()  # ids of spans that contain one that was counted

    def requests(self, row: Row, index: int) -> tuple[TraceRequest, ...]:
        found = list[TraceRequest]()
        for span in sorted(_spans(row), key=end_of_span):  # a span ends before one that contains it
            attributes = _attributes(span)
            names = next((pair for pair in SPAN_USAGES if attributes.get(pair[0]) is not None), None)
            is_around = str(span.get("spanId", span.get("spanID"))) in self._around
            if (names is not None or is_around) and (parent := _parent(span)):
                self._around.add(parent)
            if names is None or is_around:
                continue
            if value_at(span, "status.code") in SPAN_ERRORS or attributes.get("error") is True:
                self._failed += 1
                continue
            if attributes.get(names[1]) in (None, 0, "0"):
                continue
            found.append(self._request(span, attributes, names, index + len(found)))
        return tuple(found)

    def notes(self) -> list[str]:
        return [f"spans of failed requests are left out: {self._failed:,}"] if self._failed else []

    def _request(self, span: Row, attributes: Row, names: tuple[str, str], index: int) -> TraceRequest:
        name, per_second = (
            ("startTimeUnixNano", NANOSECONDS) if "startTimeUnixNano" in span else ("startTime", 1_000_000)
        )
        start = integer(span.get(name), name, 0, from_text=True)  # as a float, it would be exact to 256 ns
        self._first = start if self._first is None else self._first
        arrival_s = (start - self._first) / per_second
        prompt, output = (integer(attributes.get(name), name, 1, MAX_LENGTH, from_text=True) for name in names)
        reserved = attributes.get(MAX_TOKENS)
        if reserved is not None:
            reserved = integer(reserved, MAX_TOKENS, 1, MAX_LENGTH, from_text=True)
        return TraceRequest(index, arrival_s, prompt, max(reserved or output, output), output)


def _spans(row: Row) -> Iterable[Row]:
    """The spans in a row: of OTLP, of Jaeger, or the row itself."""
    if SPANS in row:
        return otlp_spans(row)
    return objects(row, "spans") if "spans" in row else (row,)


def _attributes(span: Row) -> dict[str, Any]:
    """The attributes of a span by name: of OTLP with typed values, of Jaeger its tags."""
    found = dict[str, Any]()
    for name in ("attributes", "tags"):
        for attribute in objects(span, name):
            value = attribute.get("value")
            if isinstance(value, dict):  # {"intValue": "7"}; in Parquet also the other types, as None
                value = next((one for one in value.values() if one is not None), None)
            found[str(attribute.get("key"))] = value
    return found


def _parent(span: Row) -> str | None:
    """The id of the span around a span; None if it has none."""
    if span.get("parentSpanId"):
        return str(span["parentSpanId"])
    references = (one for one in objects(span, "references") if one.get("refType") == "CHILD_OF")
    return next((str(one.get("spanID")) for one in references), None)


class UsageLogFormat(TraceFormat):
    """Access logs: JSON lines or a list of objects with the `usage` of a response (prompt_tokens and completion_tokens,
    or input_tokens and output_tokens, or other names in USAGES), on top, in `response`, `response.body`, `body`,
    `result` or `ai.proxy`, or these two numbers on top. Fields of LINES and PARTS may be such objects as text.

    A request arrives at the first of TIMES that the first rows have; numbers are seconds, milliseconds, micro- or
    nanoseconds since 1970, by their size. Without one all requests arrive at once. Rows with an error, a failure, a
    status from 400 on, or no usage are left out.
    """

    needs = ("usage|completion_tokens",)
    left_out = "rows of failed requests and of those without usage"
    TIMES = (
        "start_time",
        "startTime",
        "started_at",
        "request_time",  # nginx: seconds that the request took, which is no time to arrive at
        "request_start_time",
        "arrival_time",
        "created_at",
        "timestamp",
        "@timestamp",
        "time",
        "ts",
        "datetime",
        "time_iso8601",
        "msec",
        "TimeGenerated",
        "created",
        "response.created",
        "response.body.created",
    )
    PLACES = (
        "usage",
        "response.usage",
        "response.body.usage",
        "response_body.usage",
        "body.usage",
        "result.usage",
        "ai.proxy.usage",
        "ai.ai-proxy.usage",
        "ai_log",
        "",
    )
    STATUS = ("status_code", "status", "response.status_code", "response.status", "response_code")
    LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    REQUESTS = ("request.body.", "request.", "body.", "")

    def __init__(self, keys: Collection[str], options: ReadOptions) -> None:
        super().__init__(keys, options)
        self._named = [name for name in self.TIMES if name in keys]
        if any(name in keys for name in LINES):
            self._named = []  # of a container, which come after those of the line within
        self._time: str | None = None
        self._times: Times | None = None
        self._is_known = False

    def requests(self, row: Row, index: int) -> tuple[TraceRequest, ...]:
        row = with_objects(row)
        if row.get("error") or row.get("success") is False or any(map(_is_failure, self._statuses(row))):
            return ()
        place, names = next(
            ((place, names) for place in self.PLACES if (names := usage_of(value_at(row, place) if place else row))),
            ("", None),
        )
        if names is None:
            return ()
        usage, prefix = (value_at(row, place), f"{place}.") if place else (row, "")
        if value_at(usage, names[1]) in (0, "0"):
            return ()
        prompt, output = (
            integer(value_at(usage, name), f"{prefix}{name}", least, MAX_LENGTH, from_text=True)
            for name, least in zip(names, (0, 1), strict=True)
        )
        if names == API_USAGES[1]:
            prompt += sum(integer(usage.get(name) or 0, f"{prefix}{name}", 0, MAX_LENGTH) for name in CACHED_INPUT)
        prompt = integer(prompt, f"{prefix}{names[0]}", 1, MAX_LENGTH)
        limits = (value_at(row, f"{where}{limit}") for where in self.REQUESTS for limit in self.LIMITS)
        reserved = next((limit for limit in limits if isinstance(limit, int) and limit >= output), output)
        return (TraceRequest(index, self._arrival_s(row), prompt, min(reserved, MAX_LENGTH), output),)

    def notes(self) -> list[str]:
        return [f"requests arrive at the field {self._time}"] if self._time else []

    def _statuses(self, row: Row) -> Iterator[Any]:
        return (value_at(row, name) for name in self.STATUS)

    def _arrival_s(self, row: Row) -> float:
        if not self._is_known:
            # The keys of the first rows do not show fields of nested objects.
            named = self._named or [name for name in self.TIMES if value_at(row, name) is not None]
            self._time = next((name for name in named if name != DURATION or _is_date(row.get(name))), None)
            self._is_known = True
        if self._time is None:
            return 0.0
        value = value_at(row, self._time)
        if self._times is None:
            self._times = Times(self._time, _units_per_second(value))
        return self._times.seconds(value)


def _is_failure(status: Any) -> bool:
    """Whether the status of a response, a number or a word, is that of a failure."""
    if isinstance(status, str):
        return status.lower() in FAILURES or (status.isdecimal() and int(status) >= BAD_REQUEST)
    return isinstance(status, int) and status >= BAD_REQUEST


def _is_date(value: Any) -> bool:
    """Whether a value is a point in time, not a number of seconds."""
    try:
        return float(value) >= EPOCH_S
    except (TypeError, ValueError, OverflowError):
        return isinstance(value, str)


def _units_per_second(stamp: Any) -> int:
    """What a time stamp since 1970 counts, as so many a second."""
    try:
        size = float(stamp)
    except (TypeError, ValueError, OverflowError):
        return 1
    return next((per_second for smallest, per_second in STAMPS if size >= smallest), 1)
