"""The process between clients and engine: works off requests and tokens one after the other, in order of time."""

from ifbbench.simulated.engines import EngineOverhead


class ServingProcess:
    """A server written in Python does this work (HTTP, tokenizer, streaming) in one process beside the engine's.

    While it is busy, requests reach the engine later and tokens reach their clients later; the engine does not wait for
    it. Times are in seconds.
    """

    def __init__(self, overhead: EngineOverhead) -> None:
        self._request_s, self._token_in_s = overhead.serving_request_s, overhead.serving_token_in_s
        self._token_out_s = overhead.serving_token_out_s
        self._free_s = 0.0

    def accept(self, arrival_s: float, prompt_len: int) -> float:
        """When the engine gets a request that arrives at `arrival_s`."""
        self._free_s = max(self._free_s, arrival_s) + (self._request_s + prompt_len * self._token_in_s)
        return self._free_s

    def deliver(self, end_s: float, tokens: int) -> float:
        """When the last of the `tokens` of an iteration that ends at `end_s` reaches its client."""
        self._free_s = max(self._free_s, end_s) + tokens * self._token_out_s
        return self._free_s
