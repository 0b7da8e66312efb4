"""Arrivals in sessions: a later turn arrives after the answer to the turn before, and to others that it waits for."""

from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ifbbench.errors import InputError
from ifbbench.workload.trace import NO_REQUEST, RequestColumns

Indices: TypeAlias = NDArray[np.int64]


def predecessors(columns: RequestColumns) -> Indices:
    """The position of the request that each one comes after; NO_REQUEST for none, and for one that the trace lacks,
    such as one that --max_num_samples leaves out."""
    ids, after = np.asarray(columns.request_id), np.asarray(columns.after)
    order = np.argsort(ids, kind="stable")
    found = order[np.minimum(ids.searchsorted(after, sorter=order), len(ids) - 1)]
    return np.where((after != NO_REQUEST) & (ids[found] == after), found, NO_REQUEST)


def session_starts(before: Indices) -> Indices:
    """The position of the first request of each one's session, from `predecessors`; InputError if there is none,
    because requests wait for each other."""
    first = np.where(before == NO_REQUEST, np.arange(len(before)), before)
    for _ in range(len(before).bit_length()):
        first = first[first]
    if (before[first] != NO_REQUEST).any():
        raise InputError("sessions: requests come after each other in a circle (`after`); expected a first one.")
    return first


def waited_for(columns: RequestColumns, before: Indices) -> dict[int, list[int]]:
    """The positions of all requests that each later turn waits for, from `predecessors`; InputError if requests wait
    for each other."""
    found = {index: [int(before[index])] for index in np.flatnonzero(before != NO_REQUEST).tolist()}
    if columns.also_after:
        position = {request_id: index for index, request_id in enumerate(columns.request_id)}
        for request_id, others in columns.also_after.items():
            index = position.get(request_id, NO_REQUEST)
            if index in found:
                known = {position[other] for other in others if other in position}
                found[index] += sorted(known.difference(found[index]))
        try:
            TopologicalSorter(found).prepare()
        except CycleError as error:
            circle = ", ".join(str(columns.request_id[index]) for index in error.args[1])
            raise InputError(
                f"sessions: requests {circle} wait for each other (`after`, `also_after`); expected a first one."
            ) from error
    return found


def with_next_turns(columns: RequestColumns) -> RequestColumns:
    """`columns` with `next_turns`: a turn that others name as the one before them (`after`) has a next one.

    Those that are only waited for (`also_after`), such as sub-agents, have none: what comes after them goes on with
    other blocks.
    """
    found = columns.next_turns
    if columns.after is not None:
        before = predecessors(columns)
        found |= frozenset(np.asarray(columns.request_id)[before[before != NO_REQUEST]].tolist())
    return replace(columns, next_turns=found)
