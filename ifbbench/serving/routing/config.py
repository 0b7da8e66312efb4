"""The settings of a router in front of servers."""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from ifbbench.errors import InputError
from ifbbench.serving.config import ServerConfig
from ifbbench.settings.fields import Setting, declare, settings_of

_router = partial(declare, "router")
# Settings of ServerConfig that only a server with an engine has.
OF_ENGINES = ("metrics_names", "default_max_tokens", "ignore_unknown_fields", "allowed_origins")


def _addresses(value: Any) -> Any:
    """Addresses as one text; also given as a list of texts."""
    if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        return ",".join(value) or None
    return value


@dataclass(frozen=True)
class RouterConfig(ServerConfig):
    """The settings of `ifbbench serve`: those of a server, and those of a router in front of others."""

    router_only: bool = _router(
        False, "Run no engine: send requests to the servers of --backend, by --router, and pass their answers on."
    )
    backend: str | None = _router(
        None,
        "With --router_only: the address of a server, or several with commas between. May be given several times.",
        convert=_addresses,
        is_list=True,
    )
    health_interval: float = _router(
        2.0, "With --router_only: each server is asked for /health in such intervals.", above=0.0, unit="s"
    )
    backend_timeout: float = _router(
        600.0,
        "With --router_only: a request has failed if nothing arrives from its server for so long.",
        above=0.0,
        unit="s",
    )
    backend_kv_tokens: int = _router(
        500_000,
        "With --router_only: tokens of prompts that a server is expected to hold; used where its /metrics do not say.",
        minimum=0,
        unit="tokens",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        usual = {one.name: one.default for one in settings_of(RouterConfig)}
        if self.router_only:
            if not self.addresses:
                raise InputError("--router_only: there is no server to route to; add --backend URL.")
            for name in OF_ENGINES:
                if getattr(self, name) != usual[name]:
                    raise InputError(f"--{name}: with --router_only the backends decide; leave it out.")
            return
        for name in ("backend", "health_interval", "backend_timeout", "backend_kv_tokens"):
            if getattr(self, name) != usual[name]:
                raise InputError(f"--{name}: is of a router in front of servers; add --router_only, or leave it out.")

    @property
    def addresses(self) -> list[str]:
        """The addresses of the backends."""
        return [one.strip() for one in (self.backend or "").split(",") if one.strip()]


@cache
def serve_settings() -> tuple[Setting, ...]:
    """All settings of `ifbbench serve` that are not of its engine, in the order of `RouterConfig`."""
    return settings_of(RouterConfig)
