"""Names, shapes and types of the tensors that come back, as `response_tensors` documents them."""

from typing import Any

import numpy as np
import pytest

from ifbbench import InferenceRequest, SamplingParams
from ifbbench.serving.library.client import Tensors
from tests.library.client import Client
from tests.library.managers import CountingExecutor, manager_of, tiny_manager_of

pytestmark = pytest.mark.usefixtures("small_model")

VOCABULARY = 4096
PROMPT = [5, 6, 7, 8, 9]
ALL_NUMBERS = {"return_log_probs": True, "return_context_logits": True, "return_generation_logits": True}
NUMBER_FIELDS = ("context_logits", "generation_logits", "output_log_probs", "cum_log_probs")


def request(**fields: Any) -> InferenceRequest:
    return InferenceRequest(**{"request_id": 1, "input_ids": PROMPT, "max_new_tokens": 6, **fields})


def responses_of(stop_after: int | None = None, max_beam_width: int = 1, **fields: Any) -> list[Tensors]:
    """All responses of the built-in model to one request. stop_after: iterations to a stop signal."""
    client = Client([request(**fields)])
    manager = tiny_manager_of(client, start=False, max_beam_width=max_beam_width)
    if stop_after is not None:
        for iteration in range(stop_after):
            if iteration == stop_after - 1:
                client.stops.append(1)
            manager.step()
    manager.close()
    assert (client.answers[0].finals, client.answers[0].error) == (1, "")
    return client.answers[0].responses


def shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """Name to shape, once the types are found right."""
    for name, array in tensors.items():
        assert array.dtype == (np.float32 if name in NUMBER_FIELDS else np.int32)
    return {name: array.shape for name, array in tensors.items()}


def with_dummies(length: int, beams: int = 1) -> dict[str, tuple[int, ...]]:
    """The shapes of a response to a request without log-probabilities or logits."""
    return {
        "output_ids": (1, beams, length),
        "sequence_length": (1, beams),
        "reused_tokens": (1, 1),
        "context_logits": (1, 1, 1),
        "generation_logits": (1, 1, 1, 1),
    }


def with_numbers(length: int, context: int, output: int, beams: int = 1) -> dict[str, tuple[int, ...]]:
    """The shapes of a response with log-probabilities and logits. context: 0 for a dummy."""
    return {
        **with_dummies(length, beams),
        "context_logits": (1, context, VOCABULARY) if context else (1, 1, 1),
        "generation_logits": (1, beams, output, VOCABULARY),
        "output_log_probs": (1, beams, output),
        "cum_log_probs": (1, beams),
    }


def test_a_plain_response_has_prompt_and_output_and_dummies_for_logits():
    (tensors,) = responses_of()
    assert shapes(tensors) == with_dummies(11)
    assert tensors["output_ids"][0, 0, :5].tolist() == PROMPT
    assert tensors["sequence_length"].tolist() == [[11]]
    assert not tensors["context_logits"].any()
    assert not tensors["generation_logits"].any()


def test_the_prompt_is_left_out_on_demand():
    (whole,), (tensors,) = responses_of(), responses_of(exclude_input_from_output=True)
    assert shapes(tensors) == with_dummies(6)
    assert tensors["sequence_length"].tolist() == [[6]]
    assert tensors["output_ids"][0, 0].tolist() == whole["output_ids"][0, 0, 5:].tolist()


@pytest.mark.parametrize("excludes", [False, True])
def test_a_stream_has_new_tokens_only(excludes):
    (whole,) = responses_of()
    pieces = responses_of(streaming=True, exclude_input_from_output=excludes)
    assert [shapes(tensors) for tensors in pieces] == [with_dummies(1)] * 6
    assert [tensors["output_ids"].item() for tensors in pieces] == whole["output_ids"][0, 0, 5:].tolist()
    assert all(tensors["sequence_length"].tolist() == [[1]] for tensors in pieces)


