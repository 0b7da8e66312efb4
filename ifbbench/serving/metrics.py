"""The statistics of a server for Prometheus, under the names of TensorRT-LLM's Triton backend or of vLLM."""

import os
from calendar import timegm
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from time import strptime

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from ifbbench.build.engine import Engine
from ifbbench.rundir.line_types import TIMESTAMP_FORMAT
from ifbbench.rundir.statistics import IterationStatistics
from ifbbench.serving.statistics import ABORT, ERROR, LENGTH, STOP, Histogram, LiveStatistics
from ifbbench.settings.modes import BatchingType

CONTENT_TYPE = CONTENT_TYPE_LATEST
Metric = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily
Values = Mapping[str, float]

# Gauges of the Triton backend: family, its label, and the documented field of each value of the label.
TRTLLM_GAUGES: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    ("nv_trt_llm_request_metrics", "request_type", "Requests.", {
        "active": "Active Request Count", "max": "Max Request Count", "scheduled": "Scheduled Requests",
        "context": "Context Requests", "waiting": "Waiting Requests"}),
    ("nv_trt_llm_runtime_memory_metrics", "memory_type", "Memory in bytes.", {
        "cpu": "Runtime CPU Memory Usage", "gpu": "Runtime GPU Memory Usage",
        "pinned": "Runtime Pinned Memory Usage"}),
    ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "Blocks of the KV cache.", {
        "max": "Max KV cache blocks", "free": "Free KV cache blocks", "used": "Used KV cache blocks",
        "tokens_per": "Tokens per KV cache block", "reused": "Reused KV cache blocks",
        "fraction": "Fraction used KV cache blocks"}),
    ("nv_trt_llm_inflight_batcher_metrics", "inflight_batcher_specific_metric", "In-flight batching.", {
        "micro_batch_id": "MicroBatch ID", "generation_requests": "Generation Requests",
        "total_context_tokens": "Total Context Tokens", "paused_requests": "Paused Requests"}),
    ("nv_trt_llm_v1_metrics", "v1_specific_metric", "Static batches.", {
        "total_generation_tokens": "Total Generation Tokens", "total_context_tokens": "Total Context Tokens",
        "empty_generation_slots": "Empty Generation Slots"}),
    ("nv_trt_llm_general_metrics", "general_type", "Iterations.", {
        "iteration_counter": "Iteration Counter", "timestamp": "Timestamp"}),
)  # fmt: skip


