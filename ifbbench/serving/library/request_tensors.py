"""The tensors of a request by the names of TensorRT-LLM's documentation (`InferenceRequest`), as fields of ours."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ifbbench.engine.sampling_params import EarlyStopping
from ifbbench.errors import InputError
from ifbbench.settings.fields import did_you_mean, unexpected

INTEGERS, FLOATS, BOOLEANS = "iu", "f", "b"  # kinds of NumPy's data types
ONE = ("1",)
END_OF_OFFSETS = -1
# No field: input_ids are cut to this length, because those of a batch are padded to the longest.
INPUT_LENGTH = "input_length"


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of a request, as documented.

    field: name in InferenceRequest, or in its sampling parameters.
    dtype, shape: as documented, without the dimension of the batch; a dimension is a number, or a word for any.
    kinds: kinds of the data types that are taken.
    """

    field: str
    dtype: str
    shape: tuple[str, ...]
    kinds: str
    is_sampling: bool = False

    def read(self, name: str, value: Any) -> NDArray[Any]:
        """`value` in the documented shape; a dimension of 1 may precede it, and a number may have no dimension."""
        try:
            array = np.asarray(value)
        except (TypeError, ValueError) as error:
            raise InputError(f"{name}: expected {self.expected}; this is no array ({error}).") from error
        shape = array.shape
        if shape[:1] == (1,) and len(shape) == len(self.shape) + 1:
            shape = shape[1:]
        if not shape and self.shape == ONE:
            shape = (1,)
        fits = len(shape) == len(self.shape) and all(
            not wanted.isdigit() or int(wanted) == size for wanted, size in zip(self.shape, shape, strict=True)
        )
        if not fits or array.dtype.kind not in self.kinds:
            raise InputError(f"{name}: expected {self.expected}, not {array.dtype} of shape {list(array.shape)}.")
        return array.reshape(shape)

    @property
    def expected(self) -> str:
        dimensions = ", ".join(self.shape)
        return f"{self.dtype} of shape [{dimensions}] or [1, {dimensions}]"


def _sampling(field: str, dtype: str, kinds: str, shape: tuple[str, ...] = ONE) -> _Tensor:
    return _Tensor(field, dtype, shape, kinds, is_sampling=True)


TENSORS = {
    "input_ids": _Tensor("input_ids", "int32", ("length",), INTEGERS),
    "input_lengths": _Tensor(INPUT_LENGTH, "int32", ONE, INTEGERS),
    "request_output_len": _Tensor("max_new_tokens", "int32", ONE, INTEGERS),
    "beam_width": _Tensor("beam_width", "int32", ONE, INTEGERS),
    "end_id": _Tensor("end_id", "int32", ONE, INTEGERS),
    "pad_id": _Tensor("pad_id", "int32", ONE, INTEGERS),
    "bad_words_list": _sampling("bad_words", "int32", INTEGERS, ("2", "tokens")),
    "stop_words_list": _Tensor("stop_sequences", "int32", ("2", "tokens"), INTEGERS),
    "embedding_bias": _sampling("embedding_bias", "float32", FLOATS, ("vocabulary",)),
    "temperature": _sampling("temperature", "float32", FLOATS),
    "runtime_top_k": _sampling("top_k", "int32", INTEGERS),
    "runtime_top_p": _sampling("top_p", "float32", FLOATS),
    "len_penalty": _sampling("length_penalty", "float32", FLOATS),
    "early_stopping": _sampling("early_stopping", "int32", INTEGERS + BOOLEANS),
    "repetition_penalty": _sampling("repetition_penalty", "float32", FLOATS),
    "presence_penalty": _sampling("presence_penalty", "float32", FLOATS),
    "frequency_penalty": _sampling("frequency_penalty", "float32", FLOATS),
    "min_length": _sampling("min_length", "int32", INTEGERS),
    "random_seed": _sampling("seed", "uint64", INTEGERS),
    "seed": _sampling("seed", "uint64", INTEGERS),  # the name in later versions of the backend
    "return_log_probs": _Tensor("return_log_probs", "bool", ONE, BOOLEANS),
    "return_context_logits": _Tensor("return_context_logits", "bool", ONE, BOOLEANS),
    "return_generation_logits": _Tensor("return_generation_logits", "bool", ONE, BOOLEANS),
    "streaming": _Tensor("streaming", "bool", ONE, BOOLEANS),
    "exclude_input_in_output": _Tensor("exclude_input_from_output", "bool", ONE, BOOLEANS),
    "prompt_embedding_table": _Tensor("prompt_embedding_table", "float16", ("virtual tokens", "hidden size"), FLOATS),
    "prompt_vocab_size": _Tensor("prompt_vocab_size", "int32", ONE, INTEGERS),
    "prompt_table_extra_ids": _Tensor("token_extra_ids", "uint64", ("length",), INTEGERS),
    "lora_task_id": _Tensor("lora_task_id", "uint64", ONE, INTEGERS),
    "lora_weights": _Tensor("lora_weights", "float16", ("modules and layers", "values"), FLOATS),
    "lora_config": _Tensor("lora_config", "int32", ("modules and layers", "3"), INTEGERS),
    "draft_input_ids": _Tensor("draft_input_ids", "int32", ("draft tokens",), INTEGERS),
    "draft_logits": _Tensor("draft_logits", "float32", ("draft tokens", "vocabulary"), FLOATS),
}
REQUIRED = ("input_ids", "request_output_len")


