"""Requests that are refused, each with an error that names what is wrong, and ids used twice."""

from typing import Any

import numpy as np
import pytest

from ifbbench import InferenceRequest, SamplingParams
from ifbbench.errors import InputError
from tests.library.client import Client
from tests.library.drive import BAD_WITH_A_MODEL
from tests.library.managers import check_nothing_leaked, manager_of, output_of, request_of, tiny_manager_of

pytestmark = pytest.mark.usefixtures("small_model")

FIELDS: dict[str, Any] = {"request_id": 5, "input_ids": [1, 2], "max_new_tokens": 3}


@pytest.mark.parametrize("name", BAD_WITH_A_MODEL)
def test_the_error_of_a_bad_request_names_what_is_wrong(name):
    changes, words = BAD_WITH_A_MODEL[name]
    client = Client([request_of(1), InferenceRequest(**{**FIELDS, **changes}), request_of(2)])
    with tiny_manager_of(client):
        pass
    good, bad, other = client.answers
    assert (good.error, other.error) == ("", "")
    assert words in bad.error
    assert [answer.finals for answer in client.answers] == [1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_ids": "text"}, "input_ids"),
        ({"input_ids": None}, "input_ids"),
        ({"input_ids": [[1, 2], [3]]}, "input_ids"),
        ({"input_ids": [[1, 2], [3, 4]]}, "input_ids"),
        ({"input_ids": [True, False]}, "input_ids"),
        ({"request_id": "5"}, "request_id"),
        ({"request_id": True}, "request_id"),
        ({"max_new_tokens": 2.0}, "max_new_tokens"),
        ({"max_new_tokens": None}, "max_new_tokens"),
        ({"end_id": 2**70}, "end_id"),
        ({"end_id": "eos"}, "end_id"),
        ({"pad_id": 2**40}, "pad_id"),
        ({"stop_ids": [1.5]}, "stop_ids"),
        ({"stop_sequences": 5}, "stop_sequences"),
        ({"stop_sequences": [5, 6]}, "stop_sequences"),
        ({"priority": "high"}, "priority"),
        ({"priority": float("nan")}, "priority"),
        ({"priority": 10**400}, "priority"),
        ({"lora_task_id": "french"}, "lora_task_id"),
        ({"beam_width": 1.0}, "beam_width"),
        ({"sampling": None}, "sampling"),
    ],
)
def test_a_request_that_cannot_be_read_gets_an_error_of_its_own(changes, words):
    client = Client([request_of(11), InferenceRequest(**{**FIELDS, **changes}), request_of(12)])
    with manager_of(client):
        pass
    assert [answer.finals for answer in client.answers] == [1, 1, 1]
    assert words in client.answers[1].error
    assert [client.answers[index].error for index in (0, 2)] == ["", ""]


def test_the_error_of_an_id_in_use_leaves_the_request_that_has_it_alone():
    first, again = request_of(3, max_new_tokens=6), request_of(3, max_new_tokens=2)
    client = Client([first, again, again])
    with manager_of(client) as manager:
        client.answers[0].wait()
        later = client.submit(again)
    assert [answer.error for answer in client.answers] == ["", "request id 3 is in use", "request id 3 is in use", ""]
    assert client.answers[0].tokens == output_of(3, 5, 6)
    assert later.tokens == output_of(3, 5, 2)
    check_nothing_leaked(manager)


def test_the_largest_id_is_one_like_any_other():
    client = Client([request_of(2**64 - 1), request_of(0)])
    with manager_of(client):
        pass
    assert [answer.tokens for answer in client.answers] == [output_of(2**64 - 1, 5, 4), output_of(0, 5, 4)]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": "hot"},
        {"temperature": None},
        {"temperature": -1},
        {"top_k": 1.5},
        {"top_k": -1},
        {"top_p": [1]},
        {"top_p": 0},
        {"seed": "one"},
        {"early_stopping": "soon"},
        {"length_penalty": None},
        {"repetition_penalty": True},
        {"repetition_penalty": 0.0},
    ],
)
def test_sampling_parameters_that_make_no_sense_are_refused_by_name(sampling):
    client = Client([request_of(1, sampling=SamplingParams(**sampling)), request_of(2)])
    with manager_of(client):
        pass
    (name,) = sampling
    assert name in client.answers[0].error
    assert client.answers[1].error == ""


@pytest.mark.parametrize("sampling", [{"top_k": 2**70}, {"seed": -(2**70)}, {"seed": 2**64}, {"temperature": 10**6}])
def test_sampling_parameters_may_be_large(sampling):
    client = Client([request_of(1, sampling=SamplingParams(**{"temperature": 0.5, **sampling}))])
    with tiny_manager_of(client):
        pass
    assert (client.answers[0].error, len(client.answers[0].tokens)) == ("", 4)


def test_early_stopping_may_be_given_by_its_name():
    answers = []
    for early_stopping in ("always", "never"):
        given: dict[str, Any] = {"early_stopping": early_stopping, "length_penalty": 2.0}
        sampling = SamplingParams(**given)
        end_ids = range(0, 4096, 7)
        client = Client([request_of(1, max_new_tokens=12, beam_width=2, stop_ids=end_ids, sampling=sampling)])
        with tiny_manager_of(client, max_beam_width=2):
            pass
        answers.append(client.answers[0])
    assert [answer.error for answer in answers] == ["", ""]
    always, never = (answer.responses[0]["sequence_length"].max() for answer in answers)
    assert always < never


def test_a_stream_that_a_pause_could_cut_is_refused():
    client = Client([request_of(1, max_new_tokens=30, streaming=True), request_of(2, max_new_tokens=30)])
    with manager_of(client, policy="max_utilization"):
        pass
    assert "streaming up to 34 tokens" in client.answers[0].error
    assert client.answers[1].tokens == output_of(2, 5, 30)


@pytest.mark.parametrize("value", ["yes", "true", "False", 1, None, [True]])
@pytest.mark.parametrize(
    "name",
    ["streaming", "return_log_probs", "return_context_logits", "return_generation_logits", "exclude_input_from_output"],
)
def test_a_flag_that_is_none_is_refused_when_the_request_is_made(name, value):
    with pytest.raises(InputError, match=f"{name} is .*; expected true or false"):
        InferenceRequest(**{**FIELDS, name: value})


def test_a_flag_of_numpy_is_one():
    request = InferenceRequest(1, [1], 1, streaming=np.bool_(True))  # type: ignore[arg-type]
    assert request.streaming is True