class ServerMetrics(Collector):
    """Makes all metrics when they are asked for.

    names: trtllm or vllm.
    num_live, num_queued: number of requests that have not ended, and of those that wait.
    """

    def __init__(
        self,
        engine: Engine,
        statistics: LiveStatistics,
        model: str,
        names: str,
        num_live: Callable[[], int],
        num_queued: Callable[[], int],
    ) -> None:
        self._engine = engine
        self._statistics = statistics
        self._model = model
        self._is_vllm = names == "vllm"
        self._num_live, self._num_queued = num_live, num_queued

    def text(self) -> bytes:
        """The answer to a scrape."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        yield from (self._vllm() if self._is_vllm else self._trtllm())

    def _values(self) -> dict[str, float]:
        """The documented statistics of the latest iteration, with requests as they are now."""
        limits = self._engine.limits
        values: dict[str, float] = {}
        if self._statistics.latest:
            record, _ = self._statistics.latest[-1]
            fields = IterationStatistics(limits.batching_type, limits.max_batch_size).fields(record)
            stamp = timegm(strptime(str(fields.pop("Timestamp")), TIMESTAMP_FORMAT))
            values = {name: float(value) for name, value in fields.items() if value is not None}
            values["Timestamp"] = float(stamp)
        elif not limits.is_contiguous:
            values = {"Max KV cache blocks": limits.num_blocks, "Tokens per KV cache block": limits.tokens_per_block}
        live, queued = self._num_live(), self._num_queued()
        values |= {
            "Active Request Count": live - queued,
            "Waiting Requests": queued,
            "Max Request Count": limits.max_batch_size,
        }
        if not live or not self._statistics.latest:  # nothing runs, whatever the latest iteration was
            idle = ("Scheduled Requests", "Context Requests", "Generation Requests", "Used KV cache blocks")
            values |= dict.fromkeys(idle, 0.0)
            values["Free KV cache blocks"] = values.get("Max KV cache blocks", 0.0)
        if values.get("Max KV cache blocks"):
            values["Fraction used KV cache blocks"] = values["Used KV cache blocks"] / values["Max KV cache blocks"]
        return values | self._memory()

    def _memory(self) -> dict[str, float]:
        statm = Path("/proc/self/statm")
        pages = int(statm.read_text().split()[1]) if statm.exists() else 0
        cpu, gpu = pages * os.sysconf("SC_PAGE_SIZE"), 0
        if self._engine.device.startswith("cuda"):
            import torch

            gpu = torch.cuda.memory_allocated()
        names = ("Runtime CPU Memory Usage", "Runtime GPU Memory Usage", "Runtime Pinned Memory Usage")
        return dict(zip(names, map(float, (cpu, gpu, 0)), strict=True))

    # The names of TensorRT-LLM's Triton backend, and of Triton for what the backend leaves to it.

    def _trtllm(self) -> Iterator[Metric]:
        statistics, values, labels = self._statistics, self._values(), {"model": self._model, "version": "1"}
        other_type = "inflight_batcher" if self._engine.limits.batching_type is BatchingType.V1 else "v1"
        for name, label, help_text, fields in TRTLLM_GAUGES:
            if name == f"nv_trt_llm_{other_type}_metrics":
                continue
            gauge = GaugeMetricFamily(name, help_text, labels=[label, *labels])
            for value, field in fields.items():
                if field in values:
                    gauge.add_metric([value, *labels.values()], values[field])
            if gauge.samples:
                yield gauge
        done = statistics.finished[STOP] + statistics.finished[LENGTH]
        yield _counter("nv_inference_request_success", "Requests that completed.", labels, done)
        failure = CounterMetricFamily(
            "nv_inference_request_failure", "Requests that did not complete.", labels=["reason", *labels]
        )
        reasons = {
            "REJECTED": statistics.refused,
            "CANCELED": statistics.finished[ABORT],
            "BACKEND": statistics.finished[ERROR],
            "OTHER": 0,
        }
        for reason, number in reasons.items():
            failure.add_metric([reason, *labels.values()], number)
        yield failure
        yield _gauge("nv_inference_pending_request_count", "Requests that wait.", labels, values["Waiting Requests"])
        for name, tokens in (("input", statistics.prompt_len), ("output", statistics.output_len)):
            yield histogram_family(f"nv_llm_{name}_token_len", f"Lengths of {name}s in tokens.", labels, tokens)
        first = "nv_inference_first_response_histogram_ms"
        yield histogram_family(first, "Times to the first token in ms.", labels, statistics.ttft_s, scale=1000.0)

    # The names of vLLM.

    def _vllm(self) -> Iterator[Metric]:
        statistics, values = self._statistics, self._values()
        labels = {"model_name": self._model, "engine": "0"}
        used = values.get("Fraction used KV cache blocks", 0.0)
        gauges = {
            "num_requests_running": values["Active Request Count"],
            "num_requests_waiting": values["Waiting Requests"],
            "kv_cache_usage_perc": used,
            "gpu_cache_usage_perc": used,
        }
        counters = {
            "num_preemptions": statistics.pauses,
            "prompt_tokens": statistics.prompt_tokens,
            "generation_tokens": statistics.generation_tokens,
            "prefix_cache_queries": statistics.prompt_tokens,
            "prefix_cache_hits": statistics.reused_tokens,
            "prompt_tokens_cached": statistics.reused_tokens,
        }
        for name, value in gauges.items():
            yield _gauge(f"vllm:{name}", _in_words(name), labels, value)
        for name, number in counters.items():
            yield _counter(f"vllm:{name}", _in_words(name), labels, number)
        # This server has no transfers from other servers, and defers no request.
        waiting = {"capacity": values["Waiting Requests"], "deferred": 0}
        gauge = partial(GaugeMetricFamily, "vllm:num_requests_waiting_by_reason")
        yield _by_label(gauge, "Requests that wait, by reason.", "reason", labels, waiting)
        sources = {
            "local_compute": statistics.prompt_tokens - statistics.reused_tokens,
            "local_cache_hit": statistics.reused_tokens,
            "external_kv_transfer": 0,
        }
        tokens = partial(CounterMetricFamily, "vllm:prompt_tokens_by_source")
        yield _by_label(tokens, "Prompt tokens, by source.", "source", labels, sources)
        success = partial(CounterMetricFamily, "vllm:request_success")
        yield _by_label(success, "Requests that ended, by reason.", "finished_reason", labels, statistics.finished)
        rejections = partial(CounterMetricFamily, "vllm:admission_rejections")
        refused = {"max_num_queued_reqs": statistics.refused, "max_num_queued_tokens": 0}
        model = {"model_name": self._model}
        yield _by_label(rejections, "Requests that a limit of the queue refused.", "reason", model, refused)
        histograms = {
            "time_to_first_token_seconds": statistics.ttft_s,
            "inter_token_latency_seconds": statistics.itl_s,
            "request_time_per_output_token_seconds": statistics.tpot_s,
            "e2e_request_latency_seconds": statistics.e2e_s,
            "request_queue_time_seconds": statistics.queue_time_s,
            "request_prompt_tokens": statistics.prompt_len,
            "request_generation_tokens": statistics.output_len,
            "request_prefill_time_seconds": statistics.prefill_s,
            "request_decode_time_seconds": statistics.decode_s,
            "request_inference_time_seconds": statistics.running_s,
            "iteration_tokens_total": statistics.iteration_len,
            "request_params_max_tokens": statistics.reserved_len,
            "request_params_n": statistics.num_choices,
            "request_max_num_generation_tokens": statistics.longest_output,
            "request_num_preemptions": statistics.pauses_of_request,
            "request_prefill_kv_computed_tokens": statistics.computed_prompt_len,
        }
        for name, histogram in histograms.items():
            yield histogram_family(f"vllm:{name}", _in_words(name), labels, histogram)
        limits = self._engine.limits
        cache = {
            "block_size": str(limits.tokens_per_block),
            "enable_prefix_caching": str(limits.reuse.enabled),
            "num_gpu_blocks": str(limits.num_blocks),
            "engine": "0",
        }
        yield _gauge("vllm:cache_config_info", "Settings of the KV cache.", cache, 1.0)


def _in_words(name: str) -> str:
    return name.replace("_", " ").capitalize() + "."


def _gauge(name: str, help_text: str, labels: Mapping[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, help_text: str, labels: Mapping[str, str], value: float) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _by_label(
    family_of: "Callable[..., GaugeMetricFamily | CounterMetricFamily]",
    help_text: str,
    label: str,
    labels: Mapping[str, str],
    values: Values,
) -> Metric:
    """A sample for each value of `label`. family_of: the family without its help text and labels."""
    family = family_of(help_text, labels=[label, *labels])
    for value, number in values.items():
        family.add_metric([value, *labels.values()], number)
    return family


def histogram_family(
    name: str, help_text: str, labels: Mapping[str, str], histogram: Histogram, scale: float = 1.0
) -> Metric:
    """scale: factor of the values, for another unit."""
    buckets = [
        (limit if limit == "+Inf" else str(float(limit) * scale), count) for limit, count in histogram.cumulative()
    ]
    family = HistogramMetricFamily(name, help_text, labels=list(labels))
    family.add_metric(list(labels.values()), buckets, histogram.sum * scale)
    return family
