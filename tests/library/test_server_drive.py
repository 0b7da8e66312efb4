"""200 requests from client threads, good and bad, streamed and stopped, while the manager's thread runs."""

import json
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY
from tests.library.client import PATIENCE_S, Client
from tests.library.drive import (
    BAD_WITH_A_MODEL,
    MANY_PAUSES,
    NUM_CLIENTS,
    REQUESTS_PER_CLIENT,
    Server,
    good_request,
    outputs_of_tiny,
)
from tests.library.managers import check_nothing_leaked, manager_of, output_of, tiny_manager_of

pytestmark = pytest.mark.usefixtures("small_model")

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
        ("InflightBatching", MANY_PAUSES),
        ("InflightFusedBatching", MANY_PAUSES),
        ("InflightFusedBatching", {}),
        ("InflightFusedBatching", {**MANY_PAUSES, "enable_trt_overlap": True}),
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
    with tiny_manager_of(client, **MANY_PAUSES, **options) as manager:
        server.run()
    server.check(outputs_of_tiny())
    check_nothing_leaked(manager)
    assert sum(statistics["Paused Requests"] for statistics in client.statistics) > 0


@pytest.mark.slow
def test_the_process_of_a_drive_ends():
    result = run_python("-m", "tests.library.drive")
    assert result.returncode == 0, result.stderr
    counts = json.loads(result.stdout)
    assert (counts["requests"], counts["finals"]) == (NUM_REQUESTS, NUM_REQUESTS)
    assert counts["pauses"] > 0


@pytest.mark.parametrize("maker", ["manager_of(client)", "tiny_manager_of(client)"])
def test_a_process_that_forgets_to_close_its_manager_ends_all_the_same(maker):
    result = run_python(
        "-c",
        f"""
from tests.library.client import Client
from tests.library.managers import manager_of, request_of, tiny_manager_of
client = Client([request_of(1), request_of(2, max_new_tokens=30)])
manager = {maker}
print(client.answer(1).wait().finals)
""",
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "1\n", "")


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
