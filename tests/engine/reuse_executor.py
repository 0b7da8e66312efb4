"""An executor whose tokens and whose KV memory depend on everything before them, as a model's do."""

from collections import deque

import numpy as np

from ifbbench.engine.batch import Batch, BlockCopy, CopyKind, StepOutputs
from ifbbench.engine.request import Request

VOCABULARY = 5
Place = tuple[int, int]


def continued(state: int, token: int) -> int:
    """What a position holds: a number for its token and all before it."""
    return hash((state, token))


def states_of(tokens: list[int]) -> list[int]:
    """What each position of a sequence holds."""
    states, state = [], 0
    for token in tokens:
        state = continued(state, token)
        states.append(state)
    return states


def greedy(prompt: list[int], length: int) -> list[int]:
    """The `length` tokens that follow `prompt`."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(states_of(tokens)[-1] % VOCABULARY)
    return tokens[len(prompt) :]


class ReuseExecutor:
    """Writes into each place what its position stands for, and reads back every place that a step attends to: one that
    was shared by mistake, or not copied, or evicted, holds something else.

    computed: how many positions it has computed.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self.computed = 0
        self.copies: list[BlockCopy] = []
        self._size = tokens_per_block
        self._device: dict[Place, int] = {}
        self._host: dict[Place, int] = {}
        self._owners: dict[int, Request] = {}
        self._tokens: dict[int, list[int]] = {}
        self._answers: deque[list[int]] = deque()

    def submit(self, batch: Batch) -> None:
        for copy in batch.copies:
            self._copy(copy)
        answer: list[int] = []
        for chunk in batch.context:
            slot = chunk.request.slot
            self._owners[slot] = chunk.request
            self._tokens[slot] = chunk.request.tokens_between(0, chunk.start + chunk.length).tolist()
            self._compute(slot, chunk.start, batch)
            if chunk.is_last:
                answer.append(self._next(slot))
        for slot, position in zip(batch.slots.tolist(), batch.positions.tolist(), strict=True):
            # The newest token is in the list already.
            assert len(self._tokens[slot]) == position + 1
            self._compute(slot, position, batch)
            answer.append(self._next(slot))
        self._answers.append(answer)

    def collect(self) -> StepOutputs:
        return StepOutputs(np.array(self._answers.popleft(), np.int32))

    def close(self) -> None:
        self._device.clear()

    def _next(self, slot: int) -> int:
        token = states_of(self._tokens[slot])[-1] % VOCABULARY
        self._tokens[slot].append(token)
        return token

    def _compute(self, slot: int, start: int, batch: Batch) -> None:
        states = states_of(self._tokens[slot])
        table = batch.block_tables[slot, 0]
        for position, state in enumerate(states):
            place = int(table[position // self._size]), position % self._size
            if position >= start:
                self._device[place] = state
                self.computed += 1
            assert self._device.get(place) == state, f"position {position} of slot {slot} holds another's content"

    def _copy(self, copy: BlockCopy) -> None:
        self.copies.append(copy)
        source = self._host if copy.kind is CopyKind.ONBOARD else self._device
        destination = self._host if copy.kind is CopyKind.OFFLOAD else self._device
        for offset in range(copy.num_tokens):
            content = source.get((copy.source, offset))
            destination.pop((copy.destination, offset), None)
            if content is not None:
                destination[copy.destination, offset] = content
