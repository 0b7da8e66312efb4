"""The lines of iterations that ran together."""

from ifbbench.engine.records import fragmentation
from ifbbench.engine.stretch import Stretch
from ifbbench.rundir.line_types import InflightLine, executor_line, stats_of_windows
from ifbbench.rundir.lines import IterationLines, JsonLinesWriter, share_of


class StretchLines(IterationLines):
    """IterationLines, also of stretches."""

    def write_stretch(self, stretch: Stretch, bound_by: str, writer: JsonLinesWriter) -> None:
        """Write the lines of all iterations of a stretch, equal to those of `record`: one line for each micro batch, of
        which only the fields that differ are set again. Numbers of Python, because stretches are often so short that
        arrays are slower."""
        first, growth, cache, every = stretch.first, stretch.growth, stretch.first.cache, self._every
        changed, self._bound_by = bound_by != self._bound_by, bound_by
        size, held, filled = cache.tokens_per_block or 0, cache.held_tokens, cache.filled_tokens
        used, total, new = cache.used_blocks or 0, cache.allocated_total or 0, cache.allocated_new or 0
        free, has_windows = (cache.max_blocks or 0) - used, len(cache.windows) > 0
        lines = [self.documented(record) for record in stretch.turns]
        for index, start_s in enumerate(stretch.start_s):
            iteration = first.iteration + index
            if index == 1 and growth.num_leaving:
                lines[0].active_request_count -= growth.num_leaving
                lines[0].ifbbench.waiting -= growth.num_leaving
            if iteration % every and not (changed and not index):  # see `is_thinned_out`
                continue
            line = lines[index % len(lines)]
            details = line.ifbbench
            more, tokens = growth.more_blocks[index], growth.more_tokens[index]
            line.iteration_counter = iteration
            if stretch.max_in_flight > 1 and isinstance(line, InflightLine):
                line.microbatch_id = (first.micro_batch + index) % stretch.max_in_flight
            line.free_kv_cache_blocks = free - more
            line.used_kv_cache_blocks = used + more
            line.allocated_total_kv_cache_blocks = total + growth.more_taken[index]
            line.allocated_new_kv_cache_blocks = new + growth.more_new[index]
            if has_windows:
                details.kv_cache_iteration_stats = stats_of_windows(growth.cache(index))
            self._set_times(line, stretch.epoch_s + start_s, start_s, stretch.submit_s[index], stretch.end_s[index])
            details.kv_fragmentation = share_of(fragmentation(filled + tokens, held + more * size))
            if self._as_executor:
                completed = len(stretch.finished) if iteration == stretch.last_iteration else 0
                writer.add(executor_line(line, completed))
            else:
                writer.add(line)
        left_out = stretch.last_iteration % every and (stretch.length > 1 or not changed)
        self._latest = stretch.record(stretch.length - 1) if left_out else None
