"""Sub-requests of an agent's turns: requests that start when a turn is answered, and that the next turn waits for."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from ifbbench.workload.distributions import Generator, Stream
from ifbbench.workload.prompts import with_prefix
from ifbbench.workload.spec import CONVERSATION, RequestClass, SubRequests
from ifbbench.workload.trace import (
    NO_ORIGIN,
    NO_REQUEST,
    PrefixRun,
    RequestColumns,
    Reserve,
    TraceRequest,
    identifiers,
    integers,
    seconds,
)

Indices: TypeAlias = NDArray[np.int64]
Draws: TypeAlias = Callable[[Stream], Generator]


def sub_requests_of(kind: RequestClass) -> SubRequests | None:
    """What the turns of this class start; None if they start nothing."""
    return None if kind.sessions is None else kind.sessions.sub_requests


def with_sub_requests(
    turns: RequestColumns,
    class_of: Indices,
    turn_of: Indices,
    classes: Sequence[RequestClass],
    draws: Sequence[Draws],
    system_prompt: Callable[[int], list[PrefixRun]],
) -> RequestColumns:
    """As many requests as `turns` has, with the sub-requests of each turn behind it; what is too much is cut off.

    class_of, turn_of: the class of each turn, and its number in its conversation; each of shape [turns], in the order
        in which they were drawn.
    draws: draws of each class.
    system_prompt: first tokens of the conversation of a turn.
    """
    count = len(turns)
    num_started = _num_started(class_of, turn_of, classes, draws)
    row_of_turn = np.arange(count) + np.cumsum(num_started) - num_started
    turn = np.arange(int(np.searchsorted(row_of_turn, count)))  # the turns that are not cut off
    row_of_turn = row_of_turn[turn]
    owner = np.repeat(turn, num_started[turn])
    first_of_owner = np.cumsum(num_started[turn]) - num_started[turn]
    row_of_sub = row_of_turn[owner] + 1 + np.arange(len(owner)) - first_of_owner[owner]

    base_len = np.array([sum(length for _, length in system_prompt(one)) for one in turn.tolist()], dtype=np.int64)
    is_conversation = np.array([(found := sub_requests_of(kind)) and found.context == CONVERSATION for kind in classes])
    goes_on = is_conversation.astype(bool)[class_of[turn]]
    base_len[goes_on] = np.asarray(turns.prompt_len)[turn][goes_on]
    own_len, reserved, output_len = _lengths(class_of[owner], classes, draws)
    order = np.argsort(np.concatenate((row_of_turn, row_of_sub)), kind="stable")[:count]
    turn_at = np.concatenate((turn, owner))[order]
    is_sub = order >= len(turn)

    def column(of_turns: Any, of_subs: Any) -> NDArray[Any]:
        return np.concatenate((np.asarray(of_turns)[turn], of_subs))[order]

    prompt_len = column(turns.prompt_len, base_len[owner] + own_len)

    def recall(row: int) -> TraceRequest:
        at = int(turn_at[row])
        request, sent_in = turns[at], int(row_of_turn[at])
        if is_sub[row]:
            runs = request.prefix_runs() if goes_on[at] else system_prompt(at)
            request = structs.replace(
                request,
                prompt_len=int(prompt_len[row]),
                prefix_ids=None,
                prefix_lens=None,
                after=sent_in,
                think_s=0.0,
            )
            return with_prefix(request, runs) if runs else request
        if request.after is None:
            return request
        return structs.replace(request, after=int(row_of_turn[at - 1]), also_after=also_after.get(sent_in, ()))

    origin = np.where(np.asarray(turns.origin)[turn_at] == NO_ORIGIN, NO_ORIGIN, np.arange(count))
    follows = np.zeros(count, bool) if turns.after is None else np.asarray(turns.after) != NO_REQUEST
    after = np.where(follows[turn_at], row_of_turn[np.maximum(turn_at - 1, 0)], NO_REQUEST)
    after[is_sub] = row_of_turn[turn_at[is_sub]]
    waits = [at for at in turn[1:].tolist() if follows[at] and num_started[at - 1]]
    # The sub-requests of a turn stand between it and the next one.
    also_after = {
        int(row_of_turn[at]): tuple(range(int(row_of_turn[at - 1]) + 1, int(row_of_turn[at]))) for at in waits
    }
    return replace(
        turns,
        request_id=identifiers(np.arange(count)),
        arrival_s=seconds(np.asarray(turns.arrival_s)[turn_at]),
        prompt_len=integers(prompt_len),
        max_new_tokens=integers(column(turns.max_new_tokens, reserved)),
        output_len=integers(column(turns.output_len, output_len)),
        origin=identifiers(origin),
        recall=recall,
        priority=None if turns.priority is None else seconds(np.asarray(turns.priority)[turn_at]),
        class_of=None if turns.class_of is None else integers(np.asarray(turns.class_of)[turn_at]),
        after=identifiers(after),
        think_s=seconds(np.where(is_sub, 0.0, np.asarray(turns.think_s or np.zeros(count))[turn_at])),
        also_after=also_after,
    )


def _num_started(
    class_of: Indices, turn_of: Indices, classes: Sequence[RequestClass], draws: Sequence[Draws]
) -> Indices:
    """How many sub-requests each turn starts, at most as many as there are turns; shape [turns]."""
    found = np.zeros(len(class_of), dtype=np.int64)
    for number, (kind, streams) in enumerate(zip(classes, draws, strict=True)):
        if (asked := sub_requests_of(kind)) is None:
            continue
        members = np.flatnonzero(class_of == number)
        starts = streams(Stream.SUB_REQUEST_SHARE).random(len(members)) < asked.share
        drawn = asked.count.draw(streams(Stream.SUB_REQUEST_COUNT), len(members))
        found[members] = np.where(starts, np.minimum(drawn, len(class_of)), 0)
    is_last = np.append(turn_of[1:] == 0, True)
    found[is_last] = 0
    return found


def _lengths(
    class_of: Indices, classes: Sequence[RequestClass], draws: Sequence[Draws]
) -> tuple[Indices, Indices, Indices]:
    """The lengths of sub-requests of these classes: own tokens of the prompt, reserved and output tokens."""
    own, reserved, outputs = (np.zeros(len(class_of), dtype=np.int64) for _ in range(3))
    for number, (kind, streams) in enumerate(zip(classes, draws, strict=True)):
        if (asked := sub_requests_of(kind)) is None:
            continue
        members = np.flatnonzero(class_of == number)
        own[members] = asked.prompt_len.draw(streams(Stream.SUB_REQUEST_INPUT_LENGTH), len(members))
        drawn = integers(asked.output_len.draw(streams(Stream.SUB_REQUEST_OUTPUT_LENGTH), len(members)))
        reserved[members], outputs[members] = map(np.asarray, Reserve(kind.reserve).columns(drawn, drawn))
    return own, reserved, outputs
