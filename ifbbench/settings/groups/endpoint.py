"""Settings of an endpoint: a server that is not ours runs the requests."""

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

from ifbbench.errors import InputError
from ifbbench.settings.bounds import MAX_SPAN_S
from ifbbench.settings.fields import declare, located, table

# The deepest JSON that an option takes: code that walks through it is recursive.
MAX_JSON_DEPTH = 100
ENDPOINT_TYPES = ("openai", "openai-chat", "triton", "trtllm-serve")
PROMPT_FORMS = ("tokens", "text")

_endpoint = partial(declare, "endpoint")


def _json_object(value: Any) -> Any:
    """A JSON object as text, checked; also given as keys and values."""
    with located("--extra_body"):
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise InputError(f"not valid JSON ({error}); expected an object.") from None
        fields = table(value, "the value")
        if not _is_shallow(fields, MAX_JSON_DEPTH):
            raise InputError(f"the value has more than {MAX_JSON_DEPTH} levels; nest it less.")
        return json.dumps(fields)


def _is_shallow(value: Any, levels: int) -> bool:
    """Whether no lists and objects in `value` are nested deeper than `levels`."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is None or (levels > 0 and all(_is_shallow(one, levels - 1) for one in inner))


@dataclass(frozen=True)
class EndpointSettings:
    """Settings of an endpoint: a server that is not ours runs the requests."""

    endpoint: str | None = _endpoint(
        None,
        "Send the requests to the server at this URL, in place of an engine of this process.",
        elsewhere="base_url url target server_url endpoint_url",
        is_common=True,
    )
    endpoint_type: str = _endpoint(
        ENDPOINT_TYPES[0],
        "API of the server: completions or chats of OpenAI (vLLM, SGLang, …), generate_stream of "
        "Triton with the models of tensorrtllm_backend, or trtllm-serve.",
        choices=ENDPOINT_TYPES,
        value_aliases={
            "vllm": "openai",
            "sglang": "openai",
            "openai-completions": "openai",
            "chat": "openai-chat",
            "trtllm": "trtllm-serve",
        },
    )
    endpoint_prompts: str | None = _endpoint(
        None,
        "Send prompts as token ids, or as text: of those ids by --tokenizer, else a word for each token. "
        "Default: tokens, and text for openai-chat and triton.",
        choices=PROMPT_FORMS,
    )
    endpoint_vocab_size: int = _endpoint(
        32_000, "Prompts that the trace does not record have token ids below this.", minimum=1, unit="tokens"
    )
    endpoint_api_key: str | None = _endpoint(
        None,
        "Key that the server asks for, sent as a bearer token and not recorded. Default: the environment "
        "variable IFBBENCH_API_KEY or OPENAI_API_KEY.",
        elsewhere="api_key",
    )
    endpoint_timeout: float = _endpoint(
        300.0,
        "A request fails if the server sends nothing for so long.",
        above=0.0,
        unit="s",
        elsewhere="timeout request_timeout request_timeout_seconds",
    )
    endpoint_max_time: float | None = _endpoint(
        None,
        "A request fails if its answer is not complete so long after it was sent. Default: --duration, but at "
        "least --endpoint_timeout; without a duration 6 hours.",
        above=0.0,
        maximum=MAX_SPAN_S,
        unit="s",
        elsewhere="total_timeout",
    )
    endpoint_retries: int = _endpoint(
        0,
        "Further attempts of a request that was not accepted: no connection, or status 429, 502, 503 or 504. Pauses "
        "and Retry-After are up to --endpoint_timeout.",
        minimum=0,
        maximum=100,
        elsewhere="max_retries retries",
    )
    ignore_eos: bool = _endpoint(
        True,
        "Ask the server to generate the whole output length of the trace. Without it only fields of OpenAI's own "
        "API are sent. With --engine sglang: outputs that are as long as they may be were asked for so.",
    )
    extra_body: str | None = _endpoint(
        None,
        "JSON object of more fields of each request; null removes a field.",
        convert=_json_object,
        elsewhere="extra_request_body extra_inputs extra_params backend_kwargs",
    )
    poll_metrics: bool = _endpoint(
        False, "Record the server's metrics each second, in metrics.jsonl.", elsewhere="server_metrics"
    )
    metrics_url: str | None = _endpoint(
        None, "Where to poll. Default: /metrics of the server; with triton that of port 8002."
    )
