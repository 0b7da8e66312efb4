"""The settings of draft tokens (speculative decoding): what they need, and what refuses them."""

import logging

from ifbbench.engine.drafts import DraftSettings
from ifbbench.errors import InputError
from ifbbench.kv.sizing import CacheLayout
from ifbbench.models.config import ModelConfig
from ifbbench.models.named_models import load_model_config
from ifbbench.settings.config import RunConfig
from ifbbench.settings.modes import BatchingType, Overlap

DEFAULT_DRAFT_LEN = 4

_log = logging.getLogger("ifbbench")


def as_drafts_need(config: RunConfig) -> RunConfig:
    """With draft tokens there is no overlap, and --draft_len has a value. InputError where drafts cannot be."""
    sources = [name for name in ("draft_model", "draft_ngram", "draft_mtp") if getattr(config, name) is not None]
    if config.acceptance_rate is not None:
        parse_acceptance(config.acceptance_rate)
        if not config.makes_no_tokens:
            raise InputError(
                f"--acceptance_rate: device {config.device} computes tokens, and verifies draft tokens by "
                "them; leave it out, or choose --device sim:PROFILE."
            )
    elif not sources:
        if config.draft_len is not None:
            raise InputError(
                "--draft_len: nothing proposes draft tokens; add --draft_model or --draft_ngram, or on a "
                "simulated device --acceptance_rate."
            )
        return config
    elif config.makes_no_tokens or config.draft_mtp is not None:
        raise InputError(
            f"--{sources[0]}: device {config.device} computes no tokens, so draft tokens are accepted "
            "at a given rate; add --acceptance_rate."
        )
    if len(sources) > 1:
        raise InputError(f"--{sources[1]}: --{sources[0]} proposes draft tokens too; leave out one of them.")
    if config.draft_mtp is not None and config.hardware is None:
        raise InputError("--draft_mtp: is simulated only; leave it out, or choose --device sim:PROFILE.")
    if config.draft_mtp is not None and config.draft_len not in (None, config.draft_mtp):
        raise InputError(f"--draft_len: {config.draft_len}, and --draft_mtp is {config.draft_mtp}; leave it out.")
    asked = f"--{sources[0] if sources else 'acceptance_rate'}"
    if config.type == BatchingType.V1:
        raise InputError(f"{asked}: static batches (--type v1) have no draft tokens; choose another --type.")
    if config.pp_size > 1:
        raise InputError(f"{asked}: draft tokens run in one pipeline stage; leave out --pp_size {config.pp_size}.")
    if config.normalize_log_probs:
        raise InputError(
            f"{asked}: log-probabilities of draft tokens are not normalised; leave out one of it and "
            "--normalize_log_probs."
        )
    hides_host = config.draft_mtp is not None and config.overlap == Overlap.ASYNC
    if config.enable_trt_overlap and not hides_host:
        _log.warning(
            "%s turns --enable_trt_overlap off: the next step depends on which draft tokens are accepted.", asked
        )
    draft_len = config.draft_mtp or config.draft_len or DEFAULT_DRAFT_LEN
    if config.max_num_tokens is not None and config.max_num_tokens <= draft_len:
        raise InputError(
            f"--max_num_tokens: {config.max_num_tokens} is less than the {draft_len + 1} tokens of one "
            "request's step with --draft_len; raise it, or lower --draft_len."
        )
    if hides_host:
        return config.with_values(draft_len=draft_len)
    return config.with_values(enable_trt_overlap=False, overlap=None, draft_len=draft_len)


def parse_acceptance(text: str) -> tuple[float, ...]:
    """The rates of `--acceptance_rate`."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise InputError(
            f"--acceptance_rate: {text!r} is not valid; expected a probability from 0 to 1, or several "
            "separated by commas, by position."
        )
    return rates


def draft_settings(config: RunConfig, layout: CacheLayout) -> DraftSettings:
    """The engine's settings of a resolved `config`. InputError if draft tokens cannot be removed from the cache."""
    if any(window.attention_window.wraps for window in layout.windows):
        raise InputError(
            "--draft_len: draft tokens that are rejected cannot be removed from an attention window whose "
            "blocks are overwritten; add --window_mode linear, or raise --max_attention_window."
        )
    rates = (0.0,) if config.acceptance_rate is None else parse_acceptance(config.acceptance_rate)
    # Without token ids there is nothing to look up.
    max_ngram = 0 if config.makes_no_tokens else config.draft_ngram or 0
    return DraftSettings(config.draft_len or 0, max_ngram, rates, config.seed)


def load_draft_config(config: RunConfig, model: ModelConfig) -> ModelConfig:
    """The shape of `--draft_model`, or of the layer for multi-token prediction or EAGLE head. InputError unless it can
    propose tokens for `model`.

    config: settings with resolved limits.
    """
    if config.draft_mtp is not None:
        return model.draft_layer
    if "," in (config.max_attention_window or ""):
        raise InputError(
            "--draft_model: works with one attention window for all layers; leave it out, or give one "
            "number to --max_attention_window."
        )
    draft = load_model_config(config.draft_model or "")
    if draft.vocab_size != model.vocab_size:
        raise InputError(
            f"--draft_model: {config.draft_model} has a vocabulary of {draft.vocab_size} tokens and "
            f"{config.model} one of {model.vocab_size}; choose a model of the same family."
        )
    if not config.makes_no_tokens and draft.max_position_embeddings < (config.max_seq_len or 0):
        raise InputError(
            f"--draft_model: {config.draft_model} has {draft.max_position_embeddings} positions, fewer "
            f"than --max_seq_len {config.max_seq_len}; lower that."
        )
    return draft
