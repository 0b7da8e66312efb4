"""A policy whose runs wait for ever, so that a test can kill them at a point that it knows."""

import os
import time
from pathlib import Path

from ifbbench.engine.policies import GuaranteedNoEvict

# The environment variable with the path of the `points.jsonl` of a sweep.
POINTS = "TESTS_HELD_POINTS"
ENDED = 5


class Held(GuaranteedNoEvict):
    """Once ENDED points of the sweep have ended, no other one does. Without POINTS, the policy that it derives from."""

    def schedule(self, active, kv_cache):
        points = os.environ.get(POINTS)
        while points and Path(points).exists() and Path(points).read_bytes().count(b"\n") > ENDED:
            time.sleep(0.1)
        return super().schedule(active, kv_cache)
