"""The autoscaler: how many replicas a fleet should have, from what they report.

It decides as the Horizontal Pod Autoscaler of Kubernetes does: the number is multiplied by the ratio of the measure to
its target and rounded up, unless that ratio is within a tolerance of 1; it falls only to the largest number that was
wanted in a window of time. Replicas that are starting count, and measure 0.
"""

from collections import deque
from math import ceil

from ifbbench.settings.autoscale import TTFT, AutoscaleRule

ROUNDING = 1e-9  # a product that is a whole number but for rounding is that number


class Autoscaler:
    """Decides by `rule`, from one time to a later one."""

    def __init__(self, rule: AutoscaleRule) -> None:
        self.rule = rule
        self._wanted = deque[tuple[float, int]]()

    def replicas(self, time_s: float, current: int, measured: float | None) -> int:
        """The number of replicas from `time_s` on.

        current: the number so far.
        measured: the sum over all replicas, for TTFT the mean; None if nothing was measured, which changes nothing.
        """
        rule, wanted = self.rule, current
        if measured is None:
            return min(max(current, rule.minimum), rule.maximum)
        load = measured * current if rule.measure == TTFT else measured
        if abs(load / rule.target - current) > rule.tolerance * current:
            wanted = ceil(load / rule.target - ROUNDING)
        wanted = min(max(wanted, rule.minimum), rule.maximum)
        self._wanted.append((time_s, wanted))
        while self._wanted[0][0] < time_s - rule.cool_down_s:
            self._wanted.popleft()
        return max(wanted, min(current, max(count for _, count in self._wanted)))
