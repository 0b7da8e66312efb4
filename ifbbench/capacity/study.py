"""The whole answer: from settings, requests and memory to what fits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ifbbench.api.resolve import batching_config, resolve_limits
from ifbbench.capacity.device import NULL, Device, find_device
from ifbbench.capacity.fit import (
    WAYS,
    ContiguousFit,
    Fit,
    as_admitted,
    contiguous_fit,
    fit,
    prompts_per_iteration,
    refusal,
)
from ifbbench.capacity.pool import Pool, PoolWindow, make_pool
from ifbbench.config import RunConfig
from ifbbench.engine.config import BatchingConfig, BatchingType
from ifbbench.engine.kv_cache.sizing import max_attention_window
from ifbbench.errors import InputError
from ifbbench.model.config import ModelConfig, load_model_config
from ifbbench.workload.trace import TraceRequest


@dataclass(frozen=True)
class Study:
    """What was asked (`config` with its limits resolved, `requests` as admitted) and what fits.

    refused: how many requests the engine would refuse; they are not among `requests`. fits: one a Way, in the order of
    WAYS, empty without requests. prompts_per_iteration: of the mean length, None without requests.
    """

    config: RunConfig
    model: ModelConfig
    device: Device
    pool: Pool
    limits: BatchingConfig
    contiguous: ContiguousFit
    requests: Sequence[TraceRequest] = ()
    refused: int = 0
    fits: tuple[Fit, ...] = ()
    prompts_per_iteration: float | None = None

    @property
    def fit_of_policy(self) -> Fit | None:
        """What holds under the policy and batching type of `config`: for MAX_UTILIZATION with requests at full length,
        so that none is paused. None without requests, and for a policy of the user's own."""
        policy = "static_batch" if self.limits.batching_type is BatchingType.V1 else self.config.policy
        known = [found for found in self.fits if found.way.policy == policy]
        return known[-1] if known else None

    @property
    def longest_sequence(self) -> int:
        """The most tokens, prompt and output together, of a request that has the cache to itself: with an output of one
        block, for beams share the prompt's alone."""
        limits = self.limits
        output_len = min(limits.tokens_per_block, limits.max_seq_len)
        return min(
            self._longest_in(window, limits.max_seq_len - output_len, output_len) for window in self.pool.windows
        )

    def _longest_in(self, window: PoolWindow, prompt_len: int, output_len: int) -> int:
        attention_window = window.attention_window
        if window.num_blocks >= attention_window.max_blocks_per_sequence * attention_window.max_beam_width:
            return attention_window.max_seq_len
        return max_attention_window(
            prompt_len, output_len, attention_window.sink, window.num_blocks, attention_window.max_beam_width,
            attention_window.tokens_per_block,
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON. Sizes are in bytes, tokens or blocks, as their names say."""
        return {
            "model": {
                "name": self.config.model,
                "parameters": self.model.num_parameters,
                "layers": self.model.num_layers,
                "dtype": self.config.dtype,
            },
            "device": self.device.name,
            "memory": {
                "free_bytes": self.device.free_bytes,
                "weight_bytes": self.pool.weight_bytes,
                "kv_budget_bytes": self.pool.budget_bytes,
            },
            "limits": {
                name: getattr(self.config, name)
                for name in ("policy", "type", "max_batch_size", "max_num_tokens", "max_seq_len", "max_input_len",
                             "max_beam_width", "tokens_per_block", "enable_chunked_context")
            },
            "kv_cache": self._kv_cache(),
            "requests": self._requests(),
            "at_once": [_fit_as_dict(found) for found in self.fits],
            "contiguous": {
                "positions_per_request": self.contiguous.positions,
                "bytes_per_request": self.contiguous.bytes_per_request,
                "by_memory": self.contiguous.fit,
                "at_once": self.contiguous.at_once,
            },
        }  # fmt: skip

    def _kv_cache(self) -> dict[str, Any]:
        return {
            "type": self.config.kv_cache_type,
            "dtype": self.config.kv_cache_dtype or self.config.dtype,
            "bytes": self.pool.kv_bytes,
            "bytes_per_token": self.pool.bytes_per_token,
            "longest_sequence_tokens": self.longest_sequence,
            "windows": [
                {
                    "attention_window": window.attention_window.size,
                    "sink_tokens": window.attention_window.sink,
                    "layers": len(window.layout.layers),
                    "bytes_per_token": window.bytes_per_token,
                    "bytes_per_block": window.bytes_per_block,
                    "blocks": window.num_blocks,
                    "tokens": window.num_blocks * window.attention_window.tokens_per_block,
                    "blocks_of_run": window.blocks_of_run,
                    "host_blocks": window.layout.num_host_blocks,
                }
                for window in self.pool.windows
            ],
        }

    def _requests(self) -> dict[str, Any] | None:
        if not self.requests:
            return None
        lengths = {name: self.mean(name) for name in ("prompt_len", "output_len", "max_new_tokens", "beam_width")}
        return {
            "count": len(self.requests),
            "refused": self.refused,
            "prompts_per_iteration": self.prompts_per_iteration,
            **{f"mean_{name}": mean for name, mean in lengths.items()},
        }

    def mean(self, name: str) -> float:
        """The mean of a field of `requests`."""
        total: int = sum(getattr(request, name) for request in self.requests)
        return total / len(self.requests)


def study(config: RunConfig, requests: Sequence[TraceRequest] = (), memory_bytes: int | None = None) -> Study:
    """What fits with `config`. One request stands for any number like it; more are a trace.

    memory_bytes: of the device before the model is loaded, instead of what is free. Raises InputError if settings and
    memory do not fit together, or no request would be run.
    """
    if config.beam_width is not None:
        requests = [replace(request, beam_width=config.beam_width) for request in requests]
    model = load_model_config(config.model)
    device = find_device(config, memory_bytes)
    beam_width = max((request.beam_width for request in requests), default=1)
    # As in a run, the model's positions are no limit where nothing is computed.
    asked = config.max_seq_len or 0 if config.device == NULL else 0
    longest = max(model.max_position_embeddings, asked)
    resolved = resolve_limits(config, longest, device.is_cpu, beam_width)
    pool = make_pool(resolved, model, device)
    limits = batching_config(resolved, pool.layout, vocab_size=None)
    found = Study(resolved, model, device, pool, limits, contiguous_fit(limits, pool))
    if not requests:
        return found
    runs = [as_admitted(request, limits) for request in requests if refusal(request, limits, pool) is None]
    if not runs:
        which = "this request" if len(requests) == 1 else f"all {len(requests):,} requests, the first"
        raise InputError(
            f"the engine refuses {which}: {refusal(requests[0], limits, pool)}; shorten it, or raise the limit."
        )
    return replace(
        found,
        requests=runs,
        refused=len(requests) - len(runs),
        fits=tuple(fit(way, runs, limits, pool) for way in WAYS),
        prompts_per_iteration=prompts_per_iteration(runs, limits),
    )


def _fit_as_dict(found: Fit) -> dict[str, Any]:
    return {
        "policy": found.way.policy,
        "moment": found.way.moment or None,
        "mean_blocks_per_request": float(found.mean_blocks),
        "by_kv_blocks": found.by_blocks,
        "by_batch_size": found.by_batch_size,
        "by_num_tokens": found.by_tokens,
        "at_once": found.at_once,
        "bound_by": found.bound_by.value,
        "first_requests": found.first,
    }
