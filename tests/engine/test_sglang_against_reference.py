"""SGLang's scheduler and the literal transcription of its rules decide alike, and both as SGLang itself."""

import random

import pytest

from ifbbench.settings.config import HOST_WRITE_POLICIES
from tests.conformance.outcome import Case, expect_equal
from tests.conformance.sglang import END_TOKEN, MAX_ROUNDS, replay_run
from tests.conformance.sglang_workloads import draw_case
from tests.engine.sglang_reference import POLICIES, answers
from tests.engine.test_sglang_conformance import cases


def is_transcribed(case: Case) -> bool:
    """Whether the transcription has the rules of a workload."""
    settings = case["settings"]
    return settings["schedule_policy"] in POLICIES and settings["disable_priority_preemption"]


def draw_transcribed(seed: int) -> Case:
    """A random workload with the rules that are transcribed, and the answers of the transcription."""
    case = draw_case(seed)
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
    """The same with a part of the cache in host memory, and prompts that begin as earlier ones."""
    case, draw = draw_case(seed), random.Random(seed)
    prompts = [one["prompt"] for one in case["requests"]]
    for one in case["requests"]:
        if draw.random() < 0.6:
            earlier = draw.choice(prompts)[: len(one["prompt"])]
            one["prompt"] = earlier + one["prompt"][len(earlier) :]
    settings = case["settings"]
    settings |= {
        "schedule_policy": "fcfs" if settings["enable_priority_scheduling"] else draw.choice(POLICIES),
        "disable_priority_preemption": True,
        "disable_radix_cache": False,
        "num_host_pages": max(1, int(settings["num_pages"] * draw.choice([0.2, 1, 1, 3]))),
        "hicache_write_policy": draw.choice(HOST_WRITE_POLICIES),
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
