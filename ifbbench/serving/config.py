"""The settings of the server; those of its engine are in `ifbbench.settings.config`."""

from dataclasses import dataclass
from functools import cache, partial

from ifbbench.errors import InputError
from ifbbench.settings.fields import Setting, declare, settings_of

METRICS_NAMES = ("trtllm", "vllm")
LOOPBACK = "127.0.0.1"

_server, _limits, _live = (partial(declare, group) for group in ("server", "limits", "recording of traffic"))


@dataclass(frozen=True)
class FrontDoorConfig:
    """The settings that every server of live traffic has. Values are checked on construction."""

    host: str = _server(LOOPBACK, "Address to listen on; 0.0.0.0 is every network of the machine.")
    drain_timeout: float = _server(
        30.0,
        "On SIGTERM or Ctrl-C: answer requests that were accepted for so long, then end the others.",
        minimum=0.0,
        unit="s",
    )

    record: str | None = _live(
        None, "Write a run directory with the live traffic as its trace; `ifbbench run DIRECTORY` replays it."
    )
    record_lengths_only: bool = _live(False, "With --record: the trace has the lengths of prompts, not their tokens.")

    def __post_init__(self) -> None:
        for setting in settings_of(type(self)):
            object.__setattr__(self, setting.name, setting.check(getattr(self, setting.name)))
        if self.record_lengths_only and self.record is None:
            raise InputError("--record_lengths_only: nothing is recorded; add --record DIRECTORY, or leave it out.")


@dataclass(frozen=True)
class ServerConfig(FrontDoorConfig):
    """All settings of the HTTP server."""

    port: int = _server(8000, "Port to listen on; 0 takes a free one.", minimum=0, maximum=65535)
    api_key: str | None = _server(
        None,
        "Requests to /v1 need this key as a bearer token. Default: the environment variable IFBBENCH_API_KEY, "
        "else none is needed.",
    )
    served_model_name: str | None = _server(None, "Name of the model in responses. Default: that of --model.")
    metrics_names: str | None = _server(
        None,
        "Names in /metrics: those of TensorRT-LLM's Triton backend, or of vLLM. Default: vllm with --engine vllm, else "
        "trtllm.",
        choices=METRICS_NAMES,
    )
    default_max_tokens: int = _server(
        1024,
        "Output tokens of a chat request that gives no limit; a text completion then has 16.",
        minimum=1,
        unit="tokens",
    )
    ignore_unknown_fields: bool = _server(
        False, "Ignore fields of a request that this server does not have, instead of refusing it with status 400."
    )
    allowed_origins: str | None = _server(
        None,
        "Origins of web pages that may call the server from a browser, with commas between; * is all. Default: none.",
    )

    max_clients: int = _limits(
        4096,
        "Open connections; more are refused with status 503, but for /health and the like.",
        minimum=1,
        unit="connections",
    )
    receive_timeout: float = _limits(
        60.0,
        "The headers of a request must arrive in this time, and its body, too; a connection without a request is "
        "closed after it.",
        above=0.0,
        maximum=86_400.0,
        unit="s",
    )
    max_body_bytes: int = _limits(
        16 * 1024 * 1024, "Largest body of a request; a larger one is refused with status 413.", minimum=1, unit="bytes"
    )


@cache
def server_settings() -> tuple[Setting, ...]:
    """All settings of the server, in the order of `ServerConfig`."""
    return settings_of(ServerConfig)


def metrics_names_of(server: ServerConfig, engine: str) -> str:
    """The names in /metrics of a server with this engine."""
    return server.metrics_names or (engine if engine in METRICS_NAMES else METRICS_NAMES[0])
