"""How a long piece of work tells how far it is."""

from typing import Protocol


class Progress(Protocol):
    """Hears how far a run is: `completed` of `total`, and what it does."""

    def update(self, completed: int, total: int, text: str) -> None: ...
