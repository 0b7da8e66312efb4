"""The output of `ifbbench capacity`: tables, sentences on what limits the number of requests, and JSON."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ifbbench.analysis.number_texts import NOTHING, count, significant
from ifbbench.analysis.words import SIZES, TENSORRT_LLM, setting_of, words_of
from ifbbench.engine.plan import Limit
from ifbbench.report import plain_table
from ifbbench.schedulers.limits import UNLIMITED
from ifbbench.settings.config import LIMIT_SETTINGS
from ifbbench.settings.engines import ENGINE_NAMES
from ifbbench.settings.fields import memory_size
from ifbbench.settings.modes import BatchingType
from ifbbench.settings.names import setting
from ifbbench.settings.servers import SERVERS
from ifbbench.studies.capacity import Fit, Study
from ifbbench.studies.capacity_sides import SidesStudy, side_figures, side_sentences

HINT = "Give --input-len and --output-len, or --trace, to see how many requests run at once."


def print_study(study: Study, console: Console) -> None:
    """Print what fits."""
    console.print()
    console.print(f"[bold]{escape(study.config.model)}[/bold]  {escape(_title(study))}", highlight=False)
    console.print()
    console.print(_memory_table(study))
    console.print()
    if study.requests:
        console.print(_requests_line(study), style="bold", highlight=False)
        console.print()
        console.print(_fit_table(study))
        console.print()
    for sentence in sentences(study):
        console.print(escape(sentence), highlight=False, soft_wrap=True)
    if not study.requests:
        console.print(HINT, highlight=False)


def print_sides(found: SidesStudy, console: Console) -> None:
    """Print what fits on both sides of a fleet, and how they balance."""
    for side in (found.prefill, found.decode):
        console.print()
        console.print(f"[bold]{side.name}[/bold]  {escape(_title(side.study))}", highlight=False)
        console.print()
        console.print(_memory_table(side.study))
    console.print()
    if found.decode.study.requests:
        console.print(_requests_line(found.decode.study), style="bold", highlight=False)
        console.print()
    for sentence in side_sentences(found):
        console.print(escape(sentence), highlight=False, soft_wrap=True)
    if not found.decode.study.requests:
        console.print(HINT, highlight=False)


def figures_of_sides(found: SidesStudy) -> dict[str, Any]:
    """All figures of both sides, each as `figures`, and `side_sentences`, for JSON."""
    of_fleet = side_figures(found)
    for side in (found.prefill, found.decode):
        of_fleet["sides"][side.name] |= figures(side.study)
    return of_fleet | {"summary": side_sentences(found)}


def _title(study: Study) -> str:
    """Device and limits in one line."""
    config = study.config
    windows = [min(window.attention_window.size, study.limits.max_seq_len) for window in study.pool.windows]
    words = words_of(config.as_dict())
    parts = [
        f"on {study.device.name}",
        f"tensor parallelism {config.tp_size}" if config.tp_size > 1 else None,
        f"pipeline parallelism {config.pp_size}" if config.pp_size > 1 else None,
        f"expert parallelism {config.ep_size}" if config.ep_size > 1 else None,
        f"attention data parallelism {config.attention_dp_size}" if config.attention_dp_size > 1 else None,
        config.weight_dtype,
        f"KV cache {config.kv_cache_dtype}" if config.kv_cache_dtype not in (None, config.dtype) else None,
        *(f"{words.own_name(name)} {getattr(config, name)}" for name in (*map(setting_of, SIZES), "max_seq_len")),
        words.chunked if config.enable_chunked_context else None,
        f"{config.max_beam_width} beams" if study.limits.max_beam_width > 1 else None,
        f"attention window {' + '.join(map(str, windows))}" if set(windows) != {config.max_seq_len} else None,
        "contiguous cache" if config.kv_cache_type == "contiguous" else None,
    ]
    return " · ".join(part for part in parts if part)


def _memory_table(study: Study) -> Table:
    pool, device = study.pool, study.device
    table = Table.grid(padding=(0, 3))
    for style in ("dim", None, "dim", None):
        table.add_column(style=style)
    per_block = sum(map(pool.bytes_per_block, pool.pools))
    blocks = [window.num_blocks for window in pool.pools]
    tokens = [window.num_blocks * window.attention_window.tokens_per_block for window in pool.pools]
    if study.limits.vllm is not None:
        tokens = [study.limits.vllm_capacity(blocks[0])[0]]
    num_devices = study.config.tp_size * study.config.pp_size
    each, of_all = (" of each GPU", f" of all {num_devices}") if num_devices > 1 else ("", "")
    rows = [
        (
            f"Free memory{each}",
            NOTHING if device.free_bytes is None else memory_size(device.free_bytes),
            "One token",
            f"{memory_size(pool.bytes_per_token)} in {count(len(study.model.attention_layers))} layers",
        ),
        (
            f"Weights{each}",
            memory_size(pool.weight_bytes),
            "One block",
            f"{memory_size(per_block)} for {count(study.limits.tokens_per_block)} tokens",
        ),
        (
            f"For the KV cache{of_all}",
            memory_size(pool.kv_bytes if pool.budget_bytes is None else pool.budget_bytes),
            "Blocks",
            f"[bold]{_sum(blocks)}[/bold]",
        ),
        (
            *((f"States{each}", memory_size(pool.state_bytes)) if pool.state_bytes else ("", "")),
            "Tokens",
            _sum(tokens),
        ),
    ]
    blocks_of_run = [window.num_blocks for window in pool.layout.windows[: len(pool.pools)]]
    if blocks_of_run != blocks:
        rows.append(("", "", "A run takes", f"{_sum(blocks_of_run)} blocks, a full batch"))
    if study.config.kv_host_cache_bytes:
        host_blocks = _sum([window.num_host_blocks for window in pool.windows])
        rows.append(("On the host", memory_size(study.config.kv_host_cache_bytes), "Host blocks", host_blocks))
    for row in rows:
        table.add_row(*row)
    return table


def _sum(numbers: list[int]) -> str:
    return " + ".join(map(count, numbers))


def _requests_line(study: Study) -> str:
    prompt, output, reserved = (study.mean(name) for name in ("prompt_len", "output_len", "max_new_tokens"))
    lengths = f"{count(prompt)} prompt and {count(output)} output tokens"
    if reserved != output:
        lengths += f", {count(reserved)} reserved"
    if len(study.requests) == 1:
        return f"Requests of {lengths}"
    refused = f"; {count(study.refused)} more refused" if study.refused else ""
    return f"{count(len(study.requests))} requests, on average {lengths}{refused}"


def _fit_table(study: Study) -> Table:
    is_trace = len(study.requests) > 1
    packed = ["packed\nin order"] if is_trace else []
    table = plain_table("Policy", numbers=("blocks\neach", "cache\nholds", "at\nonce", *packed))
    table.add_column("bound by")
    for found in study.fits:
        case, mean = found.case, float(found.mean_blocks)
        # Static batches (V1) form as under STATIC_BATCH.
        policy = case.policy + (", v1" if case.is_static else "")
        table.add_row(
            policy + (f"[dim], {case.moment}[/dim]" if case.moment else ""),
            count(mean) if mean.is_integer() else significant(mean),
            count(found.by_limit[Limit.KV_BLOCKS]),
            f"[bold]{count(found.at_once)}[/bold]",
            *([count(found.first)] if is_trace else []),
            words_of(study.config.as_dict()).limit_name(found.bound_by),
        )
    if study.limits.has_one_policy:
        return table
    contiguous = study.contiguous
    bound = "memory" if contiguous.fit <= study.limits.max_batch_size else TENSORRT_LLM.limit_name("batch_size")
    first = [NOTHING] if is_trace else []
    table.add_row("contiguous cache", NOTHING, count(contiguous.fit), count(contiguous.at_once), *first, bound)
    return table


def sentences(study: Study) -> list[str]:
    """The limit that binds first, the contiguous cache for comparison, and a sequence that is too long."""
    limits, found = study.limits, study.fit_of_policy
    if limits.is_contiguous:
        return [_contiguous_run(study)]
    lines = []
    if limits.has_one_policy:
        lines.append(_server_start(study))
    if found is not None:
        lines.append(_bound(study, found))
        if not limits.has_one_policy:
            lines.append(_contiguous(study))
    elif study.fits:
        lines.append(f"Only a run shows how many requests {study.config.policy} runs at once.")
    if study.longest_sequence < limits.max_seq_len:
        lines.append(
            f"A sequence of max_seq_len ({count(limits.max_seq_len)}) does not fit: the longest that does has "
            f"{count(study.longest_sequence)} tokens."
        )
    return lines


def _server_start(study: Study) -> str:
    """What the server of the engine logs at its start, with attention data parallelism each of its ranks, and its
    command line."""
    limits, config, engine = study.limits, study.config, study.limits.engine
    ranks, of_rank = limits.attention_dp_size, limits.of_any_rank
    num_blocks = study.pool.windows[0].num_blocks // ranks
    if of_rank.vllm is not None:
        tokens, concurrency = of_rank.vllm_capacity(num_blocks)
        logged = (
            f"GPU KV cache size: {tokens:,} tokens, Maximum concurrency for {limits.max_seq_len:,} tokens per request: "
            f"{concurrency:.2f}x"
        )
    else:
        assert of_rank.sglang is not None
        tokens = num_blocks * limits.tokens_per_block
        chunk = -1 if of_rank.sglang.chunk_size is None else of_rank.sglang.chunk_size
        logged = (
            f"max_total_num_tokens={tokens}, chunked_prefill_size={chunk}, "
            f"max_prefill_tokens={of_rank.sglang.max_prefill_tokens}, "
            f"max_running_requests={of_rank.max_batch_size}, "
            f"context_len={limits.max_seq_len}"
        )
    # The servers' own limit of tokens depends on the GPU.
    changed = {
        name: value
        for name, value in config.as_dict().items()
        if value != setting(name).default or name == "max_num_tokens"
    }
    line = SERVERS[engine].write({"model": config.model} | changed)
    says = f"{ENGINE_NAMES[engine]} says" if ranks == 1 else f"Each of the {ranks} ranks of {ENGINE_NAMES[engine]} says"
    return f"{says}: {logged}. Its command line: {line}"


def _bound(study: Study, found: Fit) -> str:
    blocks = sum(window.num_blocks for window in study.pool.pools)
    words, limits = words_of(study.config.as_dict()), study.limits
    names = {
        Limit.KV_BLOCKS: f"the KV cache ({count(blocks)} blocks)",
        Limit.BATCH_SIZE: words.setting_name(Limit.BATCH_SIZE),
        Limit.NUM_TOKENS: f"{words.setting_name(Limit.NUM_TOKENS)} ({count(limits.generation_budget)})",
    }
    first = names.pop(found.bound_by)
    if limits.generation_budget == UNLIMITED:
        names.pop(Limit.NUM_TOKENS, None)
    others = ", ".join(
        f"{name} {'' if index else 'would allow '}{count(found.by_limit[limit])}"
        for index, (limit, name) in enumerate(names.items())
    )
    is_static = limits.batching_type is BatchingType.V1
    which = "requests of the mean length" if len(study.requests) > 1 else "such requests"
    at_end = ", all at their full length," if found.case.moment else ""
    packed = ""
    if found.first is not None:
        together = "All" if found.first == len(study.requests) else f"The first {count(found.first)}"
        packed = f" {together} of the trace fit together."
    return (
        f"{count(found.at_once)} {which}{at_end} run at once "
        f"{'in a static batch' if is_static else f'under {found.case.policy}'}: {first} binds first; "
        f"{others}.{packed}"
    )


def _contiguous_run(study: Study) -> str:
    contiguous, requests = study.contiguous, study.limits.max_batch_size
    return (
        f"A contiguous cache takes {memory_size(requests * contiguous.bytes_per_request)} for the {count(requests)} "
        f"requests of max_batch_size, {count(contiguous.positions)} places each; memory has room for "
        f"{count(contiguous.fit)}."
    )


def _contiguous(study: Study) -> str:
    contiguous = study.contiguous
    beams = f" for each of {study.limits.max_beam_width} beams" if study.limits.max_beam_width > 1 else ""
    room = count(contiguous.fit) if contiguous.fit else "none"
    return (
        f"In the same memory a contiguous cache ({count(study.limits.max_seq_len)} places{beams}, "
        f"{memory_size(contiguous.bytes_per_request)} a request) has room for {room}."
    )


def figures(study: Study) -> dict[str, Any]:
    """All figures and `sentences`, for JSON. Sizes are in bytes, tokens or blocks, as their names say."""
    config, model, pool, contiguous = study.config, study.model, study.pool, study.contiguous
    limits = ("policy", "type", *LIMIT_SETTINGS, "tokens_per_block", "enable_chunked_context")
    requests = None
    if study.requests:
        means = ("prompt_len", "output_len", "max_new_tokens", "beam_width")
        # Prompts of mean length in an iteration without other requests.
        budget = study.limits.token_budget
        prompts_per_iteration = None if budget == UNLIMITED else budget / study.mean("prompt_len")
        requests = {
            "count": len(study.requests),
            "refused": study.refused,
            "prompts_per_iteration": prompts_per_iteration,
            **{f"mean_{name}": study.mean(name) for name in means},
        }
    windows = [
        {
            "attention_window": window.attention_window.size,
            "sink_tokens": window.attention_window.sink,
            "layers": len(window.layers),
            "bytes_per_token": len(window.layers) * pool.layer_bytes,
            "bytes_per_block": pool.bytes_per_block(window),
            "blocks": window.num_blocks,
            "tokens": window.num_blocks * window.attention_window.tokens_per_block,
            "blocks_of_run": of_run.num_blocks,
            "host_blocks": of_run.num_host_blocks,
        }
        for window, of_run in zip(pool.windows, pool.layout.windows, strict=True)
    ]
    has_budget = study.limits.generation_budget != UNLIMITED
    fits = [
        {
            "policy": found.case.policy,
            "moment": found.case.moment or None,
            "mean_blocks_per_request": float(found.mean_blocks),
            "by_kv_blocks": found.by_limit[Limit.KV_BLOCKS],
            "by_batch_size": found.by_limit[Limit.BATCH_SIZE],
            "by_num_tokens": found.by_limit[Limit.NUM_TOKENS] if has_budget else None,
            "at_once": found.at_once,
            "bound_by": found.bound_by.value,
            "first_requests": found.first,
        }
        for found in study.fits
    ]
    return {
        "model": {
            "name": config.model,
            "parameters": model.num_parameters,
            "layers": model.num_layers,
            "dtype": config.dtype,
        },
        "device": study.device.name,
        "memory": {
            "free_bytes": study.device.free_bytes,
            "weight_bytes": pool.weight_bytes,
            "kv_budget_bytes": pool.budget_bytes,
        },
        "limits": {name: getattr(config, name) for name in limits},
        "kv_cache": {
            "type": config.kv_cache_type,
            "dtype": config.kv_cache_dtype or config.dtype,
            "bytes": pool.kv_bytes,
            "bytes_per_token": pool.bytes_per_token,
            "longest_sequence_tokens": study.longest_sequence,
            "windows": windows,
        },
        "requests": requests,
        "at_once": fits,
        "contiguous": {
            "positions_per_request": contiguous.positions,
            "bytes_per_request": contiguous.bytes_per_request,
            "by_memory": contiguous.fit,
            "at_once": contiguous.at_once,
        },
        "summary": sentences(study),
    }
