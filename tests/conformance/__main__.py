"""Replay golden files: one line a case, then the totals; exit status 1 when a case failed."""

import gzip
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.conformance import capacity, kvcache, microbatch, sglang, vllm
from tests.conformance.outcome import Case, Mismatch, Skip, require_rule_set

REPLAYS: dict[str, Callable[[Case], None]] = {
    "trtllm-golden/capacity/1": capacity.replay,
    "trtllm-golden/microbatch/1": microbatch.replay,
    "trtllm-golden/kvcache/1": kvcache.replay,
    "vllm-golden/runs/1": vllm.replay,
    "sglang-golden/decisions/1": sglang.replay_decisions,
    "sglang-golden/runs/1": sglang.replay_run,
}


def judge(replay: Callable[[Case], None], case: Case) -> tuple[str, str]:
    """The verdict on one case and its reason. An engine that raises fails the case."""
    try:
        if "versions" in case:
            require_rule_set(case)
        replay(case)
    except Skip as skip:
        return "SKIP", str(skip)
    except Mismatch as mismatch:
        return "FAIL", str(mismatch)
    except Exception as error:
        return "FAIL", f"{type(error).__name__}: {error}"
    return "PASS", ""


def main(paths: list[str]) -> int:
    """Replay all cases of the files; the exit status."""
    if not paths:
        print("usage: python -m tests.conformance FILE…", file=sys.stderr)
        return 2
    verdicts: Counter[str] = Counter()
    for path in paths:
        content = Path(path).read_bytes()
        golden = json.loads(gzip.decompress(content) if path.endswith(".gz") else content)
        if golden["schema"] not in REPLAYS:
            print(f"{path}: schema {golden['schema']!r}; expected one of {', '.join(REPLAYS)}", file=sys.stderr)
            return 2
        for case in golden["cases"] if "cases" in golden else sglang.decisions(golden):
            verdict, reason = judge(REPLAYS[golden["schema"]], case)
            verdicts[verdict] += 1
            print(" ".join(filter(None, (verdict, case["name"], reason))))
    print(f"{verdicts['PASS']} passed, {verdicts['FAIL']} failed, {verdicts['SKIP']} skipped")
    return 1 if verdicts["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
