"""200 requests from client threads, good and bad, streamed and stopped, while the manager's thread runs."""

import json
import subprocess
import sys

import pytest

from ifbbench import InferenceRequest
from tests.api.client import PATIENCE_S, Client
from tests.api.drive import (
    BAD_WITH_A_MODEL,
    MOST_PAUSES,
    NUM_CLIENTS,
    REQUESTS_PER_CLIENT,
    Server,
    good_request,
    outputs_of_tiny,
)
from tests.api.managers import check_nothing_leaked, manager_of, output_of, request_of, tiny_manager_of
from tests.conftest import REPOSITORY

NUM_REQUESTS = NUM_CLIENTS * REQUESTS_PER_CLIENT


def known_outputs() -> dict[int, list[int]]:
    outputs = {}
    for request_id in range(NUM_REQUESTS):
        request = good_request(request_id)
        outputs[request_id] = output_of(request_id, len(request.input_ids), request.max_new_tokens)
    return outputs


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("V1", {}),
        ("InflightBatching", MOST_PAUSES),
        ("InflightFusedBatching", MOST_PAUSES),
        ("InflightFusedBatching", {}),
        ("InflightFusedBatching", {**MOST_PAUSES, "enable_trt_overlap": True}),
        ("InflightBatching", {"enable_trt_overlap": True}),
    ],
)
def test_every_request_of_a_drive_gets_its_one_final_response(model_type, options):
    client = Client()
    server = Server(client)
    with manager_of(client, model_type=model_type, **options) as manager:
        server.run()
    server.check(known_outputs())
    check_nothing_leaked(manager)
    assert not manager.is_running
    if "policy" in options:
        assert sum(statistics["Paused Requests"] for statistics in client.statistics) > 0


@pytest.mark.parametrize("options", [{}, {"enable_trt_overlap": True}])
def test_a_drive_of_the_built_in_model_streams_the_tokens_that_it_gives_unstreamed(options):
    client = Client()
    server = Server(client, BAD_WITH_A_MODEL)
    with tiny_manager_of(client, **MOST_PAUSES, **options) as manager:
        server.run()
    server.check(outputs_of_tiny())
    check_nothing_leaked(manager)
    assert sum(statistics["Paused Requests"] for statistics in client.statistics) > 0


def test_the_process_of_a_drive_ends():
    result = run_python("-m", "tests.api.drive")
    assert result.returncode == 0, result.stderr
    counts = json.loads(result.stdout)
    assert (counts["requests"], counts["finals"]) == (NUM_REQUESTS, NUM_REQUESTS)
    assert counts["pauses"] > 0


@pytest.mark.parametrize("maker", ["manager_of(client)", "tiny_manager_of(client)"])
def test_a_process_that_forgets_to_close_its_manager_ends_all_the_same(maker):
    result = run_python("-c", f"""
from tests.api.client import Client
from tests.api.managers import manager_of, request_of, tiny_manager_of
client = Client([request_of(1), request_of(2, max_new_tokens=30)])
manager = {maker}
print(client.answer(1).wait().finals)
""")
    assert (result.returncode, result.stdout, result.stderr) == (0, "1\n", "")


@pytest.mark.parametrize("name", BAD_WITH_A_MODEL)
def test_the_error_of_a_bad_request_names_what_is_wrong(name):
    changes, words = BAD_WITH_A_MODEL[name]
    fields = {"request_id": 5, "input_ids": [1, 2], "max_new_tokens": 3, **changes}
    client = Client([request_of(1), InferenceRequest(**fields), request_of(2)])
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
    client = Client([request_of(11), InferenceRequest(**{**fields_of(5), **changes}), request_of(12)])
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


def fields_of(request_id: int) -> dict:
    return {"request_id": request_id, "input_ids": [1, 2], "max_new_tokens": 3}


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


