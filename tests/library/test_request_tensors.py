"""Requests from tensors by the names, shapes and data types of TensorRT-LLM's documentation."""

from typing import Any

import numpy as np
import pytest

from ifbbench import InferenceRequest, SamplingParams
from ifbbench.engine.sampling_params import EarlyStopping
from ifbbench.errors import InputError
from ifbbench.serving.library.request_tensors import TENSORS
from tests.library.client import Client
from tests.library.managers import tiny_manager_of
from tests.small_model import SMALL_MODEL

pytestmark = pytest.mark.usefixtures("small_model")

VOCABULARY, HIDDEN = SMALL_MODEL.vocab_size, SMALL_MODEL.hidden_size
BIAS = np.linspace(-1, 1, VOCABULARY, dtype=np.float32)
TABLE = np.linspace(-1, 1, 3 * HIDDEN, dtype=np.float32).reshape(3, HIDDEN).astype(np.float16)


def array(value: Any, dtype: Any) -> np.ndarray:
    return np.array(value, dtype)


# Every documented tensor, in its documented shape without the dimension of the batch, and the fields that it becomes.
DOCUMENTED: dict[str, np.ndarray] = {
    "input_ids": array([5, 6, 4097, 8], np.int32),
    "input_lengths": array([4], np.int32),
    "request_output_len": array([6], np.int32),
    "beam_width": array([2], np.int32),
    "end_id": array([2], np.int32),
    "pad_id": array([3], np.int32),
    "bad_words_list": array([[5, 7, 8, 9], [1, 4, -1, -1]], np.int32),
    "stop_words_list": array([[21, 22, 23, 0], [2, 3, -1, -1]], np.int32),
    "embedding_bias": BIAS,
    "temperature": array([0.5], np.float32),
    "runtime_top_k": array([7], np.int32),
    "runtime_top_p": array([0.75], np.float32),
    "len_penalty": array([0.25], np.float32),
    "early_stopping": array([1], np.int32),
    "repetition_penalty": array([1.5], np.float32),
    "presence_penalty": array([0.125], np.float32),
    "frequency_penalty": array([0.0625], np.float32),
    "min_length": array([4], np.int32),
    "random_seed": array([2**63 + 5], np.uint64),
    "return_log_probs": array([True], np.bool_),
    "return_context_logits": array([True], np.bool_),
    "return_generation_logits": array([True], np.bool_),
    "streaming": array([False], np.bool_),
    "exclude_input_in_output": array([False], np.bool_),
    "prompt_embedding_table": TABLE,
    "prompt_vocab_size": array([2], np.int32),
    "prompt_table_extra_ids": array([0, 0, 7, 0], np.uint64),
    "lora_task_id": array([9], np.uint64),
    "lora_weights": np.zeros((2, 40), np.float16),
    "lora_config": array([[0, 0, 4], [0, 1, 4]], np.int32),
    "draft_input_ids": array([11, 12], np.int32),
    "draft_logits": np.zeros((2, VOCABULARY), np.float32),
}
REQUIRED = {name: DOCUMENTED[name] for name in ("input_ids", "request_output_len")}


def test_every_documented_tensor_is_known():
    assert [*DOCUMENTED, "seed"] == sorted(TENSORS, key=lambda name: name == "seed")


def test_the_seed_has_two_names_of_which_a_request_gives_one():
    named = {**REQUIRED, "seed": DOCUMENTED["random_seed"]}
    assert InferenceRequest.from_tensors(1, named).sampling.seed == 2**63 + 5
    with pytest.raises(InputError, match="another name"):
        InferenceRequest.from_tensors(1, {**named, "random_seed": DOCUMENTED["random_seed"]})


