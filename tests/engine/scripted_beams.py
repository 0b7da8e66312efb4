"""An executor for beam search over a made-up language, with a KV memory that it checks as it goes."""

import zlib
from collections import deque
from functools import cache

import numpy as np

from ifbbench.engine.batch import Batch, BeamCandidates, BeamInputs, StepOutputs
from ifbbench.engine.beam_search import DEAD_BELOW, BeamSearch
from ifbbench.engine.request import Request

VOCAB = 3
WORTHLESS = -1e9

Path = tuple[int, ...]
Cached = tuple[int, int | Path]


@cache
def log_probs(request_id: int, path: Path) -> tuple[float, ...]:
    """Of each token after `path`: arbitrary, but always the same."""
    seed = zlib.crc32(repr((request_id, path)).encode())
    logits = np.random.default_rng(seed).normal(scale=1.5, size=VOCAB)
    return tuple((logits - np.log(np.exp(logits).sum())).tolist())


def score(request_id: int, path: Path) -> float:
    """Log-probability of a whole output."""
    return sum(log_probs(request_id, path[:place])[token] for place, token in enumerate(path))


def candidates_of(request_id: int, beams: list[tuple[Path, float]], count: int) -> list[tuple[float, int, int]]:
    """The best `count` continuations as (score, beam, token), filled up with worthless ones."""
    found = [
        (before + log_prob, beam, token)
        for beam, (path, before) in enumerate(beams)
        for token, log_prob in enumerate(log_probs(request_id, path))
    ]
    found.sort(key=lambda candidate: (-candidate[0], *candidate[1:]))
    return [*found[:count], *[(WORTHLESS, 0, 0)] * (count - len(found))]


def as_candidates(outputs: list[list[tuple[float, int, int]]], count: int) -> BeamCandidates:
    table = np.array(outputs, np.float64).reshape(len(outputs), count, 3)
    return BeamCandidates(
        table[..., 2].astype(np.int32), table[..., 1].astype(np.int32), table[..., 0].astype(np.float32)
    )


def searched_alone(request: Request) -> list[Path]:
    """What beam search gives for `request` without an engine: no batch, no blocks."""
    search = BeamSearch(request.beam_width, request.sampling, request.stop, request.max_new_tokens)
    count = BeamSearch.num_candidates(request.beam_width, request.stop)
    beams: list[tuple[Path, float]] = [((), 0.0)]
    for length in range(1, request.output_len + 1):
        found = as_candidates([candidates_of(request.request_id, beams, count)], count)
        if search.advance(found.tokens[0], found.beams[0], found.scores[0], is_last=length == request.output_len):
            break
        steps = zip(search.parents.tolist(), search.tokens.tolist(), strict=True)
        paths = [beams[parent][0] + (token,) for parent, token in steps]
        beams = list(zip(paths, search.scores.tolist(), strict=True))
    return [tuple(beam.tokens.tolist()) for beam in search.final()]


class ScriptedBeams:
    """Keeps the path of every beam, from the parents and tokens of its inputs alone, and a memory by block and place.

    Before a step each beam takes over its parent's private places, as `BeamInputs` asks; then every place of every beam
    is read back, and must hold the beam's own past. All requests of a batch must have its beam width.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self.widths: list[int] = []
        self.ids: list[list[int]] = []
        self._size = tokens_per_block
        self._owners: dict[int, Request] = {}
        self._paths: dict[int, list[Path]] = {}
        self._newest: dict[int, int] = {}
        self._memory: dict[tuple[int, int], Cached] = {}
        self._answers: deque[StepOutputs] = deque()

    def submit(self, batch: Batch) -> None:
        outputs = []
        for chunk in batch.context:
            request = chunk.request
            self._owners[request.slot] = request
            self._paths[request.slot] = [()]
            for position in range(chunk.start, chunk.start + chunk.length):
                self._memory[self._place(batch, request.slot, 0, position)] = (request.request_id, position)
            if chunk.is_last:
                outputs.append(candidates_of(request.request_id, [((), 0.0)], batch.num_candidates or VOCAB))
        for index, slot in enumerate(batch.slots.tolist()):
            beams = self._step(batch, index, slot)
            outputs.append(candidates_of(self._owners[slot].request_id, beams, batch.num_candidates or VOCAB))
        slots = [chunk.request.slot for chunk in batch.context] + batch.slots.tolist()
        assert {self._owners[slot].beam_width for slot in slots} == {batch.beam_width}
        self.widths.append(batch.beam_width)
        self.ids.append(sorted(self._owners[slot].request_id for slot in slots))
        self._answers.append(self._answer(batch, outputs))

    def collect(self) -> StepOutputs:
        return self._answers.popleft()

    def close(self) -> None:
        self._memory.clear()

    def _answer(self, batch: Batch, outputs: list[list[tuple[float, int, int]]]) -> StepOutputs:
        if batch.beam_width > 1:
            return StepOutputs(candidates=as_candidates(outputs, batch.num_candidates))
        tokens = [found[0][2] for found in outputs]
        slots = [chunk.request.slot for chunk in batch.context if chunk.is_last] + batch.slots.tolist()
        self._newest.update(zip(slots, tokens, strict=True))
        return StepOutputs(np.array(tokens, np.int32))

    def _step(self, batch: Batch, index: int, slot: int) -> list[tuple[Path, float]]:
        """Go one token on with each beam; returns the paths and their scores."""
        request, before, position = self._owners[slot], self._paths[slot], int(batch.positions[index])
        inputs = batch.beams
        if inputs is None:
            assert batch.beam_width == 1
            paths, scores = [before[0] + (self._newest[slot],)], [score(request.request_id, before[0])]
        else:
            parents, tokens = inputs.parents[index].tolist(), inputs.tokens[index].tolist()
            paths = [before[parent] + (token,) for parent, token in zip(parents, tokens, strict=True)]
            scores = inputs.scores[index].tolist()
            for path, given in zip(paths, scores, strict=True):
                assert given < DEAD_BELOW or abs(given - score(request.request_id, path)) < 1e-4
            self._follow_parents(batch, inputs, index, slot, position)
        assert position == request.prompt_len + len(paths[0]) - 1
        self._paths[slot] = paths
        for beam, path in enumerate(paths):
            self._memory[self._place(batch, slot, beam, position)] = (request.request_id, path)
        for beam, path in enumerate(paths):
            past = [*range(request.prompt_len), *(path[: length + 1] for length in range(len(path)))]
            for place, expected in enumerate(past):
                assert self._memory[self._place(batch, slot, beam, place)] == (request.request_id, expected)
        return list(zip(paths, scores, strict=True))

    def _follow_parents(self, batch: Batch, inputs: BeamInputs, index: int, slot: int, position: int) -> None:
        """Give each beam its parent's private places; all are read before any is written."""
        taken = {}
        for beam, parent in enumerate(inputs.parents[index].tolist()):
            for place in range(int(inputs.private_from[index]), position):
                taken[self._place(batch, slot, beam, place)] = self._memory[self._place(batch, slot, parent, place)]
        self._memory.update(taken)

    def _place(self, batch: Batch, slot: int, beam: int, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self._size)
        return int(batch.block_tables[slot, beam, block]), offset
