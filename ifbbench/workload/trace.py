"""A trace: the requests of a workload, with when each arrives and how long it is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ifbbench.config import DEFAULT_PRIORITY


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request as recorded or drawn.

    `arrival_s` is in seconds from the start of the trace. `max_new_tokens` is what the client reserves and all that
    schedulers may see; `output_len` is how many tokens the request really makes, known to the stop check alone.
    `prompt_tokens` is None where the trace records only lengths; such prompts are drawn from the seed when needed.
    `prefix_ids` name the blocks that the prompt begins with, in a trace that tells which tokens are equal without
    saying what they are; `prefix_lens` are the tokens of each block, where that is not "all, as far as the prompt
    goes". See `prefix`. `stop_ids` are token ids that end the request, should it make one before `output_len`.
    """

    request_id: int
    arrival_s: float
    prompt_len: int
    max_new_tokens: int
    output_len: int
    prompt_tokens: tuple[int, ...] | None = None
    priority: float = DEFAULT_PRIORITY
    beam_width: int = 1
    lora_task_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    prefix_ids: tuple[int, ...] | None = None
    prefix_lens: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival, and where they come from.

    `requests` need not be there all at once: those of files and specifications are made one by one when asked for.
    `sha256` identifies the source: the bytes of the file, or the canonical text of a synthetic specification.
    """

    name: str
    requests: Sequence[TraceRequest]
    sha256: str
    source: str
    skipped_rows: int = 0

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)