@pytest.mark.parametrize("batched", [False, True])
def test_all_tensors_together(batched):
    request = InferenceRequest.from_tensors(
        17, {name: value[None] if batched else value for name, value in DOCUMENTED.items()}
    )
    plain = {
        name: getattr(request, name)
        for name in (
            "request_id",
            "max_new_tokens",
            "beam_width",
            "end_id",
            "pad_id",
            "return_log_probs",
            "return_context_logits",
            "return_generation_logits",
            "streaming",
            "prompt_vocab_size",
            "lora_task_id",
            "stop_sequences",
        )
    }
    assert plain == {
        "request_id": 17,
        "max_new_tokens": 6,
        "beam_width": 2,
        "end_id": 2,
        "pad_id": 3,
        "return_log_probs": True,
        "return_context_logits": True,
        "return_generation_logits": True,
        "streaming": False,
        "prompt_vocab_size": 2,
        "lora_task_id": 9,
        "stop_sequences": ((21, 22), (23,)),
    }
    for name in (
        "input_ids",
        "prompt_embedding_table",
        "lora_weights",
        "lora_config",
        "draft_input_ids",
        "draft_logits",
    ):
        np.testing.assert_array_equal(getattr(request, name), DOCUMENTED[name])
    assert request.sampling == SamplingParams(
        0.5, 7, 0.75, 2**63 + 5, 1.5, 0.25, EarlyStopping.ALWAYS, 0.125, 0.0625, 4, ((5,), (7, 8, 9))
    )
    np.testing.assert_array_equal(request.sampling.embedding_bias, BIAS)


def test_input_lengths_cut_off_the_padding_of_a_batch():
    tensors = {"input_ids": [5, 6, 7, 0, 0], "request_output_len": [3], "prompt_table_extra_ids": [1, 2, 3, 0, 0]}
    request = InferenceRequest.from_tensors(1, {**tensors, "input_lengths": [3], "exclude_input_in_output": [True]})
    assert list(request.input_ids) == [5, 6, 7]
    assert request.token_extra_ids is not None
    assert list(request.token_extra_ids) == [1, 2, 3]
    assert request.exclude_input_from_output
    with pytest.raises(InputError, match="input_lengths: 6"):
        InferenceRequest.from_tensors(1, {**tensors, "input_lengths": [6]})


def test_numbers_may_have_no_dimension():
    tensors = {name: np.asarray(value).reshape(()) if value.size == 1 else value for name, value in DOCUMENTED.items()}
    assert InferenceRequest.from_tensors(1, tensors).sampling.top_k == 7


