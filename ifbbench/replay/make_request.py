"""From a row of a trace to the engine's request, as the settings want it."""

from ifbbench.api.engine import Engine
from ifbbench.batching.request import Request
from ifbbench.batching.sampling_params import EarlyStopping, OutputOptions, SamplingParams, StopConditions
from ifbbench.config import RunConfig
from ifbbench.replay.client import MakeRequest
from ifbbench.workload.tokens import prompt_tokens
from ifbbench.workload.trace import TraceRequest


def request_maker(engine: Engine) -> MakeRequest:
    """What turns (index, row) into a request for `engine`; prompts that the trace does not record are drawn then."""
    config = engine.config
    end_tokens, options = _end_tokens(engine), _output_options(config)

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
            # One seed a request, so that its tokens do not depend on the others.
            sampling=_sampling(config, seed=config.seed + row.request_id),
            options=options,
            stop=StopConditions(end_tokens + row.stop_ids),
        )

    return make_request


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
