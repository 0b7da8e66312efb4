"""The report that trtllm-bench prints: its headings, its labels and its order, for scripts that read them."""

from collections.abc import Iterable, Mapping
from typing import Any

RULE = "=" * 59
DASHES = "-" * 59
STATISTICS = ("minimum", "maximum", "average", "p50", "p90", "p95", "p99")
SHORT_NAMES = {
    "MIN": "minimum",
    "MAX": "maximum",
    "AVG": "average",
    "P50": "p50",
    "P90": "p90",
    "P95": "p95",
    "P99": "p99",
}


def report_text(report: Mapping[str, Any]) -> str:
    """The text of a report in the form of `trtllm-bench --report_json`. Unknown figures are N/A."""
    sections = {
        "ENGINE DETAILS": _engine(report["engine"]),
        "MACHINE DETAILS": _machine(report["machine"]),
        "WORLD + RUNTIME INFORMATION": _world(report["world_info"]),
        "REQUEST DETAILS": _requests(report["request_info"]),
        "PERFORMANCE OVERVIEW": _performance(report["performance"], report.get("streaming_metrics")),
    }
    if (decoding := report.get("decoding_stats")) is not None:
        sections[f"DECODING STATISTICS ({decoding['mode']})"] = _decoding(decoding)
    sections["DATASET DETAILS"] = _dataset(report["dataset"])
    parts = [f"{RULE}\n= {heading}\n{RULE}\n" + "\n".join(lines) + "\n" for heading, lines in sections.items()]
    return "\n".join(parts) + RULE


def _engine(engine: Mapping[str, Any]) -> list[str]:
    rows = {
        "Model:": engine["model"],
        "Model Path:": engine["model_path"],
        "Engine Directory:": engine["engine_dir"],
        "Version:": engine["version"],
        "Dtype:": engine["dtype"],
        "KV Cache Dtype:": engine["kv_cache_dtype"],
        "Quantization:": engine["quantization"],
        "Max Input Length:": engine["max_input_length"],
        "Max Sequence Length:": engine["max_sequence_length"],
    }
    return _aligned(rows, 24)


def _machine(machine: Mapping[str, Any] | None) -> list[str]:
    if machine is None:
        return ["No GPU info available"]
    memory, clock = machine["memory.total"], machine["clocks.mem"]
    facts = [machine["name"]]
    facts += [] if memory is None else [f"memory {memory:.2f} GB"]
    return [", ".join(facts + ([] if clock is None else [f"{clock:.2f} GHz"]))]


def _world(world: Mapping[str, Any]) -> list[str]:
    fraction = world["kv_cache_percentage"]
    rows = {
        "TP Size:": world["tp_size"],
        "PP Size:": world["pp_size"],
        "EP Size:": world["ep_size"],
        "Max Runtime Batch Size:": world["max_batch_size"],
        "Max Runtime Tokens:": world["max_num_tokens"],
        "Scheduling Policy:": world["scheduling_policy"],
        "KV Memory Percentage:": None if fraction is None else f"{fraction:.2%}",
        "Issue Rate (req/sec):": f"{world['issue_rate']:.4E}",
    }
    return _aligned(rows, 24)


def _requests(info: Mapping[str, Any]) -> list[str]:
    rows = {
        "Number of requests:": info["num_requests"],
        "Number of concurrent requests:": _figure(info["avg_num_concurrent_requests"]),
        "Average Input Length (tokens):": _figure(info["avg_input_length"]),
        "Average Output Length (tokens):": _figure(info["avg_output_length"]),
    }
    return _aligned(rows, 32)


def _performance(figures: Mapping[str, Any], streaming: Mapping[str, Any] | None) -> list[str]:
    rows = {
        "Request Throughput (req/sec):": figures["request_throughput_req_s"],
        "Total Output Throughput (tokens/sec):": figures["system_output_throughput_tok_s"],
        "Total Token Throughput (tokens/sec):": figures["system_total_throughput_tok_s"],
        "Total Latency (ms):": figures["total_latency_ms"],
        "Average request latency (ms):": figures["avg_request_latency_ms"],
        "Per User Output Throughput [w/ ctx] (tps/user):": figures["output_throughput_per_user_tok_s"],
        "Per GPU Output Throughput (tps/gpu):": figures["output_throughput_per_gpu_tok_s"],
    }
    breakdowns: list[str] = []
    if streaming:
        rows |= {
            "Average time-to-first-token [TTFT] (ms):": streaming["avg_ttft_ms"],
            "Average time-per-output-token [TPOT] (ms):": streaming["avg_tpot_ms"],
            "Per User Output Speed (tps/user):": streaming["token_output_speed_tok_s"],
        }
        for title, key, tag in (
            ("Time-per-Output-Token [TPOT] Breakdown (ms)", "tpot_percentiles", "TPOT"),
            ("Time-to-First-Token [TTFT] Breakdown (ms)", "ttft_percentiles", "TTFT"),
            ("Generation Throughput [GTPS] Breakdown (tps/user)", "gen_tps_percentiles", "GTPS"),
        ):
            breakdowns += ["", f"-- Per-Request {title}", "", *_breakdown(tag, streaming[key], STATISTICS)]
    latency = figures["request_latency_percentiles_ms"]
    breakdowns += ["", "-- Request Latency Breakdown (ms) -----------------------", ""]
    return (
        _aligned({label: _figure(value) for label, value in rows.items()}, 50)
        + breakdowns
        + _breakdown("Latency", latency, latency)
    )


def _breakdown(tag: str, values: Mapping[str, float | None], names: Iterable[str]) -> list[str]:
    return [f"[{tag}] {name.upper():<7}: {_figure(values[name])}" for name in names]


def _decoding(decoding: Mapping[str, Any]) -> list[str]:
    """Draft tokens, by request."""
    rows: list[str] = []
    for title, key, tag in (
        ("Number of Draft Tokens", "num_draft_tokens_percentiles", "DT"),
        ("Number of Accepted Draft Tokens", "num_accepted_draft_tokens_percentiles", "ADT"),
        ("Draft Acceptance Rate", "draft_acceptance_rate_percentiles", "DAR"),
        ("Acceptance Length", "acceptance_length_percentiles", "AL"),
    ):
        rows += ["", f"-- {title} Details", "", *_breakdown(tag, decoding[key], STATISTICS)]
    return rows


def _dataset(dataset: Mapping[str, Any]) -> list[str]:
    columns = [dataset[name] for name in ("isl_stats", "osl_stats", "seq_len_stats")]
    rows = [
        "".join([f"{name}: ", *(f"{_figure(column[key]):>18}" for column in columns)])
        for name, key in SHORT_NAMES.items()
    ]
    return [
        *_aligned({"Dataset Path:": dataset["dataset_path"], "Number of Sequences:": dataset["num_requests"]}, 22),
        "",
        "-- Percentiles statistics ---------------------------------",
        "",
        "     " + "".join(f"{title:>18}" for title in ("Input", "Output", "Seq. Length")),
        DASHES,
        *rows,
    ]


def _aligned(rows: Mapping[str, Any], width: int) -> list[str]:
    return [f"{label:<{width}}{'N/A' if value is None else value}" for label, value in rows.items()]


def _figure(value: float | None) -> str:
    return "N/A" if value is None else f"{value:.4f}"