def test_numbers_come_where_they_are_asked_for():
    (tensors,) = responses_of(**ALL_NUMBERS)
    assert shapes(tensors) == with_numbers(11, context=5, output=6)
    assert tensors["cum_log_probs"][0, 0] == pytest.approx(tensors["output_log_probs"].sum(), rel=1e-5)
    chosen = tensors["generation_logits"][0, 0].argmax(axis=-1)
    assert chosen.tolist() == tensors["output_ids"][0, 0, 5:].tolist()
    # The last position of the prompt says what the first token is chosen by.
    np.testing.assert_allclose(tensors["context_logits"][0, -1], tensors["generation_logits"][0, 0, 0], rtol=1e-4)


@pytest.mark.parametrize(
    ("asked", "real"),
    [
        ("return_log_probs", {"output_log_probs", "cum_log_probs"}),
        ("return_context_logits", {"context_logits"}),
        ("return_generation_logits", {"generation_logits"}),
    ],
)
def test_each_kind_of_number_comes_alone(asked, real):
    (tensors,) = responses_of(**{asked: True})
    expected, dummies = with_numbers(11, context=5, output=6), with_dummies(11)
    assert shapes(tensors) == {**dummies, **{name: expected[name] for name in real}}


def test_a_stream_has_the_numbers_of_its_tokens_and_at_its_end_those_of_the_prompt():
    (whole,), pieces = responses_of(**ALL_NUMBERS), responses_of(streaming=True, **ALL_NUMBERS)
    assert [shapes(tensors) for tensors in pieces[:-1]] == [with_numbers(1, context=0, output=1)] * 5
    assert shapes(pieces[-1]) == with_numbers(1, context=5, output=1)
    for name in ("generation_logits", "output_log_probs"):
        np.testing.assert_allclose(np.concatenate([piece[name] for piece in pieces], axis=2), whole[name], rtol=1e-4)
    np.testing.assert_allclose(pieces[-1]["cum_log_probs"], whole["cum_log_probs"], rtol=1e-5)
    np.testing.assert_allclose(pieces[-1]["context_logits"], whole["context_logits"], rtol=1e-4, atol=1e-5)


def test_shorter_beams_are_filled_up_with_the_pad_id():
    (first,) = responses_of(max_new_tokens=1)
    end_id = int(first["output_ids"][0, 0, -1])
    # Where length counts nothing, the beam that ends at once is the most likely.
    sampling = SamplingParams(length_penalty=0.0)
    fields: dict[str, Any] = {"beam_width": 3, "end_id": end_id, "sampling": sampling, **ALL_NUMBERS}
    (tensors,) = responses_of(max_beam_width=3, pad_id=77, **fields)
    assert shapes(tensors) == with_numbers(11, context=5, output=6, beams=3)
    assert tensors["sequence_length"].tolist() == [[6, 11, 11]]
    assert tensors["output_ids"][0, 0].tolist() == [*PROMPT, end_id, 77, 77, 77, 77, 77]
    assert not (tensors["output_ids"][0, 1:] == 77).any()
    assert not tensors["output_log_probs"][0, 0, 1:].any()
    assert not tensors["generation_logits"][0, 0, 1:].any()
    np.testing.assert_allclose(tensors["output_log_probs"].sum(axis=2), tensors["cum_log_probs"], rtol=1e-4)

    (without_prompt,) = responses_of(max_beam_width=3, exclude_input_from_output=True, **fields)
    assert shapes(without_prompt) == with_numbers(6, context=5, output=6, beams=3)
    # The pad id is the end id where nothing else is said.
    assert without_prompt["output_ids"][0, 0].tolist() == [end_id] * 6


def test_a_narrower_request_has_its_own_number_of_beams():
    (tensors,) = responses_of(max_beam_width=3, beam_width=2)
    assert shapes(tensors) == with_dummies(11, beams=2)


