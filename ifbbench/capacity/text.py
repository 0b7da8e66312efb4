"""What `ifbbench capacity` says in words."""

from ifbbench.capacity.fit import Fit
from ifbbench.capacity.study import Study
from ifbbench.engine.config import BatchingType
from ifbbench.engine.policies.policy import Limit
from ifbbench.report.units import count, significant

BYTE_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def memory(num_bytes: float) -> str:
    """A size with a unit that keeps it short: 18.8 MiB."""
    step = 0
    while abs(num_bytes) >= 1024 and step < len(BYTE_UNITS) - 1:
        num_bytes, step = num_bytes / 1024, step + 1
    return f"{significant(num_bytes) if step else count(num_bytes)} {BYTE_UNITS[step]}"


def title(study: Study) -> str:
    """Model, device and limits in one line."""
    config = study.config
    beams = f"{config.max_beam_width} beams" if study.limits.max_beam_width > 1 else None
    windows = [window.attention_window.size for window in study.pool.windows]
    is_limited = windows != [config.max_seq_len]
    parts = [
        f"on {study.device.name}",
        f"tensor parallelism {config.tp_size}" if config.tp_size > 1 else None,
        f"pipeline parallelism {config.pp_size}" if config.pp_size > 1 else None,
        config.weight_dtype,
        f"KV cache {config.kv_cache_dtype}" if config.kv_cache_dtype not in (None, config.dtype) else None,
        f"max_batch_size {config.max_batch_size}",
        f"max_num_tokens {config.max_num_tokens}",
        f"max_seq_len {config.max_seq_len}",
        "chunked context" if config.enable_chunked_context else None,
        beams,
        f"attention window {' + '.join(map(str, windows))}" if is_limited else None,
        "contiguous cache" if config.kv_cache_type == "contiguous" else None,
    ]
    return " · ".join(part for part in parts if part)


def requests_line(study: Study) -> str:
    """Which requests were looked at."""
    prompt, output = study.mean("prompt_len"), study.mean("output_len")
    reserved = study.mean("max_new_tokens")
    lengths = f"{count(prompt)} prompt and {count(output)} output tokens"
    if reserved != output:
        lengths += f", {count(reserved)} reserved"
    if len(study.requests) == 1:
        return f"Requests of {lengths}"
    refused = f"; {count(study.refused)} more refused" if study.refused else ""
    return f"{count(len(study.requests))} requests, on average {lengths}{refused}"


def sentences(study: Study) -> list[str]:
    """What binds first, and what else there is to know."""
    said = []
    found = study.fit_of_policy
    if study.limits.is_contiguous:
        return [_contiguous_run(study)]
    if found is not None:
        said.append(_bound(study, found))
        said.append(_contiguous(study))
    elif study.fits:
        said.append(f"What {study.config.policy} runs at once, only a run tells.")
    if study.longest_sequence < study.limits.max_seq_len:
        said.append(
            f"A sequence of max_seq_len ({count(study.limits.max_seq_len)}) does not fit: the longest that does has "
            f"{count(study.longest_sequence)} tokens."
        )
    return said


def _bound(study: Study, found: Fit) -> str:
    blocks = sum(window.num_blocks for window in study.pool.windows)
    limits = {
        Limit.KV_BLOCKS: (f"the KV cache ({count(blocks)} blocks)", found.by_blocks),
        Limit.BATCH_SIZE: ("max_batch_size", found.by_batch_size),
        Limit.NUM_TOKENS: (f"max_num_tokens ({count(study.limits.max_num_tokens)})", found.by_tokens),
    }
    first = limits.pop(found.bound_by)
    other, last = [(name, count(number)) for name, number in limits.values()]
    static = study.limits.batching_type is BatchingType.V1
    under = "in a static batch" if static else f"under {study.config.policy}"
    which = "requests of the mean length" if len(study.requests) > 1 else "such requests"
    at_end = ", all at their full length," if found.way.moment else ""
    packed = ""
    if found.first is not None:
        all_of_them = found.first == len(study.requests)
        packed = f" {'All' if all_of_them else f'The first {count(found.first)}'} of the trace fit together."
    return (
        f"{count(found.at_once)} {which}{at_end} run at once {under}: {first[0]} binds first; "
        f"{other[0]} would allow {other[1]}, {last[0]} {last[1]}.{packed}"
    )


def _contiguous_run(study: Study) -> str:
    contiguous, requests = study.contiguous, study.limits.max_batch_size
    advice = "" if contiguous.fit >= requests else " Lower --max_batch_size or --max_seq_len, or page the cache."
    return (
        f"A contiguous cache takes {memory(requests * contiguous.bytes_per_request)} for the {count(requests)} "
        f"requests of max_batch_size, {count(contiguous.positions)} places each; memory has room for "
        f"{count(contiguous.fit)}.{advice}"
    )


def _contiguous(study: Study) -> str:
    contiguous = study.contiguous
    beams = f" for each of {study.limits.max_beam_width} beams" if study.limits.max_beam_width > 1 else ""
    room = count(contiguous.fit) if contiguous.fit else "none"
    return (
        f"In the same memory a contiguous cache ({count(study.limits.max_seq_len)} places{beams}, "
        f"{memory(contiguous.bytes_per_request)} a request) has room for {room}."
    )
