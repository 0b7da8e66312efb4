"""An engine that takes the time of a known cost model for each iteration, with noise."""

from dataclasses import replace

import numpy as np

from ifbbench.build.engine import Engine, build_engine
from ifbbench.settings.config import RunConfig
from ifbbench.simulated.cost_model import CostModel
from ifbbench.simulated.executor import SimulatedExecutor
from ifbbench.simulated.hardware import HardwareProfile, load_hardware
from ifbbench.simulated.shard import Shard
from ifbbench.virtual_clock import VirtualClock

DTYPE = "float32"


def true_hardware() -> HardwareProfile:
    """A machine with constants far from those of the built-in profile, from which a fit starts."""
    base = load_hardware("cpu")
    constants = replace(
        base.constants, matmul=0.2, memory=3.0, context_attention=0.9, generation_attention=0.1, kernel_s=2.5e-5
    )
    return replace(base, constants=constants, host_iteration_s=4e-4, host_request_s=2e-5)


class Disturbed(SimulatedExecutor):
    """Iterations take a few per cent longer, and some take several times as long."""

    def __init__(
        self, cost_model: CostModel, clock: VirtualClock, seed: int, noise: float, disturbances: float
    ) -> None:
        super().__init__(cost_model, clock)
        self._own_clock = clock
        self._random = np.random.default_rng(seed)
        self._noise, self._disturbances = noise, disturbances

    def collect(self):
        before_ns = self._own_clock.now_ns
        outputs = super().collect()
        factor = self._random.lognormal(0, self._noise) + 4 * (self._random.random() < self._disturbances)
        longer_ns = round((self._own_clock.now_ns - before_ns) * max(factor - 1, 0))
        self._own_clock.advance(longer_ns)
        return outputs


def synthetic_engine(noise: float = 0.0, disturbances: float = 0.0) -> Engine:
    """An engine on the true hardware. noise: standard deviation of each time's logarithm, of which only what is longer
    counts; disturbances: share of iterations that take five times as long."""
    engine = build_engine(RunConfig(device="sim:cpu"))
    clock = VirtualClock()
    cost_model = cost_model_of(engine, true_hardware())
    return replace(engine, clock=clock, executor=Disturbed(cost_model, clock, 5, noise, disturbances))


def cost_model_of(engine: Engine, hardware: HardwareProfile) -> CostModel:
    return CostModel(Shard(engine.model, DTYPE, DTYPE), hardware)
