"""What an executor moves between blocks before it runs a batch."""

from dataclasses import dataclass
from enum import StrEnum


class CopyKind(StrEnum):
    """Between which memories a block is copied."""

    DEVICE = "device"
    OFFLOAD = "offload"
    ONBOARD = "onboard"


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Keys and values that an executor moves before its batch runs, in the order of the list.

    source, destination: places in device memory or, for the source of ONBOARD and the destination of OFFLOAD, in host
    memory. num_tokens: how many of the block's first places are wanted. window: index of the attention window whose
    layers are meant.
    """

    kind: CopyKind
    source: int
    destination: int
    num_tokens: int
    window: int = 0
