"""An executor that answers at once, to measure everything but the model."""

from ifbbench.engine.batch import NO_OUTPUTS, Batch, StepOutputs


class NullExecutor:
    """Takes batches and makes no tokens."""

    def submit(self, batch: Batch) -> None:
        """Take the batch; there is nothing to run."""

    def collect(self) -> StepOutputs:
        """Nothing: requests' tokens stay symbolic."""
        return NO_OUTPUTS

    def close(self) -> None:
        """Nothing to give back."""
