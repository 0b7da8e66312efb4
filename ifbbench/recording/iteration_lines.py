"""The lines of `iterations.jsonl`: the batch manager's statistics of an iteration, and why it was as it was."""

from collections import deque
from collections.abc import Iterable, Sequence

from ifbbench.engine.records import IterationRecord, IterationStatistics, Stretch
from ifbbench.execution.step_profile import StepProfile
from ifbbench.recording.jsonl_writer import encode
from ifbbench.recording.metrics import bound_by

FRAGMENTATION_DIGITS = 6
# The fields that differ from one iteration of a stretch to the next.
_DIFFERING = (
    "Timestamp", "Iteration Counter", "Free KV cache blocks", "Used KV cache blocks",
    "Allocated total KV cache blocks", "Allocated new KV cache blocks",
)  # fmt: skip
_IFBBENCH = (
    '"start_s":%r,"latency_ms":%r,"host_ms":%r,"device_ms":%r%s,"queued":%s,"waiting":%s,"bound_by":%s,"first_left_out":%s,'
    '"paused":[%s],"tokens_recomputed":%s,"budget_used":%s%s,"kv_fragmentation":%r'
)


class IterationLines:
    """Makes the line of each iteration as text, out of a template: there are so many of them that an encoder of JSON
    would take more time than all scheduling.

    statistics: makes the batch manager's fields. every: thinned, to the lines of every so many iterations, and of those
    that pause a request, are bound by another limit than the one before, or are the last. profile: adds where the time
    of each iteration went.
    """

    def __init__(
        self, statistics: IterationStatistics, every: int = 1, profile: StepProfile | None = None
    ) -> None:
        self._statistics = statistics
        self._profile = profile
        self._every = every
        self._bound_by = ""
        self._latest: IterationRecord | Stretch | None = None
        places = ",".join(f'"{name}":"%s"' if name == "Timestamp" else f'"{name}":%s' for name in statistics.names)
        self._template = f'{{{places},"ifbbench":{{{_IFBBENCH}}}}}'

    def of_record(self, record: IterationRecord) -> Iterable[str]:
        """The line of one iteration; none if it is thinned out."""
        before, self._bound_by = self._bound_by, bound_by(record)
        if record.iteration % self._every and not record.paused and self._bound_by == before:
            self._latest = record
            return ()
        self._latest = None
        return (self._line(record),)

    def of_last(self) -> Iterable[str]:
        """The line of the last iteration so far, if it was thinned out."""
        record = deque(self._latest.records(), 1)[0] if isinstance(self._latest, Stretch) else self._latest
        return () if record is None else (self._line(record),)

    def _line(self, record: IterationRecord) -> str:
        start_s, submit_s, end_s = record.start_s, record.submit_s, record.end_s
        return self._template % (
            *self._values(record), start_s, (end_s - start_s) * 1000, (submit_s - start_s) * 1000,
            (end_s - submit_s) * 1000, *self._reasons(record), round(record.cache.fragmentation, FRAGMENTATION_DIGITS),
        )  # fmt: skip

    def of_stretch(self, stretch: Stretch) -> Iterable[str]:
        """The lines of all iterations of a stretch, as `of_record` makes them."""
        first, every = stretch.first, self._every
        before, self._bound_by = self._bound_by, bound_by(first)
        lines = self._lines(stretch)
        if every == 1:
            return lines
        changed = self._bound_by != before
        self._latest = stretch if stretch.last_iteration % every and (stretch.length > 1 or not changed) else None
        return [
            line for index, line in enumerate(lines)
            if (first.iteration + index) % every == 0 or (changed and index == 0)
        ]  # fmt: skip

    def _lines(self, stretch: Stretch) -> list[str]:
        """One for each iteration: a template with all that they have in common, filled in with what differs. Numbers of
        Python, for stretches are often so short that arrays are slower."""
        first, cache, timestamp_of = stretch.first, stretch.first.cache, self._statistics.format_timestamp
        template = self._template_of(first)
        size, held, filled = cache.tokens_per_block or 0, cache.held_tokens, cache.filled_tokens
        used, total, new = cache.used_blocks or 0, cache.allocated_total or 0, cache.allocated_new or 0
        free = (cache.max_blocks or 0) - used
        columns = (stretch.start_s, stretch.submit_s, stretch.end_s, stretch.more_blocks)
        each = zip(*(column.tolist() for column in columns), strict=True)
        lines = []
        for number, (start_s, submit_s, end_s, more) in enumerate(each, start=first.iteration):
            fragmentation = max(0.0, 1.0 - filled / (held + more * size))
            lines.append(
                template
                % (
                    timestamp_of(stretch.epoch_s + start_s), number, free - more, used + more, total + more, new + more,
                    start_s, (end_s - start_s) * 1000, (submit_s - start_s) * 1000, (end_s - submit_s) * 1000,
                    round(fragmentation, FRAGMENTATION_DIGITS),
                )
            )  # fmt: skip
            filled += first.num_generation
        return lines

    def _template_of(self, first: IterationRecord) -> str:
        """The line of `first`, with places for what differs from one iteration of its stretch to the next."""
        values = zip(self._statistics.names, self._values(first), strict=True)
        fields = ["%s" if name in _DIFFERING else value for name, value in values]
        places = ("%r", "%r", "%r", "%r")
        return self._template.replace("%r", "%s") % (*fields, *places, *self._reasons(first), "%r")

    def _values(self, record: IterationRecord) -> Sequence[str | int | None]:
        """The batch manager's fields, those that a cache without blocks leaves out as JSON has them."""
        values = self._statistics.values(record)
        if record.cache.max_blocks is None:
            return ["null" if value is None else value for value in values]
        return values

    def _reasons(self, record: IterationRecord) -> tuple[str | int, ...]:
        """What stands in a line between the times and the fragmentation."""
        left_out, paused = "null", ""
        if (first := record.left_out) is not None:
            left_out = f'{{"request_id":{first.request.request_id},"reason":{encode(first.limit)}}}'
        if record.paused:
            paused = ",".join(
                f'{{"request_id":{pause.victim.request_id},"for":{pause.beneficiary.request_id}}}'
                for pause in record.paused
            )
        scheduled = len(record.context) + record.num_generation + record.idle
        waiting = record.queued + record.active - scheduled
        padding = f',"padding_tokens":{record.padding}' if record.padding else ""
        return (
            self._more_times(record), record.queued, waiting, encode(self._bound_by), left_out, paused,
            record.recomputed, record.budget_used, padding,
        )  # fmt: skip

    def _more_times(self, record: IterationRecord) -> str:
        """Of passes, where the phases had one each; and in a profiled run."""
        if record.context_end_s is None and self._profile is None:
            return ""
        return _pass_times(record) + ("" if self._profile is None else self._step_times(record, self._profile))

    @staticmethod
    def _step_times(record: IterationRecord, profile: StepProfile) -> str:
        """`host_ms` in parts, and what follows it."""
        step = profile.take(record.iteration)
        schedule_s = record.submit_s - record.start_s - step.prepare_s - step.launch_s
        seconds = {"schedule": schedule_s, "prepare": step.prepare_s, "launch": step.launch_s,
                   "collect": step.collect_s, "device_busy": step.device_s}  # fmt: skip
        times = "".join(f',"{name}_ms":{value * 1000!r}' for name, value in seconds.items())
        return f'{times},"flops":{step.flops!r},"bytes":{step.bytes!r}'


def _pass_times(record: IterationRecord) -> str:
    """Where the phases had a pass each: how long each took."""
    if record.context_end_s is None:
        return ""
    context_ms, generation_ms = (
        (record.context_end_s - record.submit_s) * 1000, (record.end_s - record.context_end_s) * 1000,
    )  # fmt: skip
    return f',"context_pass_ms":{context_ms!r},"generation_pass_ms":{generation_ms!r}'
