"""Arrivals in sessions: a later turn arrives after the answer to the turn before."""

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
