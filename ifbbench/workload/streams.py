"""Random streams that do not disturb each other: a generator for each thing drawn, all from one seed."""

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """What is drawn. The numbers are part of every recorded result: never change one."""

    INPUT_LENGTH = 0
    OUTPUT_LENGTH = 1
    ARRIVAL = 2
    TOKENS = 3
    PREFIX = 4
    POOL_LENGTH = 5
    POOL_SHARE = 6
    POOL_CHOICE = 7
    TURNS = 8
    THINK_TIME = 9


def generator(seed: int, stream: Stream, *key: int) -> np.random.Generator:
    """The generator of one stream, or of its part `key` (such as a request id); equal arguments, equal draws."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(stream, *key))))
