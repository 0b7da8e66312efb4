"""A task in a process of its own that has a limited time."""

import os
import time

import pytest

from ifbbench.errors import InputError
from ifbbench.processes import TimeIsUp, run_within


def test_what_a_task_returns_or_raises() -> None:
    assert run_within(lambda: os.getpid(), 60.0) != os.getpid()

    def refuses() -> None:
        raise InputError("no such device")

    with pytest.raises(InputError, match="no such device"):
        run_within(refuses, 60.0)


def test_a_task_ends_with_its_time() -> None:
    """Whatever it does: it is not asked."""
    with pytest.raises(TimeIsUp):
        run_within(lambda: time.sleep(600), 0.2)
