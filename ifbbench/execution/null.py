"""The executor of `--device null`: no model and no time, to measure everything else."""

from ifbbench.engine.batch import NO_OUTPUTS, Batch, StepOutputs


class NullExecutor:
    """An Executor that makes no tokens: those of requests stay symbolic."""

    def submit(self, batch: Batch) -> None:
        pass

    def collect(self) -> StepOutputs:
        return NO_OUTPUTS

    def close(self) -> None:
        pass
