"""A server's drive: client threads submit good and bad requests, stop some, and use ids again.

`python -m tests.library.drive` runs one with the built-in model and prints what came of it.
"""

import json
import math
import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ifbbench import InferenceRequest, SamplingParams
from tests.library.client import PATIENCE_S, Answer, Client
from tests.library.managers import check_nothing_leaked, request_of, tiny_manager_of

NUM_CLIENTS = 4
REQUESTS_PER_CLIENT = 50
MANY_PAUSES: dict[str, Any] = {
    "policy": "max_utilization",
    "enable_chunked_context": True,
    "max_batch_size": 8,
    "kv_cache_config": {"max_tokens": 64},
}

# What each bad request has wrong, and words of the error.
BAD: Mapping[str, tuple[dict[str, Any], str]] = {
    "empty prompt": ({"input_ids": []}, "prompt of 0 tokens"),
    "prompt too long": ({"input_ids": [1] * 50}, "prompt of 50 tokens"),
    "beam wider than allowed": ({"beam_width": 2}, "beam width 2"),
    "no beam": ({"beam_width": 0}, "beam width 0"),
    "NaN temperature": ({"sampling": SamplingParams(temperature=math.nan)}, "temperature is nan"),
    "float tokens": ({"input_ids": [1.0, 2.5]}, "input_ids: expected integers"),
    "negative id": ({"request_id": -1}, "request_id is -1; expected an integer from 0"),
    "id beyond 64 bits": ({"request_id": 2**64}, f"request_id is {2**64}; expected an integer from 0"),
    "empty stop sequence": ({"stop_sequences": [[3], []]}, "stop_sequences: one is empty"),
    "no new tokens": ({"max_new_tokens": 0}, "0 new tokens"),
}
BAD_WITH_A_MODEL: Mapping[str, tuple[dict[str, Any], str]] = {
    **BAD,
    "token out of the vocabulary": ({"input_ids": [1, 4096]}, "token id 4096 is not in the vocabulary"),
    "negative token": ({"input_ids": [-1]}, "token id -1 is not in the vocabulary"),
}


@dataclass
class Submitted:
    """A request's answer to be, and the words that its error must have: "" for none. `is_again`: its id may be in use
    when it comes, and then that is its error."""

    answer: Answer
    error: str = ""
    is_again: bool = False


def good_request(request_id: int, **fields: Any) -> InferenceRequest:
    """The lengths follow from the id, so that one used again asks for the same."""
    return request_of(request_id, prompt_len=1 + request_id * 13 % 20, max_new_tokens=1 + request_id * 7 % 12, **fields)


def may_be_stopped(request_id: int) -> bool:
    return request_id % 7 == 0


class Server:
    """Client threads over one client; `submitted` is what they sent."""

    def __init__(self, client: Client, bad: Mapping[str, tuple[dict[str, Any], str]] = BAD) -> None:
        self.submitted: list[Submitted] = []
        self._client = client
        self._bad = bad
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(NUM_CLIENTS)]

    def run(self) -> None:
        """Submit all requests, and wait until every one is answered."""
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        for submitted in self.submitted:
            submitted.answer.wait()

    def check(self, outputs: Mapping[int, list[int]]) -> None:
        """One final response each, errors where expected, and the output of `outputs`, or its start where stopped."""
        assert len(self.submitted) == NUM_CLIENTS * REQUESTS_PER_CLIENT
        for submitted in self.submitted:
            answer, request = submitted.answer, submitted.answer.request
            assert answer.finals == 1
            if submitted.error:
                assert submitted.error in answer.error
                assert answer.responses == [{}]
                continue
            if submitted.is_again and answer.error:
                assert answer.error == f"request id {request.request_id} is in use"
                continue
            assert answer.error == ""
            expected = outputs[request.request_id]
            if may_be_stopped(request.request_id):
                expected = expected[: len(answer.tokens)]
            assert answer.tokens == expected
            if not request.streaming:
                assert len(answer.responses) == 1
            assert all(tensors["sequence_length"][0, 0] > 0 for tensors in answer.responses[:-1])

    def _work(self, number: int) -> None:
        choose = random.Random(number)
        bad = list(self._bad.values())
        first_id = number * REQUESTS_PER_CLIENT
        last: Answer | None = None
        for count in range(REQUESTS_PER_CLIENT):
            request_id = first_id + count
            if count % 4 == 3:
                changes, error = bad[(count // 4 + number) % len(bad)]
                self._submit(replace(good_request(request_id), **changes), error)
            elif count % 10 == 8 and last is not None:
                last.wait()
                self._submit(replace(last.request, streaming=not last.request.streaming))
            elif count % 10 == 5 and last is not None:
                self._submit(last.request, is_again=True)
            else:
                last = self._submit(good_request(request_id, streaming=choose.random() < 0.5))
                if may_be_stopped(request_id):
                    self._client.stops.append(request_id)

    def _submit(self, request: InferenceRequest, error: str = "", is_again: bool = False) -> Answer:
        answer = self._client.submit(request)
        self.submitted.append(Submitted(answer, error, is_again))
        return answer


def outputs_of_tiny() -> dict[int, list[int]]:
    """What the built-in model says to every request of a drive, unstreamed, without pauses, chunks or a thread."""
    client = Client(good_request(request_id) for request_id in range(NUM_CLIENTS * REQUESTS_PER_CLIENT))
    manager = tiny_manager_of(
        client, start=False, max_batch_size=16, max_num_tokens=1024, max_tokens=4096, kv_cache_config={}
    )
    manager.close()
    return {answer.request.request_id: answer.tokens for answer in client.answers}


def main() -> None:
    client = Client()
    server = Server(client, BAD_WITH_A_MODEL)
    with tiny_manager_of(client, **MANY_PAUSES) as manager:
        server.run()
    server.check(outputs_of_tiny())
    check_nothing_leaked(manager)
    pauses = sum(statistics["Paused Requests"] for statistics in client.statistics)
    finals = sum(answer.finals for answer in client.answers)
    print(json.dumps({"requests": len(server.submitted), "finals": finals, "pauses": pauses}))


if __name__ == "__main__":
    main()
