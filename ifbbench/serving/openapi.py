"""The description of the API in OpenAPI 3.1, made from the types of its bodies, so that most bodies that are generated
from it are accepted."""

from functools import cache
from typing import Any

import msgspec

from ifbbench import __version__
from ifbbench.serving.protocol import ChatRequest, CompletionRequest

JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"
ERRORS = {
    "400": "The body is not valid, or the engine cannot run the request.",
    "401": "The API key is missing or wrong.",
    "404": "There is no such model or adapter.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "429": "The queue is full.",
    "500": "The engine failed.",
    "503": "The server is about to end.",
}


# Fields that are refused with most values.
UNSUPPORTED = ("best_of",)
UNSUPPORTED_WITHOUT_TOKENS = ("logit_bias", "use_beam_search")
OPTIONS = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
COMPLETIONS = {
    "text": {"prompt": "Hello", **OPTIONS},
    "token ids": {"prompt": [1, 2, 3], "logprobs": 1, **OPTIONS},
    "several": {"prompt": ["Hello", "world"], "n": 2, "seed": 1, "max_tokens": 8},
    "stream": {"prompt": "Hello", "stream": True, "stream_options": {"include_usage": True}, **OPTIONS},
}
CHATS = {
    "chat": {"messages": [{"role": "user", "content": "Hello"}], **OPTIONS},
    "stream": {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        "stream": True,
        "max_completion_tokens": 8,
    },
}


@cache
def openapi(vocab_size: int | None) -> dict[str, Any]:
    """The content of /openapi.json. vocab_size: of the model, None if none runs."""
    template = "#/components/schemas/{name}"
    references, components = msgspec.json.schema_components([CompletionRequest, ChatRequest], ref_template=template)
    components["Error"] = {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"]}},
    }
    completion, chat = references
    # What the types do not say: a token id is one of the vocabulary, and a list has prompts of one kind.
    text = {"type": "string", "minLength": 1}
    token = {"type": "integer", "minimum": 0, "maximum": (vocab_size or 2**31) - 1}
    ids = {"type": "array", "items": token, "minItems": 1}
    texts, lists = ({"type": "array", "items": one, "minItems": 1} for one in (text, ids))
    components["CompletionRequest"]["properties"]["prompt"]["anyOf"] = [text, ids, texts, lists]
    components["Message"]["properties"]["role"]["pattern"] = "^[A-Za-z_]+$"
    for name in ("StreamOptions", "TextPart", "Message", "CompletionRequest", "ChatRequest"):
        components[name]["additionalProperties"] = False
    for name in ("CompletionRequest", "ChatRequest"):
        fields = components[name]["properties"]
        stop_ids = {"type": "array", "items": token, "maxItems": 1000}
        fields["stop_token_ids"]["anyOf"] = [stop_ids, {"type": "null"}]
        fields["logit_bias"]["propertyNames"] = {"pattern": "^[0-9]{1,3}$"}
        for field in (*UNSUPPORTED, *(UNSUPPORTED_WITHOUT_TOKENS if vocab_size is None else ())):
            fields.pop(field, None)
    return {
        "openapi": "3.1.0",
        "info": {"title": "ifbbench serve", "version": __version__},
        "paths": {
            "/v1/completions": {"post": _operation("Continue a text.", completion, COMPLETIONS)},
            "/v1/chat/completions": {"post": _operation("Continue a conversation.", chat, CHATS)},
            "/v1/models": {"get": _operation("The model of this server, and its LoRA adapters.")},
            "/health": {"get": _operation("Whether requests are taken.")},
            "/metrics": {"get": _operation("Statistics for Prometheus.", content=TEXT)},
            "/iterations": {"get": _operation("Statistics of the latest iterations.")},
        },
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(
    summary: str, body: dict[str, Any] | None = None, examples: dict[str, Any] | None = None, content: str = JSON
) -> dict[str, Any]:
    answers: dict[str, Any] = {content: {"schema": {}}}
    if body is not None:
        answers[EVENTS] = {"schema": {"type": "string"}}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": answers}}
    if body is None:
        responses["401"] = responses["503"] = _error("Not now, or not without the API key.")
        return {"summary": summary, "responses": responses}
    responses |= {status: _error(text) for status, text in ERRORS.items()}
    return {
        "summary": summary,
        "security": [{}, {"key": []}],
        "responses": responses,
        "requestBody": {
            "required": True,
            "content": {
                JSON: {
                    "schema": body,
                    "examples": {name: {"value": value} for name, value in (examples or {}).items()},
                }
            },
        },
    }


def _error(description: str) -> dict[str, Any]:
    return {"description": description, "content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}
