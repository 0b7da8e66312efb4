"""A client as a server has one: its threads submit, the manager's callbacks take and answer. It notes everything."""

import json
import threading
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ifbbench import InferenceRequest
from ifbbench.serving.library.client import Tensors

# Long enough for a busy machine; what waits so long hangs.
PATIENCE_S = 300.0


@dataclass(eq=False)
class Answer:
    """All that came back for one request object."""

    request: InferenceRequest
    responses: list[Tensors] = field(default_factory=list)
    finals: int = 0
    error: str = ""
    is_done: threading.Event = field(default_factory=threading.Event)

    @property
    def tokens(self) -> list[int]:
        """The best beam's output, all pieces of a stream together, without the prompt."""
        tokens: list[int] = []
        for tensors in self.responses:
            if tensors:
                tokens += tensors["output_ids"][0, 0, : tensors["sequence_length"][0, 0]].tolist()
        excludes_prompt = self.request.streaming or self.request.exclude_input_from_output
        return tokens if excludes_prompt or self.error else tokens[len(self.request.input_ids) :]

    def wait(self) -> "Answer":
        """Wait for the final response."""
        assert self.is_done.wait(PATIENCE_S), f"request {self.request.request_id} gets no final response"
        return self


class Client:
    """The four callbacks over a queue. `events` has the callbacks' names in the order of their calls, `threads` the
    threads that they were called from, `asked` what get_inference_requests was asked for."""

    def __init__(self, requests: Iterable[InferenceRequest] = ()) -> None:
        self.answers: list[Answer] = []
        self.events: list[str] = []
        self.threads: set[int] = set()
        self.asked: list[int] = []
        self.statistics: list[dict[str, Any]] = []
        self.stops: deque[int] = deque()
        self._lock = threading.Lock()
        self._queue: deque[Answer] = deque()
        self._outstanding: dict[Any, list[Answer]] = {}
        for request in requests:
            self.submit(request)

    @property
    def callbacks(self) -> dict[str, Any]:
        """As the manager's arguments."""
        return {
            "get_inference_requests": self.get_inference_requests,
            "send_response": self.send_response,
            "poll_stop_signals": self.poll_stop_signals,
            "return_batch_manager_stats": self.return_batch_manager_stats,
        }

    @property
    def queued(self) -> int:
        return len(self._queue)

    def submit(self, request: InferenceRequest) -> Answer:
        """Queue a request; may be called from any thread."""
        answer = Answer(request)
        with self._lock:
            self.answers.append(answer)
            self._queue.append(answer)
        return answer

    def answer(self, request_id: int) -> Answer:
        """The first answer to this id."""
        return next(answer for answer in self.answers if answer.request.request_id == request_id)

    def get_inference_requests(self, max_requests: int) -> list[InferenceRequest]:
        self._note("get")
        self.asked.append(max_requests)
        taken: list[InferenceRequest] = []
        with self._lock:
            while self._queue and (max_requests < 0 or len(taken) < max_requests):
                answer = self._queue.popleft()
                self._outstanding.setdefault(_key(answer.request.request_id), []).append(answer)
                taken.append(answer.request)
        return taken

    def send_response(self, request_id: int, tensors: Tensors, is_final: bool, error: str) -> None:
        self._note("send")
        assert is_final or not error, "an error must be final"
        outstanding = self._outstanding[_key(request_id)]
        # Where an id is in use, it is the first one's, and the error is for one that came later.
        answer = outstanding[1 if "is in use" in error else 0]
        answer.responses.append(tensors)
        if is_final:
            outstanding.remove(answer)
            answer.finals += 1
            answer.error = error
            answer.is_done.set()

    def poll_stop_signals(self) -> list[int]:
        self._note("poll")
        return [self.stops.popleft() for _ in range(len(self.stops))]

    def return_batch_manager_stats(self, text: str) -> None:
        self._note("stats")
        self.statistics.append(json.loads(text))

    def _note(self, event: str) -> None:
        self.events.append(event)
        self.threads.add(threading.get_ident())


def _key(request_id: Any) -> Any:
    """What stands for an id in a dictionary: a hostile one may be a list or an array."""
    return request_id if isinstance(request_id, Hashable) else repr(request_id)
