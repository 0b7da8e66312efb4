"""`ifbbench capacity` of a fleet with prefill and decode apart: what the replicas of both sides hold, and which
ratio of them balances."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from msgspec.structs import replace

from ifbbench.analysis.number_texts import count, percent, significant
from ifbbench.clock import NANOSECONDS
from ifbbench.engine.plan import Limit
from ifbbench.fleet.sides import check_sides
from ifbbench.replay.disaggregated import link_rate, own_values
from ifbbench.rundir.disaggregated import DECODE, PREFILL, SIDES
from ifbbench.settings.config import RunConfig
from ifbbench.settings.engines import SGLANG, VLLM
from ifbbench.settings.fields import memory_size
from ifbbench.studies.capacity import Study, study
from ifbbench.studies.explain import Step, explain
from ifbbench.workload.trace import TraceRequest


@dataclass(frozen=True)
class Side:
    """One of both sides.

    study: study of one replica.
    at_once: requests of mean length, at their full length, that it holds; None without requests.
    iteration_s: time of a full batch: of prompts, or of all requests at once, half of their output generated.
    rate: requests per second of a replica that is always full. Both are None without requests, and on devices that are
        not simulated.
    link_rate: tokens per second that it sends or receives.
    """

    name: str
    replicas: int
    study: Study
    at_once: int | None
    iteration_s: float | None
    rate: float | None
    link_rate: float

    @property
    def total_rate(self) -> float | None:
        """Requests per second of all replicas of the side."""
        return None if self.rate is None else self.rate * self.replicas


@dataclass(frozen=True)
class SidesStudy:
    """Both sides, and what they do together.

    prompt_len: the mean; 0 without requests.
    """

    prefill: Side
    decode: Side
    prompt_len: float

    @property
    def ratio(self) -> float | None:
        """Decode replicas that take what one prefill replica computes; None if rates are not known."""
        if self.prefill.rate is None or self.decode.rate is None:
            return None
        return self.prefill.rate / self.decode.rate

    @property
    def rate(self) -> float | None:
        """Requests per second of the fleet: those of the slower side, or of the links."""
        rates = [one.total_rate for one in (self.prefill, self.decode)]
        known = [rate for rate in rates if rate is not None]
        links = [one.link_rate * one.replicas / self.prompt_len for one in (self.prefill, self.decode) if known]
        return min([*known, *links]) if len(known) == len(SIDES) else None

    def link_use(self, side: Side) -> float | None:
        """The share of the link of a replica of `side` that is in use at `rate`, where nothing of a prompt is held."""
        if self.rate is None:
            return None
        return self.rate / side.replicas * self.prompt_len / side.link_rate


def study_sides(
    config: RunConfig, requests: Sequence[TraceRequest] = (), memory_bytes: int | None = None
) -> SidesStudy:
    """As `capacity.study`, of both sides. InputError for settings that they cannot have, too."""
    check_sides(config)
    # A prefill replica makes the first token, and nothing more.
    prompts = [replace(request, max_new_tokens=1, output_len=1) for request in requests]
    sides = []
    for name, of_side in zip(SIDES, (prompts, requests), strict=True):
        own = config.of_one_replica(**own_values(config, name))
        sides.append(_side(config, name, study(own, of_side, memory_bytes)))
    prefill, decode = sides
    return SidesStudy(prefill, decode, decode.study.mean("prompt_len") if requests else 0.0)


def _side(config: RunConfig, name: str, found: Study) -> Side:
    replicas = config.prefill_replicas if name == PREFILL else config.decode_replicas
    links = link_rate(config, found.config, found.model)
    fit = found.fit_of_policy
    if fit is None:
        return Side(name, replicas, found, None, None, None, links)
    at_once = fit.at_once
    if name == DECODE and config.engine == SGLANG:
        # Tokens that stay free for each request when another one gets its pages.
        pages = found.pool.windows[0]
        tokens = pages.num_blocks * pages.attention_window.tokens_per_block
        needed = found.mean("prompt_len") + found.mean("output_len") / 2 + config.num_reserved_decode_tokens
        at_once = min(at_once, max(int(tokens / needed), 1))
    if found.config.hardware is None:
        return Side(name, replicas, found, at_once, None, None, links)
    if name == PREFILL:
        iteration_s, rate = _prefill_rate(found, at_once)
    else:
        iteration_s, rate = _decode_rate(found, at_once)
    return Side(name, replicas, found, at_once, iteration_s, rate, links)


def _prefill_rate(found: Study, at_once: int) -> tuple[float, float]:
    """Seconds of an iteration full of prompts of mean length, and prompts per second; one that is longer than the token
    budget takes several iterations."""
    length, budget = max(round(found.mean("prompt_len")), 1), found.limits.token_budget
    number = max(min(budget // length, at_once), 1)
    if length <= budget:
        iteration_s = _seconds(found, Step(((0, length),) * number, ()))
        return iteration_s, number / iteration_s
    chunks = [(start, min(budget, length - start)) for start in range(0, length, budget)]
    whole_s = sum(_seconds(found, Step((chunk,), ())) for chunk in chunks)
    return whole_s / len(chunks), 1 / whole_s


def _decode_rate(found: Study, at_once: int) -> tuple[float, float]:
    """Seconds of an iteration in which `at_once` requests generate, and requests per second."""
    output_len = found.mean("output_len")
    length = round(found.mean("prompt_len") + output_len / 2)
    iteration_s = _seconds(found, Step((), ((at_once, length),)))
    # The first token comes with the keys and values; vLLM computes it again.
    iterations = max(output_len if found.limits.engine == VLLM else output_len - 1, 1)
    return iteration_s, at_once / (iterations * iteration_s)


def _seconds(found: Study, step: Step) -> float:
    """The time of an iteration of one replica, in steady state."""
    explained = explain(found.config, step)
    device_ns, host_ns = explained.device_ns, explained.host_ns
    overlaps = found.config.overlap is not None
    return (max(device_ns, host_ns) if overlaps else device_ns + host_ns) / NANOSECONDS


def side_sentences(found: SidesStudy) -> list[str]:
    """What both sides hold and do, in sentences."""
    lines = [_holds(one) for one in (found.prefill, found.decode)]
    if found.rate is None or found.ratio is None:
        return lines
    prefill, decode = found.prefill, found.decode
    lines.append(
        f"At mean lengths and with full batches a prefill replica computes {significant(prefill.rate)} prompts a "
        f"second ({significant(prefill.iteration_s, 1e3)} ms an iteration), and a decode replica completes "
        f"{significant(decode.rate)} requests a second ({significant(decode.iteration_s, 1e3)} ms a token). They "
        f"balance with {_ratio_text(found.ratio)}."
    )
    slower = min((prefill, decode), key=lambda one: one.total_rate or inf)
    whole = slower.total_rate or inf
    bound = f"the {slower.name} side" if whole <= found.rate * (1 + 1e-9) else "the links"
    uses = [found.link_use(one) or 0.0 for one in (prefill, decode)]
    sent = found.prompt_len * decode.study.pool.bytes_per_token
    lines.append(
        f"The fleet, {prefill.replicas} prefill + {decode.replicas} decode, completes at most "
        f"{significant(found.rate)} requests a second, bound by {bound}. A prompt is {memory_size(round(sent))} of "
        f"keys and values; then the link of a prefill replica is in use {percent(uses[0])} of the time, that of a "
        f"decode replica {percent(uses[1])}."
    )
    return lines


def _holds(one: Side) -> str:
    blocks = sum(window.num_blocks for window in one.study.pool.pools)
    text = f"Each {one.name} replica has {count(blocks)} blocks"
    if one.at_once is None:
        return f"{text}."
    fit = one.study.fit_of_policy
    assert fit is not None
    bound = "its KV cache"
    if fit.at_once == one.at_once and fit.bound_by is not Limit.KV_BLOCKS:
        bound = "its batch size" if fit.bound_by is Limit.BATCH_SIZE else "its token budget"
    holds = fit.by_limit[Limit.KV_BLOCKS]
    what = "prompts, computed or kept until they are sent" if one.name == PREFILL else "requests at their full length"
    return f"{text}, room for {count(holds)} {what}; {count(one.at_once)} run at once, bound by {bound}."


def _ratio_text(ratio: float) -> str:
    """Replicas of both sides in small whole numbers."""
    if ratio >= 1:
        return f"{significant(ratio)} decode replicas for each prefill replica"
    return f"{significant(1 / ratio)} prefill replicas for each decode replica"


def side_figures(found: SidesStudy) -> dict[str, Any]:
    """What `--json` has beside the figures of each side."""
    return {
        "ratio": found.ratio,
        "requests_per_s": found.rate,
        "sides": {
            one.name: {
                "replicas": one.replicas,
                "at_once": one.at_once,
                "iteration_s": one.iteration_s,
                "requests_per_s": one.rate,
                "link_tokens_per_s": None if one.link_rate == inf else one.link_rate,
                "link_use": found.link_use(one),
            }
            for one in (found.prefill, found.decode)
        },
    }
