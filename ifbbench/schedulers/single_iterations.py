"""What a scheduler answers that repeats no plan."""

from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from ifbbench.engine.batch import AdapterUse
from ifbbench.engine.interfaces import SchedulerStalled
from ifbbench.engine.plan import Plan
from ifbbench.engine.request import Request
from ifbbench.engine.stretch import Growth, Positions


@mypyc_attr(allow_interpreted_subclasses=True)
class SingleIterations:
    """The defaults of the protocol `Scheduler` once more, because a compiled class cannot derive from it."""

    def horizon(self, plan: Plan) -> int:
        return 0

    def cycle(self, plan: Plan) -> Sequence[Plan]:
        return [plan]

    def positions(self, plan: Plan) -> tuple[Positions, AdapterUse | None]:
        raise SchedulerStalled("this scheduler repeats no plan")

    def repeat(self, plan: Plan, count: int) -> Growth:
        raise SchedulerStalled("this scheduler repeats no plan")

    def used_blocks_after(self, plan: Plan, count: int) -> int | None:
        return None

    def confirm(self, count: int) -> list[Request]:
        raise SchedulerStalled("this scheduler repeats no plan")
