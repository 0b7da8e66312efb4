"""What a run against an endpoint asks of the server beside its requests: the name of the model, and its metrics."""

import asyncio
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from msgspec.json import decode, encode

from ifbbench.endpoint.api import default_model
from ifbbench.endpoint.connections import Address, Connections
from ifbbench.endpoint.http import RequestFailed, message_of
from ifbbench.errors import InputError
from ifbbench.rundir.lines import JsonLinesWriter
from ifbbench.settings.config import RunConfig

KEY_VARIABLES = ("IFBBENCH_API_KEY", "OPENAI_API_KEY")
POLL_INTERVAL_S = 1.0
TRITON_METRICS_PORT = 8002
_log = logging.getLogger("ifbbench")


def api_key(config: RunConfig) -> str | None:
    """The key of the server, from the settings or the environment. InputError if it cannot be in a header."""
    return first_key("--endpoint_api_key", config.endpoint_api_key, KEY_VARIABLES)


def first_key(option: str, given: str | None, variables: Sequence[str]) -> str | None:
    """The key of an option, else of the first of these environment variables that is set. InputError if it cannot be
    in a header, where spaces around it are lost."""
    for source, key in ((option, given), *((name, os.environ.get(name)) for name in variables)):
        if key:
            if not key.isascii() or not key.isprintable() or key != key.strip():
                raise InputError(
                    f"{source}: the key has a line break, a space around it or another character that a "
                    "header cannot have; check how it was read."
                )
            return key
    return None


async def model_name(connections: Connections, config: RunConfig) -> str:
    """The name of the model, from the settings or the server. InputError if there is no connection, the server does
    not admit the client, or has no such model."""
    url, given = config.endpoint, default_model(config)
    if given is not None and not given.isprintable():
        raise InputError(f"--model {given!a}: has a control character; expected the name that the server lists.")
    is_triton = config.endpoint_type == "triton"
    try:
        path = f"/v2/models/{quote(given or '', safe='')}/ready" if is_triton else "/v1/models"
        answer = await connections.get(path)
    except RequestFailed as error:
        raise InputError(f"--endpoint {url}: {error}. Start the server, or check the address.") from None
    text = answer.body.decode(errors="replace")
    if answer.status in (401, 403):
        raise InputError(
            f"--endpoint {url}: status {answer.status}: {message_of(text)} Give the key as "
            f"--endpoint_api_key or in {KEY_VARIABLES[0]}."
        )
    if is_triton:
        if answer.status != 200:
            raise InputError(
                f"--endpoint {url}: Triton has no model {given} that is ready (status {answer.status}); "
                "give the name of one with generate_stream as --model."
            )
        return str(given)
    names = listed_models(text) if answer.status == 200 else []
    if given is None and not names:
        raise InputError(
            f"--endpoint {url}: the server lists no model (/v1/models: status {answer.status}); give its "
            "name as --model, and check the address."
        )
    if given is not None and names and given not in names:
        raise InputError(f"--model {given}: the server has no such model, but {', '.join(names[:5])}.")
    return given or names[0]


def listed_models(text: str) -> list[str]:
    """The names in an answer to /v1/models; none in another text."""
    try:
        names = [one["id"] for one in decode(text)["data"] if isinstance(one["id"], str)]
        return [name for name in names if name.isprintable()]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []


class MetricsPoll:
    """Writes the metrics of the server to a file each second, from `run()` until it is cancelled.

    samples, errors: how many were read, and could not be. Of histograms, only sums and counts are kept.
    """

    def __init__(self, endpoint: Connections, config: RunConfig, path: Path) -> None:
        self.samples = self.errors = 0
        self._path_of_lines = path
        self._connections, self._path, self._own = endpoint, "/metrics", None
        url, address = config.metrics_url, endpoint.address
        if url is None and config.endpoint_type == "triton":
            url = str(Address(address.host, TRITON_METRICS_PORT, "/metrics", False))
        if url is not None:
            target = Address.of(url, "--metrics_url")
            self._path = target.prefix or "/metrics"
            self._connections = self._own = endpoint.to(Address(target.host, target.port, "", target.is_secure))

    async def run(self) -> None:
        """Poll without end."""
        writer, clock, next_s = JsonLinesWriter(self._path_of_lines), self._connections.clock, 0.0
        try:
            while True:
                await self._poll(writer)
                next_s += POLL_INTERVAL_S
                await asyncio.sleep(max(next_s - clock.now(), 0.0))
        finally:
            writer.close()
            if self._own is not None:
                self._own.close()

    async def _poll(self, writer: JsonLinesWriter) -> None:
        try:
            answer = await self._connections.get(self._path)
            if answer.status != 200:
                raise RequestFailed("metrics", f"{self._path} has status {answer.status}")
            writer.write([encode({"at_s": answer.active_s, **metrics_of(answer.body)})])
            self.samples += 1
        except (RequestFailed, ValueError, RecursionError) as error:
            if not self.errors:
                _log.warning("The server's metrics cannot be read: %s.", error)
            self.errors += 1


def metrics_of(body: bytes) -> dict[str, Any]:
    """`values`, the samples of a text for Prometheus by name and labels, without the buckets of histograms; or
    `iterations`, those of trtllm-serve. ValueError for another body."""
    if body.lstrip()[:1] in (b"[", b"{"):
        return {"iterations": decode(body)}
    values: dict[str, float] = {}
    for line in body.decode(errors="replace").splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#") and "_bucket{" not in name and math.isfinite(found := float(value)):
            values[name] = found
    return {"values": values}
