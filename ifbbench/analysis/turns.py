"""What later turns of sessions found in the KV cache of what the turn before had left there, and what the rest cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from msgspec import Struct
from msgspec.json import Decoder

from ifbbench.analysis.number_texts import count, percent, significant
from ifbbench.analysis.recorded import RecordedRun
from ifbbench.rundir.rows import Id, Number, read_rows
from ifbbench.rundir.run_directory import find_lines
from ifbbench.workload.trace import PREFIX_BLOCK

CONTEXT = "context"


class _Row(Struct, gc=False):
    """What is used of a line of `trace.jsonl`."""

    request_id: Id
    after: Id | None = None


class _Prompt(_Row, gc=False):
    """The same, with what names its tokens."""

    prompt_len: Number = 0
    output_len: Number = 0
    prompt_tokens: list[int] | None = None
    prefix_ids: list[int] | None = None
    prefix_lens: list[int] | None = None

    def cached_runs(self) -> list[tuple[object, int]]:
        """The named tokens that the request leaves in a cache: all but its last one, each run with its length."""
        if self.prompt_tokens is not None:
            return [(token, 1) for token in self.prompt_tokens]
        ids, left = self.prefix_ids or [], self.prompt_len
        lengths = [PREFIX_BLOCK] * len(ids)
        if self.prefix_lens is not None:
            lengths, left = self.prefix_lens, self.prompt_len + self.output_len - 1
        runs = list[tuple[object, int]]()
        for prefix_id, length in zip(ids, lengths, strict=True):
            runs.append((prefix_id, min(length, left)))
            left -= runs[-1][1]
        return runs


@dataclass(frozen=True, slots=True)
class Turn:
    """A later turn that has ended.

    shared_tokens: tokens of its prompt that the turn before left in the cache, in whole blocks.
    lost_tokens: how many of the shared tokens it computed again.
    lost_s: the time that they took, at the rate at which its prompt was computed.
    """

    request_id: Id
    shared_tokens: int
    lost_tokens: int
    lost_s: float


class Turns:
    """All later turns of a run that go on with a turn of its trace, and share tokens with it."""

    def __init__(self, run: RecordedRun) -> None:
        self.turns = list[Turn]()
        path = find_lines(run.data.path, "trace")
        if not run.config.get("enable_kv_cache_reuse") or run.lacks_requests or not path.exists():
            return
        if all(row.after is None for row in chain.from_iterable(read_rows(path, Decoder(_Row)))):
            return
        prompts = {row.request_id: row for row in chain.from_iterable(read_rows(path, Decoder(_Prompt)))}
        size = int(run.config["tokens_per_block"])
        for row in run.row_of.values():
            prompt = prompts.get(row["request_id"])
            before = None if prompt is None or prompt.after is None else prompts.get(prompt.after)
            if prompt is None or before is None or row["outcome"] != "completed":
                continue
            shared = min(_in_common(before, prompt), prompt.prompt_len - 1) // size * size
            if shared:
                self.turns.append(_turn(row, shared))

    @property
    def shared_tokens(self) -> int:
        return sum(turn.shared_tokens for turn in self.turns)

    @property
    def lost_tokens(self) -> int:
        return sum(turn.lost_tokens for turn in self.turns)

    @property
    def lost_s(self) -> float:
        return sum(turn.lost_s for turn in self.turns)

    @property
    def text(self) -> str:
        """What was lost between turns, in words; empty if nothing was."""
        if not self.lost_tokens:
            return ""
        losing = [turn for turn in self.turns if turn.lost_tokens]
        worst = max(losing, key=lambda turn: turn.lost_s)
        return (
            f"Between turns of sessions, {count(self.lost_tokens)} tokens that the turn before had left in the KV "
            f"cache ({percent(self.lost_tokens / self.shared_tokens)}) were evicted, and computed again by "
            f"{count(len(losing))} of {count(len(self.turns))} later turns. That took {significant(self.lost_s)} "
            f"request-seconds, {significant(worst.lost_s)} s of request {worst.request_id}."
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "later_turns": len(self.turns),
            "shared_tokens": self.shared_tokens,
            "lost_tokens": self.lost_tokens,
            "lost_s": self.lost_s,
            "turns": [
                {"request_id": turn.request_id, "lost_tokens": turn.lost_tokens, "lost_s": turn.lost_s}
                for turn in sorted(self.turns, key=lambda turn: -turn.lost_s)
                if turn.lost_tokens
            ],
        }


def _in_common(before: _Prompt, prompt: _Prompt) -> int:
    """Tokens that both begin with, of those that `before` leaves in the cache."""
    shared = 0
    for (name, length), (other, other_length) in zip(before.cached_runs(), prompt.cached_runs(), strict=False):
        if name != other:
            break
        shared += min(length, other_length)
        if length != other_length:
            break
    return shared


def _turn(row: Mapping[str, Any], shared: int) -> Turn:
    reused, prompt_len = row.get("reused_tokens") or 0, row["prompt_len"]
    lost = max(shared - reused, 0)
    context_s = (row.get("attribution_s") or {}).get(CONTEXT, 0.0)
    return Turn(row["request_id"], shared, lost, context_s * lost / max(prompt_len - reused, 1))
