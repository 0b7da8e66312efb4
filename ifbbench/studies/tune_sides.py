"""The search over fleets with prefill and decode apart: the ratio of both sides, then the settings."""

from bisect import bisect_left
from dataclasses import replace
from functools import partial

from ifbbench.analysis.number_texts import percent, significant
from ifbbench.errors import InputError
from ifbbench.fleet.sides import gpus_of_side
from ifbbench.rundir.disaggregated import DECODE, PREFILL, SIDES
from ifbbench.settings.bounds import MAX_REPLICAS
from ifbbench.settings.engines import ENGINE_NAMES
from ifbbench.studies.tune import Tuner
from ifbbench.studies.tune_candidates import Candidate, Goal, misses_text, nearest_objective
from ifbbench.studies.tune_load import MAX_ROUNDS, ROUND_WORK
from ifbbench.studies.tune_rate import max_runs_for_replicas
from ifbbench.studies.tune_runs import Case
from ifbbench.studies.tune_search import WHOLE_STEPS
from ifbbench.studies.tune_space import Settings

# Ratios that are run with the GPUs of replicas that do both, at most.
MAX_RATIOS = 8


class SidesTuner(Tuner):
    """The search over one trace, of prefill and decode apart. Both sides have the settings that are searched, beside
    those that `--prefill` and `--decode` give to one of them."""

    # What `without_search` found.
    _fewest: Candidate | None = None

    def gpus_of_sides(self) -> tuple[int, int]:
        """GPUs of each prefill replica and of each decode replica."""
        prefill, decode = (gpus_of_side(self.base, side) for side in SIDES)
        return prefill, decode

    def without_search(self, max_gpus: int) -> Candidate | None:
        """As of Tuner. Every ratio of both sides counts."""
        best: Candidate | None = None
        for point in self.starts(self.base.tp_size)[:2]:
            best = self.judge.best_of([best, self.fewest(point, max_gpus)])
            max_gpus = max_gpus if best is None else best.gpus
        self._fewest = best
        return best

    def fewest(self, settings: Settings, max_gpus: int) -> Candidate | None:
        """The candidate with the fewest GPUs that meets the objectives; None if `max_gpus` do not. InputError if the
        settings do not run.

        More replicas of a side are taken to help. So the fewest prefill replicas are found beside as many decode
        replicas as there can be, and then the fewest of these. With each larger number of prefill replicas, as many
        decode replicas are tried as cost no more than the best pair so far. More prefill replicas may make requests
        come to the decode side at once, and miss an objective: where the largest number fails, half of it is tried."""
        prefill_gpus, decode_gpus = self.gpus_of_sides()
        max_prefill, max_decode = self._maxima(max_gpus)
        if not (max_prefill and max_decode):
            return None
        high = max_prefill
        while not self._meets(settings, high, max_decode):
            (run,) = self.runs.run([Case(settings, replicas=high, decode_replicas=max_decode)])
            if run.error:
                raise InputError(run.error)
            if high == 1:
                return None
            high //= 2
        least = 1 + bisect_left(range(1, high), True, key=lambda number: self._meets(settings, number, max_decode))
        best: Candidate | None = None
        for prefill in range(least, max_prefill + 1):
            limit = max_gpus if best is None else best.gpus
            decode = min((limit - prefill * prefill_gpus) // decode_gpus, max_decode)
            if decode < 1:
                break
            if self._meets(settings, prefill, decode):
                fewest = 1 + bisect_left(range(1, decode), True, key=partial(self._meets, settings, prefill))
                case = Case(settings, replicas=prefill, decode_replicas=fewest)
                best = self.judge.best_of([best, *self.evaluate([case])])
        return best

    def nearest(self, max_gpus: int) -> Candidate | None:
        """The ratio that meets the objectives best with so many GPUs, or with the fewest that there can be, with the
        settings from which a search starts; None if none runs. Of many ratios some are run."""
        prefill, decode = self.gpus_of_sides()
        max_gpus = max(max_gpus, prefill + decode)
        max_prefill, _ = self._maxima(max_gpus)
        numbers = sorted({1 + round(index * (max_prefill - 1) / (MAX_RATIOS - 1)) for index in range(MAX_RATIOS)})
        cases = [
            Case(point, replicas=number, decode_replicas=min((max_gpus - number * prefill) // decode, MAX_REPLICAS))
            for number in numbers
            for point in self.starts(self.base.tp_size)[:2]
        ]
        return self.judge.best_of(self.evaluate(cases))

    def _meets(self, settings: Settings, prefill: int, decode: int) -> bool:
        found = self.evaluate([Case(settings, replicas=prefill, decode_replicas=decode)])
        return bool(found) and not self.goal.shortfalls(found[0].summary)

    def _maxima(self, max_gpus: int) -> tuple[int, int]:
        """The largest number of replicas of each side, with a single one of the other side."""
        prefill, decode = self.gpus_of_sides()
        most = min(self.runs.sessions, MAX_REPLICAS)
        return min(max(max_gpus - decode, 0) // prefill, most), min(max(max_gpus - prefill, 0) // decode, most)

    def _search(self) -> None:
        """The fewest GPUs; then settings are compared on fewer of them, as long as some meet the objectives there."""
        self._progress.stage("searching")
        self.runs.on_work = self.update
        of_ratios = 2 * max_runs_for_replicas(max(self._maxima(self.max_gpus))) * self.runs.total
        of_comparing = ROUND_WORK * self.allowed_work
        self.stage("finding the fewest replicas", of_ratios, of_comparing + self._last_work)
        best = self._fewest or self.without_search(self.max_gpus)
        if best is None:
            raise InputError(f"no ratio of prefill and decode replicas meets the objectives with {self.max_gpus} GPUs.")
        self.announce(best)
        usual = self.fewest(self.starts(self.base.tp_size)[0], self.max_gpus)
        if usual is not None:
            is_server = self.space.is_server
            name = f"{ENGINE_NAMES[self.base.engine]}'s defaults" if is_server else "trtllm-bench rule"
            self.found.baselines.append(replace(usual, name=name))
        for _ in range(MAX_ROUNDS):
            case = best.run.case
            fewer = (case.replicas - 1, case.decode_replicas), (case.replicas, case.decode_replicas - 1)
            cheaper = [replace(case, replicas=one, decode_replicas=other) for one, other in fewer if one and other]
            if not cheaper:
                break
            self.stage("comparing settings on fewer replicas", of_comparing, self._last_work)
            found = self.descend(cheaper, WHOLE_STEPS, self.runs.work + of_comparing, announce=False)
            if found is None or self.goal.shortfalls(found.summary):
                break
            best = found
            self.announce(best)
        if self.load is not None:
            self.load.finish()


def ratio_text(case: Case) -> str:
    """The replicas of both sides: `2 prefill + 1 decode`."""
    return f"{case.replicas} {PREFILL} + {case.decode_replicas} {DECODE}"


def time_to_first_token(one: Candidate) -> dict[str, float]:
    """Mean seconds of a request with prefill and decode apart: until its first token (`ttft`), and of that in the
    queue of its prefill replica, in its transfer and waiting for blocks of its decode replica."""
    fleet = one.summary["fleet"]
    prefills = [part for part in fleet["replicas"] if part["side"] == PREFILL and part["requests"]["completed"]]
    completed = sum(part["requests"]["completed"] for part in prefills)
    queued_s = sum((part["queue_time_s"]["mean"] or 0.0) * part["requests"]["completed"] for part in prefills)
    transfers = fleet["transfers"]
    return {
        "ttft": one.summary["ttft_s"]["mean"] or 0.0,
        "prefill_queue": queued_s / max(completed, 1),
        "transfer": transfers["transfer_s"]["mean"] or 0.0,
        "decode_blocks": transfers["decode_wait_s"]["mean"] or 0.0,
    }


def peak_kv_use(one: Candidate, side: str) -> float:
    """The largest share of the KV cache that a replica of `side` used."""
    parts = [part["kv_blocks"] for part in one.summary["fleet"]["replicas"] if part["side"] == side]
    return max((part["peak_used"] / part["max"] for part in parts if part["max"]), default=0.0)


def measured_text(one: Candidate) -> str:
    """Where the time of requests goes with prefill and decode apart, and how full both sides are."""
    times = time_to_first_token(one)
    queued, sent, held = (significant(times[name], 1e3) for name in ("prefill_queue", "transfer", "decode_blocks"))
    kv = [percent(peak_kv_use(one, side)) for side in SIDES]
    tpot_s = one.summary["tpot_s"]["p99"]
    generation = "" if tpot_s is None else f" TPOT p99 is {significant(tpot_s, 1e3)} ms."
    parts = one.summary["fleet"]["replicas"]
    gpus = [sum(part["gpus"] for part in parts if part["side"] == side) for side in SIDES]
    return (
        f"There, {gpus[0]} of {one.gpus} GPUs compute prompts and {gpus[1]} generate; of a mean TTFT of "
        f"{significant(times['ttft'], 1e3)} ms, {queued} ms are in the queues of prefill replicas, {sent} ms in "
        f"transfers and {held} ms for blocks of decode replicas.{generation} At their peaks prefill replicas use "
        f"{kv[0]} of their KV cache, decode replicas {kv[1]}."
    )


def compared_text(together: Candidate | None, apart: Candidate | None, at_equal: Candidate | None, goal: Goal) -> str:
    """Whether prefill and decode apart pay, and why, as measured.

    together: the cheapest replicas that do both.
    apart: the cheapest pair of sides; None if none meets the objectives with the GPUs that are allowed.
    at_equal: the other form with the GPUs of the cheaper one; None if it does not run.
    """
    if apart is not None and (together is None or apart.gpus < together.gpus):
        others = "where replicas that do both do not meet the objectives with as many as were tried"
        if together is not None:
            others = f"in place of {together.gpus} that do both"
        text = f"Prefill and decode apart pay here: {apart.gpus} GPUs ({ratio_text(apart.run.case)}) {others}"
        if at_equal is not None and (missed := goal.shortfalls(at_equal.summary)):
            text += f". With {at_equal.gpus} GPUs that do both, it {misses_text(missed)}"
        return f"{text}. {measured_text(apart)}"
    if together is None:
        return ""
    if apart is not None and apart.gpus == together.gpus:
        return (
            f"Prefill and decode apart need as many GPUs as replicas that do both, {apart.gpus} "
            f"({ratio_text(apart.run.case)}): {_nearest_text(apart, goal)} apart, {_nearest_text(together, goal)} "
            f"together. {measured_text(apart)}"
        )
    needs = "" if apart is None else f" {apart.gpus} GPUs ({ratio_text(apart.run.case)}) are needed for them."
    text = (
        f"Prefill and decode apart do not pay here: {together.gpus} {'GPUs' if together.gpus > 1 else 'GPU'} that "
        f"{'do' if together.gpus > 1 else 'does'} both meet the objectives.{needs}"
    )
    if at_equal is None:
        return text
    missed = goal.shortfalls(at_equal.summary)
    of_ratios = f"With {at_equal.gpus} GPUs the nearest ratio, {ratio_text(at_equal.run.case)}, "
    does = misses_text(missed) if missed else "meets them, too"
    return f"{text} {of_ratios}{does}. {measured_text(at_equal)}"


def _nearest_text(one: Candidate, goal: Goal) -> str:
    nearest = nearest_objective(one, goal)
    if nearest is None:
        return f"a mean latency of {significant(one.summary['e2e_s']['mean'])} s"
    return f"{nearest[0]} at {percent(nearest[1])} of its limit"