def fields_of_tensors(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of InferenceRequest, and of its sampling parameters. InputError for an unknown name, which names the
    nearest, and for a wrong shape or data type.

    runtime_top_k or runtime_top_p alone sample at temperature 1. A runtime_top_p of 0 is none; without runtime_top_k it
    is greedy. early_stopping: 0 is HEURISTIC, 1 is ALWAYS, others are NEVER."""
    if not isinstance(tensors, Mapping):
        raise unexpected("tensors", tensors, "a mapping of tensor names to arrays")
    fields: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for name, value in tensors.items():
        tensor = TENSORS.get(name)
        if tensor is None:
            hint = did_you_mean(str(name), tuple(TENSORS)) or f" Expected one of {', '.join(TENSORS)}."
            raise InputError(f"{name!r} is not a tensor of a request.{hint}")
        array = tensor.read(name, value)
        content = array.item() if tensor.shape == ONE else array
        if name.endswith("_words_list"):
            content = _words(name, array)
        found = sampling if tensor.is_sampling else fields
        if tensor.field in found:
            raise InputError(f"{name}: the request has it under another name, too; leave one of them out.")
        found[tensor.field] = content
    for name in REQUIRED:
        if name not in tensors:
            raise InputError(f"tensor {name} is missing; expected {TENSORS[name].expected}.")
    length = fields.pop(INPUT_LENGTH, None)
    if length is not None:
        tokens = fields["input_ids"]
        if not 0 <= length <= len(tokens):
            raise InputError(f"input_lengths: {length}, but input_ids has {len(tokens)}; expected 0 to {len(tokens)}.")
        fields["input_ids"] = tokens[:length]
        if "token_extra_ids" in fields:
            fields["token_extra_ids"] = fields["token_extra_ids"][:length]
    if "early_stopping" in sampling:
        names = {0: EarlyStopping.HEURISTIC, 1: EarlyStopping.ALWAYS}
        sampling["early_stopping"] = names.get(int(sampling["early_stopping"]), EarlyStopping.NEVER)
    if sampling.get("top_p") == 0.0:
        sampling |= {"top_p": 1.0, "top_k": sampling.get("top_k", 0) or 1}
    if "top_k" in sampling or "top_p" in sampling:
        sampling.setdefault("temperature", 1.0)
    return fields, sampling


def _words(name: str, array: NDArray[Any]) -> tuple[tuple[int, ...], ...]:
    """Words from [2, tokens]: the ids of all words, one after the other, and the end of each word among them, padded
    with -1."""
    tokens, ends = array.tolist()
    if END_OF_OFFSETS in ends:
        ends = ends[: ends.index(END_OF_OFFSETS)]
    starts = [0, *ends[:-1]]
    if any(end <= start for start, end in zip(starts, ends, strict=False)) or (ends and ends[-1] > len(tokens)):
        raise InputError(
            f"{name}: the ends of words (second row) are {ends}; expected ascending numbers from 1 to "
            f"{len(tokens)}, then -1."
        )
    return tuple(tuple(tokens[start:end]) for start, end in zip(starts, ends, strict=False))
