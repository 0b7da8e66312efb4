"""How far a long operation is: what shows it is notified by those that take long."""

from typing import Protocol


class Progress(Protocol):
    """Is notified of the stages of a long operation, and of the steps of each."""

    def stage(self, label: str) -> None:
        """The stage `label` ("reading trace") begins; the number of its steps is not known yet."""
        ...

    def update(self, completed: int, total: int | None, text: str) -> None:
        """`completed` of `total` steps of the stage are done; None if their number is unknown. text: what they do."""
        ...


class _NoProgress:
    """Shows nothing."""

    def stage(self, label: str) -> None:
        pass

    def update(self, completed: int, total: int | None, text: str) -> None:
        pass


NO_PROGRESS: Progress = _NoProgress()
