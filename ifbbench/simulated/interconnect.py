"""Collectives between the devices of a group, by the number of its ranks and of the NVLink domains that these are in.

Ranks are numbered with tensor parallelism innermost, so that a group of consecutive ranks fills one domain after the
other. A domain is what `link_bandwidth` of a profile connects: a server of 8 GPUs, or a rack of 72. A network with
`network_bandwidth` for each GPU connects the domains.
"""

import math
from typing import NamedTuple

from ifbbench.simulated.hardware import HardwareProfile

# The share of the network bandwidth that DeepEP reaches between two servers of H100 (AIConfigurator's
# wideep_deepep_ll_perf: 48.5 of 50 GB/s).
NETWORK_SHARE = 0.95


class Transfer(NamedTuple):
    """What one collective costs each device.

    latency_s: time of the smallest message.
    flow_s: time of its bytes.
    bytes: number of bytes that it sends.
    """

    latency_s: float
    flow_s: float
    bytes: float

    @property
    def seconds(self) -> float:
        return self.latency_s + self.flow_s


NO_TRANSFER = Transfer(0.0, 0.0, 0.0)


class Interconnect:
    """The links and the network of one kind of device."""

    def __init__(self, hardware: HardwareProfile) -> None:
        self.hardware = hardware
        share = hardware.constants
        self._link = share.network * hardware.link_bandwidth
        self._network = NETWORK_SHARE * hardware.network_bandwidth

    def domains(self, ranks: int, first: int = 0) -> int:
        """The number of domains that `ranks` consecutive devices from number `first` on are in."""
        size = self.hardware.link_domain
        return (first + ranks - 1) // size - first // size + 1

    def all_reduce(self, ranks: int, message: float) -> Transfer:
        """The sum of `message` bytes of every rank, on every rank, by the quickest algorithm.

        Within a domain, a ring takes a latency for every doubling of the ranks and moves 2 (n − 1) / n of the message.
        In one shot each rank reads the message of all others, n − 1 of them, which is quicker for few tokens. Between
        domains the sums within each domain are scattered among its ranks. Each of them adds its part to those of the
        other domains over the network (a ring), before all parts are gathered (NCCL's hierarchical algorithm)."""
        if ranks == 1 or not message:
            return NO_TRANSFER
        domains = self.domains(ranks)
        local = -(-ranks // domains)
        within = self._all_reduce_within(local, message) if local > 1 else NO_TRANSFER
        if domains == 1:
            return within
        moved = 2 * (domains - 1) / domains * (message / local)
        latency_s = within.latency_s + 2 * math.log2(domains) * self.hardware.network_latency_s
        return Transfer(latency_s, within.flow_s + moved / self._network, within.bytes + moved)

    def _all_reduce_within(self, ranks: int, message: float) -> Transfer:
        share = self.hardware.constants
        algorithms = (
            (share.all_reduce_s * math.log2(ranks), 2 * (ranks - 1) / ranks * message, share.network),
            (share.one_shot_s + share.one_shot_gpu_s * ranks, (ranks - 1) * message, share.one_shot),
        )
        latency_s, moved, reached = min(
            algorithms, key=lambda one: one[0] + one[1] / (one[2] * self.hardware.link_bandwidth)
        )
        return Transfer(latency_s, moved / (reached * self.hardware.link_bandwidth), moved)

    def all_to_all(self, ranks: int, sent: float) -> Transfer:
        """The exchange in which each rank sends `sent` bytes in all, an equal part to every rank of the group, itself
        included. What stays within its domain and what crosses the network move at the same time."""
        if ranks == 1 or not sent:
            return NO_TRANSFER
        domains = self.domains(ranks)
        local = -(-ranks // domains)
        within, across = sent * (local - 1) / ranks, sent * (ranks - local) / ranks
        share = self.hardware.constants
        latency_s = share.one_shot_s + share.one_shot_gpu_s * local
        if domains > 1:
            latency_s = max(latency_s, self.hardware.network_latency_s)
        return Transfer(latency_s, max(within / self._link, across / self._network), within + across)

    def all_gather(self, ranks: int, part: float) -> Transfer:
        """The exchange after which each rank has the `part` bytes of every other. A reduce-scatter with such parts
        takes as long."""
        if ranks == 1 or not part:
            return NO_TRANSFER
        domains = self.domains(ranks)
        local = -(-ranks // domains)
        # Each part crosses the network once for each other domain; the ranks of a domain then share what came in.
        across, within = (domains - 1) * part, (ranks - domains) * part
        share = self.hardware.constants
        latency_s = share.one_shot_s + share.one_shot_gpu_s * local
        if domains > 1:
            latency_s += math.log2(domains) * self.hardware.network_latency_s
        return Transfer(latency_s, within / self._link + across / self._network, within + across)

    def stage_transfers(self, tp_size: int, pp_size: int, message: float) -> Transfer:
        """The transfer of `message` bytes from each stage to the next, all stages together. Stages in different domains
        send over the network, at its latency."""
        size = self.hardware.link_domain
        crossing = sum(
            any(rank // size != (rank + tp_size) // size for rank in range((stage - 1) * tp_size, stage * tp_size))
            for stage in range(1, pp_size)
        )
        moved = (pp_size - 1) * message
        if not crossing:
            return Transfer(0.0, moved / self._link, moved)
        flow_s = (pp_size - 1 - crossing) * message / self._link + crossing * message / self._network
        return Transfer(crossing * self.hardware.network_latency_s, flow_s, moved)
