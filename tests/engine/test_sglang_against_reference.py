"""SGLang's scheduler and the literal transcription of its rules decide alike, and both as SGLang itself."""

import random

import pytest

from tests.conformance.outcome import Case, expect_equal
from tests.conformance.sglang import END_TOKEN, MAX_ROUNDS, replay_run
from tests.conformance.sglang_workloads import WORKLOADS, draw_hosted
from tests.engine.sglang_reference import POLICIES, answers
from tests.engine.test_sglang_conformance import cases


def is_transcribed(case: Case) -> bool:
    """Whether the transcription has the rules of a workload."""
    settings = case["settings"]
    return settings["schedule_policy"] in POLICIES and settings["disable_priority_preemption"]


def draw_transcribed(seed: int, kind: str = "mixed") -> Case:
    """A random workload with the rules that are transcribed, and the answers of the transcription."""
    case = WORKLOADS[kind](seed)
    policy = random.Random(seed).choice(POLICIES)
    if case["settings"]["enable_priority_scheduling"] and policy == "lpm":
        policy = "fcfs"
    case["settings"] |= {"schedule_policy": policy, "disable_priority_preemption": True}
    return case | {"batches": answers(case, END_TOKEN, MAX_ROUNDS)}


@pytest.mark.parametrize("case", [case for case in cases() if is_transcribed(case)], ids=lambda case: case["name"])
def test_the_transcription_decides_as_sglang(case: Case) -> None:
    for index, (found, expected) in enumerate(zip(answers(case, END_TOKEN, MAX_ROUNDS), case["batches"], strict=True)):
        expect_equal(f"batch {index}", found, expected)


def draw_with_host(seed: int) -> Case:
    """The same with host memory."""
    case, policy = draw_hosted(seed), random.Random(seed).choice(POLICIES)
    settings = case["settings"]
    settings |= {
        "schedule_policy": "fcfs" if settings["enable_priority_scheduling"] else policy,
        "disable_priority_preemption": True,
    }
    return case | {"batches": answers(case, END_TOKEN, MAX_ROUNDS)}


BATCHES = [0, *[pytest.param(first, marks=pytest.mark.slow) for first in range(30, 630, 30)]]


@pytest.mark.parametrize("first", BATCHES)
def test_host_memory_is_used_as_its_transcription_does(first: int) -> None:
    for seed in range(first, first + 30):
        replay_run(draw_with_host(seed))


@pytest.mark.parametrize("first", [0, *[pytest.param(first, marks=pytest.mark.slow) for first in range(30, 630, 30)]])
def test_the_scheduler_decides_as_its_transcription(first: int) -> None:
    for seed in range(first, first + 30):
        replay_run(draw_transcribed(seed))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chunks", "retractions"])
def test_cuts_and_retractions_are_those_of_the_transcription(kind: str) -> None:
    for seed in range(20):
        replay_run(draw_transcribed(seed, kind))