@pytest.mark.parametrize("changes", [{}, {"beam_width": array([1], np.int32), "streaming": array([True], np.bool_)}])
def test_a_request_from_tensors_is_served_as_one_from_fields(changes):
    """Without an adapter and drafts, whose effect has tests of its own."""
    tensors = {name: value for name, value in DOCUMENTED.items() if not name.startswith(("lora", "draft"))} | changes
    from_tensors = InferenceRequest.from_tensors(1, tensors)
    from_fields = InferenceRequest(
        2,
        [5, 6, 4097, 8],
        6,
        2,
        3,
        stop_sequences=[[21, 22], [23]],
        beam_width=from_tensors.beam_width,
        streaming=from_tensors.streaming,
        return_log_probs=True,
        return_context_logits=True,
        return_generation_logits=True,
        prompt_embedding_table=TABLE[:2],
        sampling=SamplingParams(
            0.5, 7, 0.75, 2**63 + 5, 1.5, 0.25, EarlyStopping.ALWAYS, 0.125, 0.0625, 4, ((5,), (7, 8, 9)), BIAS
        ),
    )
    client = Client([from_tensors, from_fields])
    tiny_manager_of(client, start=False, max_beam_width=2).close()
    one, other = client.answers
    assert (one.error, other.error) == ("", "")
    assert len(one.responses) == len(other.responses)
    for left, right in zip(one.responses, other.responses, strict=True):
        assert left.keys() == right.keys()
        for name, value in left.items():
            np.testing.assert_array_equal(value, right[name])


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({}, SamplingParams()),
        ({"temperature": [0.5]}, SamplingParams(temperature=0.5)),
        ({"runtime_top_k": [4]}, SamplingParams(temperature=1.0, top_k=4)),
        ({"runtime_top_p": [0.5]}, SamplingParams(temperature=1.0, top_p=0.5)),
        ({"runtime_top_k": [4], "runtime_top_p": [0.0]}, SamplingParams(temperature=1.0, top_k=4)),
        ({"runtime_top_k": [0], "runtime_top_p": [0.0]}, SamplingParams(temperature=1.0, top_k=1)),
        ({"early_stopping": [False]}, SamplingParams(early_stopping=EarlyStopping.HEURISTIC)),
        ({"early_stopping": [2]}, SamplingParams(early_stopping=EarlyStopping.NEVER)),
    ],
)
def test_sampling_parameters_have_the_documented_meaning(tensors, expected):
    assert InferenceRequest.from_tensors(1, {**REQUIRED, **tensors}).sampling == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([[1, 2, 3], [1, 3, -1]], ((1,), (2, 3))),
        ([[1, 2, 3], [3, -1, -1]], ((1, 2, 3),)),
        ([[1, 2, 0, 0], [2, -1, -1, -1]], ((1, 2),)),
        ([[1, 2], [1, 2]], ((1,), (2,))),
        ([[0], [-1]], ()),
        (np.zeros((2, 0), np.int32), ()),
    ],
)
def test_words_end_where_the_second_row_says(words, expected):
    request = InferenceRequest.from_tensors(1, {**REQUIRED, "stop_words_list": words, "bad_words_list": words})
    assert (request.stop_sequences, request.sampling.bad_words) == (expected, expected)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"input_idz": [1]}, "'input_idz' is not a tensor of a request. Did you mean input_ids?"),
        ({"top_k": [1]}, "'top_k' is not a tensor of a request. Did you mean runtime_top_k?"),
        ({"bad_words": [[1], [1]]}, "Did you mean bad_words_list?"),
        ({5: [1]}, "5 is not a tensor of a request. Expected one of input_ids, input_lengths, request"),
        ({"request_output_len": [1.0]}, "request_output_len: expected int32 of shape [1] or [1, 1], not float64"),
        ({"request_output_len": [1, 2]}, "not int64 of shape [2]"),
        ({"input_ids": [[1, 2], [3, 4]]}, "input_ids: expected int32 of shape [length] or [1, length], not int64"),
        ({"input_ids": 5}, "not int64 of shape []"),
        ({"input_ids": "text"}, "input_ids: expected int32"),
        ({"input_ids": [[1], [1, 2]]}, "input_ids: expected int32 of shape [length]"),
        ({"input_ids": array([1.5, 2], np.float32)}, "not float32 of shape [2]"),
        ({"temperature": array([1], np.int32)}, "temperature: expected float32 of shape [1] or [1, 1], not int32"),
        ({"streaming": array([1], np.int32)}, "streaming: expected bool of shape [1] or [1, 1], not int32"),
        ({"streaming": ["yes"]}, "streaming: expected bool"),
        ({"return_log_probs": "true"}, "return_log_probs: expected bool"),
        ({"stop_words_list": [1, 2]}, "stop_words_list: expected int32 of shape [2, tokens] or [1, 2, tokens]"),
        ({"stop_words_list": [[1, 2], [2, 1]]}, "stop_words_list: the ends of words (second row) are [2, 1]"),
        ({"bad_words_list": [[1, 2], [3, -1]]}, "bad_words_list: the ends of words (second row) are [3]"),
        ({"bad_words_list": [[1, 2], [0, 1]]}, "expected ascending numbers from 1 to 2, then -1"),
        ({"embedding_bias": np.zeros((2, 3), np.float32)}, "embedding_bias: expected float32 of shape [vocabulary]"),
        ({"lora_config": [[1, 2]]}, "lora_config: expected int32 of shape [modules and layers, 3]"),
        ({"draft_logits": np.zeros(3)}, "draft_logits: expected float32 of shape [draft tokens, vocabulary]"),
        ({"prompt_embedding_table": np.zeros((1, 2), np.int8)}, "not int8 of shape [1, 2]"),
        ({"random_seed": [object()]}, "random_seed: expected uint64"),
    ],
)
def test_a_wrong_tensor_is_one_clear_error(tensors, words):
    with pytest.raises(InputError) as refused:
        InferenceRequest.from_tensors(1, {**REQUIRED, **tensors})
    assert words in str(refused.value)


