"""Pre-emption: a waiting request takes the place of running ones of lower priority (`preempt_to_schedule` of SGLang
0.5.23)."""

from ifbbench.engine.plan import Limit, Pause
from ifbbench.engine.request import Request
from ifbbench.schedulers.sglang.admission import PrefillPass
from ifbbench.schedulers.sglang.order import max_outputs
from ifbbench.schedulers.sglang.retraction import pause
from ifbbench.schedulers.sglang.state import Decision, SglangState


def preempt_for(state: SglangState, decision: Decision, request: Request, batch: PrefillPass) -> bool:
    """Whether running requests whose priority is lower by more than the threshold make room for a waiting one. Those
    that do join `decision.paused`."""
    missing = batch.missing_for(state.judged.get(request, 0), max_outputs(request))
    victims = set[Request]()
    for one in sorted(state.running, key=lambda one: (one.priority, -one.order[1])):
        if request.priority - one.priority <= state.rules.preemption_threshold:
            break
        victims.add(one)
        missing -= _given_up_by(state, one, batch)
        if missing <= 0:
            break
    if not victims or missing > 0:
        return False
    num_running = len(state.running)
    for count, victim in enumerate([one for one in state.running if one in victims], start=1):
        batch.release(_given_up_by(state, victim, batch))
        pause(state, decision, victim, num_running - count)
        decision.paused.append(Pause(victim, request, Limit.BATCH_SIZE))
    state.running.keep([one for one in state.running if one not in victims])
    return True


def _given_up_by(state: SglangState, request: Request, batch: PrefillPass) -> float:
    """Tokens that a running request is expected to need still."""
    return batch.expected(max_outputs(request) - request.num_outputs, state.ignores_eos(request))
