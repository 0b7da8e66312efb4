"""A recorder that also prints what it records."""

import json
import sys
from typing import Any

from ifbbench.engine.records import IterationRecord
from ifbbench.engine.stretch import Stretch
from ifbbench.rundir.recorder import Recorder
from ifbbench.rundir.statistics import IterationStatistics


class PrintingRecorder(Recorder):
    """A recorder that also prints the statistics of each iteration to stderr, one JSON object a line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Another one, because it remembers the steps of static batches.
        self._printed = IterationStatistics(self.batching_type, self.max_requests)

    def iteration(self, record: IterationRecord) -> None:
        super().iteration(record)
        self._print(record)

    def stretch(self, stretch: Stretch) -> None:
        super().stretch(stretch)
        for record in stretch.records():
            self._print(record)

    def _print(self, record: IterationRecord) -> None:
        for reported in self._printed.reported(record):
            print(json.dumps(self._printed.fields(reported)), file=sys.stderr)