@pytest.mark.parametrize("missing", list(REQUIRED))
def test_the_required_tensors_must_be_there(missing):
    with pytest.raises(InputError, match=f"tensor {missing} is missing; expected int32 of shape"):
        InferenceRequest.from_tensors(1, {name: value for name, value in REQUIRED.items() if name != missing})


def test_tensors_are_a_mapping():
    with pytest.raises(InputError, match=r"tensors is .*; expected a mapping of tensor names to arrays"):
        InferenceRequest.from_tensors(1, [("input_ids", [1])])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input_ids": [5, 4096]}, "token id 4096 is not in the vocabulary; expected 0 to 4095"),
        ({"input_ids": [4099], "prompt_embedding_table": TABLE}, "of the prompt_embedding_table; expected 0 to 4098"),
        ({"input_ids": [5, 4098], "prompt_embedding_table": TABLE, "prompt_vocab_size": 2}, "expected 0 to 4097"),
        ({"prompt_vocab_size": 2}, "prompt_vocab_size: 2 virtual tokens, but 0 rows"),
        ({"prompt_embedding_table": TABLE, "prompt_vocab_size": 4}, "but 3 rows of prompt_embedding_table"),
        ({"prompt_embedding_table": TABLE[:, 1:]}, "prompt_embedding_table: rows of 63 numbers; expected 64"),
        ({"prompt_embedding_table": TABLE * np.nan}, "prompt_embedding_table: contains NaN"),
        ({"prompt_embedding_table": "table"}, "prompt_embedding_table: expected floats in 2 dimensions"),
        ({"lora_weights": np.zeros((1, 4))}, "an adapter needs lora_task_id, lora_weights and lora_config together"),
        ({"lora_config": [[1, 2, 3]], "lora_task_id": 1}, "lora_weights: an adapter needs lora_task_id"),
        ({"lora_weights": np.zeros((2, 4)), "lora_config": [[1, 2, 3]], "lora_task_id": 1}, "expected [2, 3]"),
        ({"draft_input_ids": [1, 4096]}, "draft_input_ids: token id 4096 is not in the vocabulary"),
        ({"draft_input_ids": [1.5]}, "draft_input_ids: expected integers"),
        ({"draft_logits": np.zeros((1, 4096))}, "draft_logits: 1 rows for 0 draft_input_ids"),
        ({"draft_input_ids": [1], "draft_logits": np.zeros((1, 7))}, "draft_logits: rows of 7 numbers; expected 4096"),
        ({"sampling": SamplingParams(bad_words=((4096,),))}, "bad_words: token id 4096 is not in the vocabulary"),
        ({"sampling": SamplingParams(bad_words=((),))}, "bad_words: one is empty"),
        ({"sampling": SamplingParams(bad_words=5)}, "bad_words is 5"),  # type: ignore[arg-type]
        ({"sampling": SamplingParams(embedding_bias=BIAS[1:])}, "embedding_bias: 4095 numbers; expected 4096"),
        ({"sampling": SamplingParams(embedding_bias=BIAS * np.inf)}, "embedding_bias: contains NaN or an infinite"),
        ({"sampling": SamplingParams(min_length=-1)}, "min_length -1: expected an integer of at least 0"),
        ({"sampling": SamplingParams(min_length=1.5)}, "min_length is 1.5"),  # type: ignore[arg-type]
        ({"sampling": SamplingParams(presence_penalty="much")}, "presence_penalty is 'much'"),  # type: ignore[arg-type]
        ({"sampling": SamplingParams(frequency_penalty=float("nan"))}, "frequency_penalty is nan"),
    ],
)
def test_what_does_not_fit_the_model_is_the_error_of_one_request(fields, words):
    good: dict[str, Any] = {"request_id": 2, "input_ids": [5, 6], "max_new_tokens": 3}
    client = Client([InferenceRequest(**{**good, "request_id": 1, **fields}), InferenceRequest(**good)])
    tiny_manager_of(client, start=False).close()
    bad, other = client.answers
    assert words in bad.error
    assert (other.error, len(other.tokens)) == ("", 3)
