"""An executor that answers at once, to measure everything but the model."""

from ifbbench.batching.batch import Batch


class NullExecutor:
    """Takes batches and makes no tokens."""

    def submit(self, batch: Batch) -> None:
        """Take the batch; there is nothing to run."""

    def collect(self) -> None:
        """None: requests' tokens stay symbolic."""

    def close(self) -> None:
        """Nothing to give back."""
