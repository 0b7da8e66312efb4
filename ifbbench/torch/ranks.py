"""The ranks of a run: which one this process is, by the environment that a launcher sets. Imports no torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ifbbench.errors import IfbbenchError, InputError
from ifbbench.settings.config import RunConfig

# Variables of rank, number of ranks, rank on this machine and ranks on this machine, by launcher.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
LAUNCHERS = (
    TORCHRUN,
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# A file through which the processes of `ifbbench.replay.rank_processes` find each other.
STORE = "IFBBENCH_RANKS_STORE"
FIRST_PORT, NUM_PORTS = 20_000, 10_000


class RankFailed(IfbbenchError):
    """A rank died, does not answer, or decided otherwise than rank 0.

    is_lost: the connection to another rank is lost, or, with is_timed_out, that rank has not answered in time.
    """

    is_lost = is_timed_out = False


def cause_of(error: BaseException) -> BaseException:
    """The failure of a rank that is behind `error`, or `error` itself."""
    cause = error
    while cause.__cause__ is not None and not isinstance(cause, RankFailed):
        cause = cause.__cause__
    return cause if isinstance(cause, RankFailed) else error


@dataclass(frozen=True, slots=True)
class Place:
    """The rank of this process among all, and among those of this machine."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int

    def environment(self, store: Path) -> dict[str, str]:
        """Variables for a process at this place."""
        numbers = (self.rank, self.world_size, self.local_rank, self.local_size)
        return {STORE: str(store)} | {name: str(number) for name, number in zip(TORCHRUN, numbers, strict=True)}

    def address(self) -> str:
        """The URL by which torch.distributed finds the other ranks. InputError if the environment has none."""
        if STORE in os.environ:
            return f"file://{os.environ[STORE]}"
        if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
            return f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        if self.local_size < self.world_size:
            raise InputError(
                f"{self.world_size} ranks on several machines: MASTER_ADDR and MASTER_PORT are not set. "
                "Set them to the address of rank 0 and a free port (with mpirun: -x MASTER_ADDR=…)."
            )
        # The same in all processes of one launcher.
        return f"tcp://127.0.0.1:{FIRST_PORT + os.getppid() % NUM_PORTS}"


def place_in_environment(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place that torchrun or an MPI launcher gives this process; None without one. InputError for numbers that are
    none."""
    for names in LAUNCHERS:
        if names[0] not in environment or names[1] not in environment:
            continue
        try:
            rank, world_size = (int(environment[name]) for name in names[:2])
            local_rank, local_size = (
                int(environment.get(name, default)) for name, default in zip(names[2:], (rank, world_size), strict=True)
            )
        except ValueError as error:
            raise InputError(f"{names[0]}, {names[1]}: expected the numbers that a launcher sets ({error}).") from error
        if not 0 <= rank < world_size:
            raise InputError(
                f"{names[0]}: {rank} is not a rank of {world_size} ({names[1]}); expected 0 to {world_size - 1}."
            )
        return Place(rank, world_size, local_rank, local_size)
    return None


def launched_place(config: RunConfig) -> Place | None:
    """The place of this process among those that a launcher started for `config`; None if none did, or it started one.

    InputError if it started another number than `config` needs."""
    place = None if config.makes_no_tokens else place_in_environment()
    if place is None or place.world_size == config.num_ranks == 1:
        return None
    if place.world_size != config.num_ranks:
        raise InputError(
            f"--tp_size {config.tp_size} --pp_size {config.pp_size}: need {config.num_ranks} processes, "
            f"and {place.world_size} were launched. Launch as many, or start ifbbench without a launcher: "
            "it starts them itself."
        )
    return place
