"""The passes of an iteration: the batches that its plan becomes, the executor that makes no tokens of them, and the
requests that end with their outputs."""

from collections.abc import Sequence

import numpy as np
from mypy_extensions import mypyc_attr

from ifbbench.engine.arrays import NO_ROWS, Rows
from ifbbench.engine.batch import NO_OUTPUTS, Batch, BatchLayout, BeamInputs, StepInputs, StepOutputs
from ifbbench.engine.beam_search import BeamSearch
from ifbbench.engine.confirm_special import confirm_context, confirm_drafted, confirm_special
from ifbbench.engine.drafts import DraftVerifier
from ifbbench.engine.plan import ContextChunk, Plan
from ifbbench.engine.records import InFlightIteration
from ifbbench.engine.request import Request, RequestTable


class BatchBuilder:
    """Packs the decision for an iteration into the passes of an executor."""

    def __init__(self, table: RequestTable, layout: BatchLayout) -> None:
        self._table, self._layout = table, layout
        # The latest rows, and the same as slots of a batch.
        self._rows, self._slots = NO_ROWS, NO_ROWS.astype(np.int32)

    def build(self, iteration: int, plan: Plan, inputs: StepInputs) -> tuple[Batch, ...]:
        """The passes that run the chunks and one step of the generation requests of `plan`: one, or one for each phase.
        Idle rows overwrite their last position, and have no pass for them alone."""
        chunks, rows, adapters, drafts = plan.chunks, plan.rows, inputs.adapters, inputs.drafts
        if not chunks and not len(rows):
            return ()
        if len(plan.idle):
            rows = np.concatenate([rows, plan.idle])
        if not (chunks and len(rows) and self._layout.has_separate_passes):
            return (self._pass(iteration, chunks, rows, inputs),)
        num_last_chunks = sum([chunk.is_last for chunk in chunks])
        drafts_of_context, drafts_of_generation = (None, None) if drafts is None else drafts.split(num_last_chunks)
        of_context = adapters and adapters._replace(tasks=NO_ROWS)
        of_generation = adapters and adapters._replace(loads=())
        context = StepInputs(NO_ROWS, inputs.copies, of_context, drafts_of_context, inputs.loaded_tokens)
        generation = StepInputs(inputs.positions, (), of_generation, drafts_of_generation)
        return (
            self._pass(iteration, chunks, NO_ROWS, context),
            self._pass(iteration, (), rows, generation),
        )

    def _pass(self, iteration: int, chunks: tuple[ContextChunk, ...], rows: Rows, inputs: StepInputs) -> Batch:
        layout, requests_of = self._layout, self._table.requests
        if rows is not self._rows:  # a plan that repeats has the same rows again
            self._rows, self._slots = rows, rows.astype(np.int32)
        tables, width, beams, num_candidates = layout.block_tables[0], 1, None, 0
        if tables.shape[1] > 1:
            requests = [requests_of[row] for row in rows.tolist()]
            width = (requests[0] if requests else chunks[0].request).beam_width
            beams = self._beams(requests) if width > 1 else None
            num_candidates = max(
                BeamSearch.num_candidates(request.beam_width, request.stop) for request in requests_of.values()
            )
        return Batch(
            iteration,
            chunks,
            self._slots,
            inputs.positions.astype(np.int32),
            tables,
            width,
            beams,
            num_candidates,
            layout.is_padded,
            inputs.copies,
            layout.block_tables[1:],
            iteration % layout.num_micro_batches,
            inputs.adapters,
            inputs.drafts,
            inputs.loaded_tokens,
        )

    def _beams(self, requests: list[Request]) -> BeamInputs | None:
        """Decisions of the searches of `requests`; None without any, as with executors that return no tokens."""
        searches = [request.search for request in requests if request.search is not None]
        if not searches:
            return None
        size = self._layout.tokens_per_block
        return BeamInputs(
            tokens=np.stack([search.tokens for search in searches]),
            parents=np.stack([search.parents for search in searches]),
            scores=np.stack([search.scores for search in searches]),
            # The prompt's last block may be private to each beam even if it is full.
            private_from=np.array([max(request.prompt_len - size, 0) for request in requests], np.int32),
        )


@mypyc_attr(allow_interpreted_subclasses=True)
class NullExecutor:
    """The Executor of the null device makes no tokens: those of requests stay symbolic."""

    def submit(self, batch: Batch) -> None:
        pass

    def collect(self) -> StepOutputs:
        return NO_OUTPUTS

    def close(self) -> None:
        pass


def confirm(
    iteration: InFlightIteration,
    outputs: Sequence[StepOutputs],
    table: RequestTable,
    drafts: DraftVerifier | None = None,
) -> list[Request]:
    """Store the outputs of each pass of `iteration`; returns the requests that are complete, in batch order. drafts:
    None of a scheduler without draft tokens."""
    if outputs:
        table.makes_tokens = outputs[-1].tokens is not None or outputs[-1].candidates is not None
    rows, done = iteration.output_rows, list[Request]()
    for batch, of_pass in zip(iteration.batches, outputs, strict=True):
        count = len(rows) if len(outputs) == 1 else batch.num_outputs
        if batch.drafts is None or drafts is None:
            done += _confirm_pass(iteration, rows[:count], of_pass, table)
        else:
            done += confirm_drafted(iteration, rows[:count], batch.drafts, of_pass, table, drafts)
        rows = rows[count:]
    return done


def _confirm_pass(iteration: InFlightIteration, rows: Rows, outputs: StepOutputs, table: RequestTable) -> list[Request]:
    indices = None
    if iteration.dropped:
        indices = np.flatnonzero(~np.isin(rows, list(iteration.dropped)))
        rows = rows[indices]
    confirmed = table.confirmed[rows] + 1
    table.confirmed[rows] = confirmed
    done = confirmed == table.stop_after[rows]
    if outputs.tokens is not None:
        tokens = outputs.tokens if indices is None else outputs.tokens[indices]
        table.write_outputs(rows, table.joined[rows] + confirmed - 1, tokens)
        if table.any_end_tokens:
            done |= (tokens[:, None] == table.end_tokens[rows]).any(axis=1)
    if table.num_special and outputs is not NO_OUTPUTS:
        confirm_context(iteration, outputs)
        confirm_special(rows, np.arange(len(rows)) if indices is None else indices, done, outputs, table)
    return [table.requests[row] for row in rows[done].tolist()]
