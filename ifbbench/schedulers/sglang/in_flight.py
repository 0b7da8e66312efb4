"""What SGLang's scheduler has submitted and not collected yet."""

from ifbbench.engine.arrays import Rows
from ifbbench.engine.plan import ContextChunk
from ifbbench.schedulers.queueing import Submitted


class Scheduled(Submitted):
    """A batch in flight, or several equal decode batches.

    chunks: chunks of prompts.
    """

    def __init__(self, chunks: tuple[ContextChunk, ...], outputs: Rows, times: int = 1, is_joint: bool = False) -> None:
        super().__init__(outputs, times, is_joint)
        self.chunks = chunks

    def drop(self, row: int) -> None:
        """The request in `row` has ended or was retracted: its outputs are ignored."""
        self.chunks = tuple([chunk for chunk in self.chunks if chunk.request.slot != row])
        if row in self.outputs.tolist():
            self.outputs = self.outputs[self.outputs != row]
