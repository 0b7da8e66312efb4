"""The description of the API in OpenAPI 3.1, made from the types of its bodies."""

from functools import cache
from typing import Any

import msgspec

from ifbbench import __version__
from ifbbench.serving.protocol import ChatRequest, CompletionRequest

JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"
ERRORS = {
    "400": "The body is not valid, or the engine cannot run the request.", "401": "The API key is missing or wrong.",
    "413": "The body is too large.", "429": "The queue is full.", "500": "The engine failed.",
    "503": "The server is about to end.",
}  # fmt: skip


@cache
def openapi() -> dict[str, Any]:
    """The content of /openapi.json."""
    template = "#/components/schemas/{name}"
    references, components = msgspec.json.schema_components([CompletionRequest, ChatRequest], ref_template=template)
    components["Error"] = {
        "type": "object", "required": ["error"],
        "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"]}},
    }  # fmt: skip
    completion, chat = references
    return {
        "openapi": "3.1.0",
        "info": {"title": "ifbbench serve", "version": __version__},
        "paths": {
            "/v1/completions": {"post": _operation("Continue a text.", completion)},
            "/v1/chat/completions": {"post": _operation("Continue a conversation.", chat)},
            "/v1/models": {"get": _operation("The model of this server.")},
            "/health": {"get": _operation("Whether requests are taken.")},
            "/metrics": {"get": _operation("Statistics for Prometheus.", content=TEXT)},
            "/iterations": {"get": _operation("Statistics of the latest iterations.")},
        },
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(summary: str, body: dict[str, Any] | None = None, content: str = JSON) -> dict[str, Any]:
    answers: dict[str, Any] = {content: {"schema": {}}}
    if body is not None:
        answers[EVENTS] = {"schema": {"type": "string"}}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": answers}}
    if body is None:
        responses["401"] = responses["503"] = _error("Not now, or not without the API key.")
        return {"summary": summary, "responses": responses}
    responses |= {status: _error(text) for status, text in ERRORS.items()}
    return {
        "summary": summary, "security": [{}, {"key": []}], "responses": responses,
        "requestBody": {"required": True, "content": {JSON: {"schema": body}}},
    }  # fmt: skip


def _error(description: str) -> dict[str, Any]:
    return {"description": description, "content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}
