"""What a fleet with prefill and decode apart did: where requests spent their time on both sides, and between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ifbbench.analysis.fleet_changes import FleetChanges
from ifbbench.analysis.number_texts import count, percent, significant
from ifbbench.analysis.words import words_of
from ifbbench.rundir.disaggregated import DECODE_BLOCKS, ROUTER, reserves_first
from ifbbench.rundir.figures import PART_OF_ATTRIBUTION
from ifbbench.rundir.metrics import TRANSFER
from ifbbench.rundir.reader import RunData
from ifbbench.settings.fields import memory_size
from ifbbench.settings.groups.fleet import BY_WHOLE

if TYPE_CHECKING:
    import pandas as pd

# A wait is named as what limits the fleet if it takes such a share of the time until the first token.
MATTERS = 0.1


@dataclass(frozen=True)
class SideTimes:
    """Seconds of all completed requests together: until an iteration of a prefill replica ran them, in transfers,
    waiting for blocks of decode replicas, in all, and until their first tokens.

    load_s: time in loads from stores, which neither the queues nor the transfers include.
    """

    prefill_queue_s: float
    transfer_s: float
    decode_wait_s: float
    e2e_s: float
    ttft_s: float
    load_s: float


class SidesFindings:
    """Findings of the run directory of such a fleet."""

    def __init__(self, run: RunData) -> None:
        self.run = run
        fleet = (run.summary or {}).get("fleet") or {}
        self.transfers: Mapping[str, Any] = fleet.get("transfers") or {}
        self.changes = FleetChanges(run, fleet.get("events") or [], fleet.get("replicas") or [])

    @cached_property
    def times(self) -> SideTimes:
        done = self.run.completed
        prefilled = done[done["prefill_replica"].notna()]
        queued_s, decode_wait_s = float(prefilled["queue_time_s"].sum()), _seconds(done, DECODE_BLOCKS)
        config = self.run.config
        if reserves_first(config["engine"], config.get("transfer_by", BY_WHOLE)):  # they wait before the prefill
            queued_s -= decode_wait_s
        if "retries" in prefilled:  # the time of earlier attempts is no one's queue
            queued_s -= _seconds(prefilled[prefilled["retries"].notna()], ROUTER)
        transfer_s, load_s = _seconds(done, TRANSFER), 0.0
        if (self.run.summary or {}).get("kv_tiers"):
            sent = prefilled[prefilled["decode_replica"].notna()]
            transfer_s = float((sent["transfer_end_s"] - sent["transfer_start_s"]).sum()) if len(sent) else 0.0
            load_s = max(0.0, round(_seconds(done, TRANSFER) - transfer_s, 9))
            # Loads on a decode replica, after a pause, are in no queue; they are rare.
            queued_s -= min(load_s, queued_s)
        return SideTimes(
            queued_s, transfer_s, decode_wait_s, float(done["e2e_s"].sum()), float(done["ttft_s"].sum()), load_s
        )

    def sentences(self) -> list[str]:
        """The findings in words."""
        times, transfers = self.times, self.transfers
        found = self.changes.failure_sentences()
        if transfers.get("count"):
            mean_s, slow_s = transfers["transfer_s"]["mean"], transfers["transfer_s"]["p99"]
            found.append(
                f"{count(transfers['count'])} transfers moved {memory_size(transfers['bytes'])} of keys and values, in "
                f"{significant(mean_s * 1e3)} ms each on average (p99 {significant(slow_s * 1e3)} ms)."
            )
        if local := transfers.get("local_requests"):
            found.append(f"Decode replicas computed {count(local)} prompts themselves.")
        lost = {
            "in the queues of prefill replicas": times.prefill_queue_s,
            "in transfers": times.transfer_s,
            "waiting for blocks of decode replicas": times.decode_wait_s,
        }
        if (self.run.summary or {}).get("kv_tiers"):
            lost["in loads from stores"] = times.load_s
        *texts, last = [f"{significant(spent)} request-seconds {what}" for what, spent in lost.items()]
        share = percent(sum(lost.values()) / times.ttft_s) if times.ttft_s else "none"
        found.append(f"Requests spent {', '.join(texts)} and {last}: {share} of the time until first tokens.")
        found.append(self._limit(lost))
        return found

    def _limit(self, lost: Mapping[str, float]) -> str:
        """Which side, or the link, holds requests back most."""
        what, spent = max(lost.items(), key=lambda one: one[1])
        if spent < MATTERS * self.times.ttft_s:
            return "Neither a side nor the link between them held requests back much."
        side = {
            "in the queues of prefill replicas": "The prefill side holds requests back most",
            "in transfers": "The link between the sides holds requests back most",
            "in loads from stores": "The stores hold requests back most",
            "waiting for blocks of decode replicas": "The KV caches of the decode side hold requests back most",
        }[what]
        return f"{side} ({percent(spent / self.times.ttft_s)} of the time until first tokens)."

    def request_sentences(self, row: Mapping[str, Any]) -> list[str]:
        """What one request did. row: of the table of requests."""
        words, parts = words_of(self.run.config), attribution_of(row)
        places = [
            f"{side} replica {int(row[f'{side}_replica'])}"
            for side in ("prefill", "decode")
            if row[f"{side}_replica"] == row[f"{side}_replica"] and row[f"{side}_replica"] is not None
        ]
        found = [f"Request {row['request_id']} went to {' and then to '.join(places)}."]
        if not parts:
            return [*found, f"It did not complete: {row['error']}"]
        found.append(f"It took {significant(row['e2e_s'])} s:")
        longest = sorted(parts.items(), key=lambda item: -item[1])
        found += [f"  {significant(spent * 1e3)} ms {words.part_name(name)}" for name, spent in longest if spent > 0]
        return found

    def as_dict(self) -> dict[str, Any]:
        """The findings for `why --json`."""
        failures = {"failures": self.changes.failures} if self.changes.failures else {}
        return failures | {
            "run": str(self.run.path),
            "times": vars(self.times),
            "transfers": self.transfers,
            "text": " ".join(self.sentences()),
        }


def attribution_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The seconds of a request by what it did or waited for. row: of the table of requests."""
    return {
        name.removeprefix(PART_OF_ATTRIBUTION): float(spent)
        for name, spent in dict(row).items()
        if name.startswith(PART_OF_ATTRIBUTION) and spent == spent
    }


def _seconds(requests: "pd.DataFrame", part: str) -> float:
    """Seconds of all `requests` in a part of their attribution."""
    name = f"{PART_OF_ATTRIBUTION}{part}"
    return float(requests[name].sum()) if name in requests else 0.0
