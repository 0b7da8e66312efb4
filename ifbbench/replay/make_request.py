"""From a row of a trace to the engine's request, as the settings want it."""

from ifbbench.api.engine import Engine
from ifbbench.config import RunConfig
from ifbbench.engine.request import NO_IDENTITY, Request, ReuseIdentity
from ifbbench.engine.sampling_params import GREEDY, EarlyStopping, OutputOptions, SamplingParams, StopConditions
from ifbbench.replay.client import MakeRequest
from ifbbench.workload.prompts import output_symbol, prompt_tokens, symbolic_runs
from ifbbench.workload.trace import TraceRequest

RECORDED = "recorded token ids"


def request_maker(engine: Engine) -> MakeRequest:
    """What turns (index, row) into a request for `engine`; prompts that the trace does not record are drawn then."""
    config = engine.config
    end_tokens, options = _end_tokens(engine), _output_options(config)
    usual_stop = StopConditions(end_tokens)

    def make_request(index: int, row: TraceRequest) -> Request:
        return Request(
            row.request_id,
            row.prompt_len,
            row.max_new_tokens,
            output_len=row.output_len,
            prompt_tokens=prompt_tokens(row, engine.model.vocab_size, config.seed) if engine.makes_tokens else None,
            index=index,
            priority=row.priority,
            beam_width=config.beam_width or row.beam_width,
            lora_task_id=row.lora_task_id,
            # One seed a request, so that its tokens do not depend on the others. Without tokens there is none to draw.
            sampling=_sampling(config, config.seed + row.request_id) if engine.makes_tokens else GREEDY,
            options=options,
            stop=StopConditions(end_tokens + row.stop_ids) if row.stop_ids else usual_stop,
            reuse=_symbols(engine, row, index),
        )

    return make_request


def _symbols(engine: Engine, row: TraceRequest, index: int) -> ReuseIdentity:
    """Without a model, symbols stand for the tokens: those of output are nobody else's, so that a block with output in
    it is kept, and found as little, as where a model makes its own."""
    if engine.makes_tokens or not engine.limits.reuse.enabled:
        return NO_IDENTITY
    if row.prompt_tokens is None:
        return ReuseIdentity(runs=symbolic_runs(row, index), output_symbol=output_symbol(index, 0))
    # Recorded ids are numbers too, but not those of the names that other rows may give to their tokens.
    runs = [(token, 1) for token in row.prompt_tokens]
    return ReuseIdentity(cache_salt=RECORDED, runs=runs, output_symbol=output_symbol(index, 0))


def _sampling(config: RunConfig, seed: int) -> SamplingParams:
    return SamplingParams(
        config.temperature, config.top_k, config.top_p, seed, config.repetition_penalty, config.length_penalty,
        EarlyStopping(config.early_stopping),
    )  # fmt: skip


def _end_tokens(engine: Engine) -> tuple[int, ...]:
    """Token ids that end every request."""
    end_tokens = engine.model.eos_token_ids if engine.config.stop_at_end_token else ()
    end_id = engine.config.eos_id
    return end_tokens if end_id is None or end_id < 0 else (*end_tokens, end_id)


def _output_options(config: RunConfig) -> OutputOptions:
    return OutputOptions(
        streaming=config.streaming,
        return_log_probs=config.return_log_probs,
        return_context_logits=config.return_context_logits,
        return_generation_logits=config.return_generation_logits,
        exclude_input_from_output=config.exclude_input_in_output_seq,
        pad_id=max(config.eos_id or 0, 0) if config.pad_id is None else config.pad_id,
    )