def test_an_error_has_no_tensors():
    client = Client([request(input_ids=[]), request(request_id=2, input_ids=[0.5])])
    tiny_manager_of(client, start=False).close()
    assert [answer.responses for answer in client.answers] == [[{}], [{}]]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_stopped_request_has_what_there_is(streaming):
    responses = responses_of(stop_after=3, streaming=streaming, **ALL_NUMBERS)
    if streaming:
        assert [tensors["sequence_length"].item() for tensors in responses] == [1, 1, 1, 0]
        assert shapes(responses[-1]) == with_numbers(0, context=5, output=0)
    else:
        (tensors,) = responses
        assert shapes(tensors) == with_numbers(8, context=5, output=3)


def test_stopped_beams_are_those_that_run():
    (tensors,) = responses_of(stop_after=3, max_beam_width=2, beam_width=2, **ALL_NUMBERS)
    assert shapes(tensors) == with_numbers(8, context=5, output=3, beams=2)


@pytest.mark.parametrize("asked", [{}, ALL_NUMBERS])
def test_a_request_stopped_before_it_ran_has_its_prompt_and_empty_numbers(asked):
    client = Client([request(), request(request_id=2, **asked)])
    client.stops.append(2)
    manager = tiny_manager_of(client, start=False, max_batch_size=1)
    manager.step()
    (tensors,) = client.answer(2).responses
    expected = with_dummies(5)
    if asked:
        expected |= {"output_log_probs": (1, 1, 0), "cum_log_probs": (1, 1)}
    assert shapes(tensors) == expected
    assert tensors["output_ids"].tolist() == [[PROMPT]]
    manager.close()


@pytest.mark.parametrize(
    "ending",
    [{"end_id": 2}, {"stop_ids": [7, 2]}, {"stop_sequences": [[9], [1, 2]]}, {"end_id": 3, "stop_ids": (2,)}],
)
def test_what_ends_a_request_is_part_of_its_output(ending):
    client = Client([request(max_new_tokens=20, exclude_input_from_output=True, **ending)])
    manager_of(client, CountingExecutor(), start=False).close()
    assert client.answers[0].tokens == [0, 1, 2]


@pytest.mark.parametrize("nothing", [{"end_id": -1}, {"end_id": None}, {"stop_ids": (-1,)}, {"stop_sequences": ()}])
def test_minus_one_ends_nothing(nothing):
    client = Client([request(**nothing)])
    manager_of(client, CountingExecutor(), start=False).close()
    assert client.answers[0].tokens == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "prompt",
    [tuple(PROMPT), np.array(PROMPT, np.int64), np.array(PROMPT, np.uint8), np.array([PROMPT]), [PROMPT], range(5, 10)],
)
def test_a_prompt_may_come_as_any_row_of_integers(prompt):
    (tensors,) = responses_of(input_ids=prompt)
    assert tensors["output_ids"][0, 0, :5].tolist() == PROMPT


def test_output_beyond_max_seq_len_is_clamped():
    (tensors,) = responses_of(max_new_tokens=10**9)
    assert shapes(tensors) == with_dummies(40)


@pytest.mark.parametrize("numbers", [{}, ALL_NUMBERS])
def test_a_stream_of_beams_replaces_them_as_a_whole(numbers):
    """Each response is that of a request which ends there, and the last one that of a request without a stream."""
    sampling = SamplingParams(temperature=0.7, repetition_penalty=1.2, presence_penalty=0.3)
    fields: dict[str, Any] = {"max_beam_width": 3, "beam_width": 3, "sampling": sampling, **numbers}
    pieces = responses_of(streaming=True, **fields)
    assert len(pieces) == 6
    for length, piece in enumerate(pieces, 1):
        assert piece.pop("replaces_output").tolist() == [True]
        expected = with_numbers(length, 0, length, 3) if numbers else with_dummies(length, 3)
        (shorter,) = responses_of(stop_after=length, exclude_input_from_output=True, **fields)
        if length < 6:
            assert shapes(piece) == expected
        for name in (name for name in piece if name != "context_logits"):
            np.testing.assert_allclose(piece[name], shorter[name], rtol=1e-4)
    (whole,) = responses_of(exclude_input_from_output=True, **fields)
    for name, value in pieces[-1].items():
        np.testing.assert_allclose(value, whole[name], rtol=1e-4, atol=1e-5)
