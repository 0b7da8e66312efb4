"""The executor of the null device."""

from mypy_extensions import mypyc_attr

from ifbbench.engine.batch import NO_OUTPUTS, Batch, StepOutputs


@mypyc_attr(allow_interpreted_subclasses=True)
class NullExecutor:
    """An Executor that makes no tokens: those of requests stay symbolic."""

    def submit(self, batch: Batch) -> None:
        pass

    def collect(self) -> StepOutputs:
        return NO_OUTPUTS

    def close(self) -> None:
        pass
