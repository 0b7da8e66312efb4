"""The engine's requests of a trace: how they are made of its rows, and which of them the engine will refuse."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
from msgspec import structs

from ifbbench.build.adapters import drawn_tasks
from ifbbench.build.engine import Engine, sampling_params
from ifbbench.engine.request import NO_IDENTITY, Request, ReuseIdentity
from ifbbench.engine.retention import DEFAULT_PRIORITY, NO_RETENTION, Retention, RetentionRange
from ifbbench.engine.sampling_params import GREEDY, OutputOptions, StopConditions
from ifbbench.replay.client import MakeRequest
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.refusals import AdmissionLimits, Refusal
from ifbbench.settings.config import RunConfig
from ifbbench.settings.engines import ENGINES
from ifbbench.workload.prompts import output_runs, output_symbol, prompt_tokens, symbolic_runs
from ifbbench.workload.trace import Trace, TraceRequest, columns_of

RECORDED = "recorded token ids"


def with_drawn_loras(trace: Trace, engine: Engine) -> Trace:
    """A trace whose requests name the adapters that `request_maker` draws for them, so that each has the same one
    wherever a router sends it."""
    columns, loras, seed = columns_of(trace.requests), _drawn_loras(engine), engine.config.seed
    if columns.names_loras or not loras:
        return trace
    index_of, recall = {origin: index for index, origin in enumerate(columns.origin)}, columns.recall

    def named(origin: int) -> TraceRequest:
        return structs.replace(recall(origin), lora_task_id=_drawn_lora(seed, index_of[origin], loras))

    return replace(trace, requests=replace(columns, names_loras=True, recall=named))


def _drawn_loras(engine: Engine) -> list[int]:
    """The adapters that requests of a trace without any draw from."""
    lora = engine.limits.lora
    return [] if lora is None else drawn_tasks(engine.config, lora.source.tasks())


def _drawn_lora(seed: int, index: int, loras: Sequence[int]) -> int:
    """The adapter of the request at `index` of a trace."""
    return Random(f"lora {seed} {index}").choice(loras)


def request_maker(engine: Engine, draws_loras: bool = False) -> MakeRequest:
    """The function from (index, row) to a request for `engine`; it draws prompts that the trace does not record, and
    with `draws_loras` one of `num_loras` adapters."""
    config, makes_tokens = engine.config, engine.makes_tokens
    end_tokens = engine.model.eos_token_ids if config.stop_at_end_token else ()
    if config.eos_id is not None and config.eos_id >= 0:
        end_tokens = (*end_tokens, config.eos_id)
    usual_stop = StopConditions(end_tokens)
    options = OutputOptions(
        streaming=config.streaming,
        return_log_probs=config.return_log_probs,
        return_context_logits=config.return_context_logits,
        return_generation_logits=config.return_generation_logits,
        exclude_input_from_output=config.exclude_input_in_output_seq,
        pad_id=max(config.eos_id or 0, 0) if config.pad_id is None else config.pad_id,
    )

    kept, returned = retentions(config)
    is_symbolic = engine.limits.reuse.enabled and not makes_tokens
    loras = _drawn_loras(engine) if draws_loras else []

    def make_request(index: int, row: TraceRequest) -> Request:
        return Request(
            row.request_id,
            row.prompt_len,
            row.max_new_tokens,
            output_len=row.output_len,
            prompt_tokens=prompt_tokens(row, engine.model.vocab_size, config.seed) if makes_tokens else None,
            index=index,
            priority=row.priority,
            beam_width=config.beam_width or row.beam_width,
            lora_task_id=_drawn_lora(config.seed, index, loras) if loras else row.lora_task_id,
            # Each request has a seed of its own, so that its tokens do not depend on the others.
            sampling=sampling_params(config, config.seed + row.request_id) if makes_tokens else GREEDY,
            options=options,
            stop=StopConditions(end_tokens + row.stop_ids) if row.stop_ids else usual_stop,
            reuse=_symbols(row, index) if is_symbolic else NO_IDENTITY,
            retention=kept if row.has_next_turn else returned,
        )

    return make_request


def retentions(config: RunConfig) -> tuple[Retention, Retention]:
    """The retention of requests that have a next turn, and of the others. A block that a request without priorities of
    its own reuses would keep its priority without limit, so that the last turn of a session returns them to the default
    one."""
    priority, duration_s = config.kv_retention_priority, config.kv_retention_s
    if priority is None:
        return NO_RETENTION, NO_RETENTION
    kept = Retention([RetentionRange(0, None, priority, duration_s)], priority, duration_s)
    return kept, Retention([RetentionRange(0, None, DEFAULT_PRIORITY)])


def _symbols(row: TraceRequest, index: int) -> ReuseIdentity:
    """Symbols in the place of tokens, where no model makes any. Those of an output are unique unless the trace names
    them, so that blocks with output in them are stored, and found as rarely, as with a model."""
    output = output_symbol(index, 0)
    if row.prompt_tokens is None:
        named = output_runs(row)
        num_shared = sum([length for _, length in (*row.prefix_runs(), *named)])
        return ReuseIdentity(
            runs=symbolic_runs(row, index), output_symbol=output, output_runs=named, num_shared=num_shared
        )
    # Recorded ids are numbers too, but are not to be found by the symbols of other rows.
    runs = [(token, 1) for token in row.prompt_tokens]
    return ReuseIdentity(cache_salt=RECORDED, runs=runs, output_symbol=output, num_shared=row.prompt_len)


def expected_refusals(trace: Trace, config: RunConfig, limits: BatchingConfig) -> list[tuple[Refusal, int]]:
    """How many requests the engine will refuse by each limit of their size, with the refusal of one of them; of an
    engine of a user that is not known.

    Of the requests with equal prompt lengths only the longest output is checked, unless that is refused."""
    if limits.engine not in ENGINES:
        return []
    admission = AdmissionLimits(limits)
    columns = columns_of(trace.requests)
    beams = np.full(len(columns), config.beam_width or 1)
    if columns.max_beam_width > 1 and config.beam_width is None:
        beams = np.fromiter((request.beam_width for request in trace), np.int64, len(trace))
    sizes = np.stack([beams, np.asarray(columns.prompt_len), np.asarray(columns.max_new_tokens)])
    sizes = sizes[:, np.lexsort(sizes[::-1])]
    is_longest = np.append((sizes[:2, 1:] != sizes[:2, :-1]).any(axis=0), True)
    num_equal = np.diff(np.flatnonzero(is_longest), prepend=-1)
    is_refused = [
        admission.refusal_by_size(prompt, new, beam, config.streaming) is not None
        for beam, prompt, new in zip(*sizes[:, is_longest].tolist(), strict=True)
    ]
    found: dict[str, tuple[Refusal, int]] = {}
    distinct, counts = np.unique(sizes[:, np.repeat(is_refused, num_equal)], axis=1, return_counts=True)
    for beam, prompt, new, count in zip(*distinct.tolist(), counts.tolist(), strict=True):
        if refusal := admission.refusal_by_size(prompt, new, beam, config.streaming):
            first, so_far = found.get(refusal.limit, (refusal, 0))
            found[refusal.limit] = (first, so_far + count)
    return list(found.values())


def advice(refusal: Refusal, config: RunConfig) -> str:
    """Which setting admits the requests that a limit refuses. config: resolved."""
    limit = refusal.limit
    if limit == "max_input_len" and not config.enable_chunked_context and config.max_input_len == config.max_num_tokens:
        can_chunk = config.type != "v1" and config.kv_cache_type == "paged"
        if can_chunk and (config.max_num_tokens or 0) >= (config.context_chunk_unit or config.tokens_per_block):
            return "--enable_chunked_context admits them."
        return "A larger --max_num_tokens admits them."
    return {
        "max_input_len": "A larger --max_input_len admits them.",
        "max_seq_len": "A larger --max_seq_len admits them, or --max_prompt_len truncates them.",
        "max_beam_width": "A larger --max_beam_width admits them.",
        "kv_blocks": "A larger KV cache (--max_tokens_in_paged_kvcache, --kv_cache_free_gpu_mem_fraction) or a smaller "
        "--reserve admits them.",
        "streaming": "--enable_chunked_context admits them.",
    }.get(limit, "")
