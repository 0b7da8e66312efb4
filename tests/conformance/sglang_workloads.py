"""Random workloads for SGLang's scheduler, in the form of its cases."""

import random
from collections.abc import Callable
from typing import Any

from ifbbench.settings.groups.sglang import EVICTION_POLICIES, HOST_WRITE_POLICIES, SCHEDULE_POLICIES


def draw_case(seed: int) -> dict[str, Any]:
    """A workload without answers: requests that share prefixes, and a cache that is often short."""
    draw = random.Random(seed)
    page, has_priorities = draw.choice([1, 1, 1, 4, 16]), draw.random() < 0.3
    longest, most, count = draw.choice([30, 120, 400]), draw.choice([5, 30, 120, 300]), draw.randint(3, 40)
    ignores_eos = draw.random() < 0.15
    roots = [[draw.randrange(10, 60) for _ in range(longest)] for _ in range(3)]
    requests = list[dict[str, Any]]()
    for number in range(count):
        length = draw.randint(1, longest)
        shared = draw.randint(0, length) if draw.random() < 0.6 else 0
        prompt = draw.choice(roots)[:shared] + [draw.randrange(10, 60) for _ in range(length - shared)]
        outputs = draw.randint(1, most)
        ends_early = draw.random() < 0.5 and not ignores_eos
        requests.append(
            {
                "id": number,
                "round": 0 if draw.random() < 0.4 else draw.randint(0, count * 8),
                "prompt": prompt,
                "max_new_tokens": outputs,
                "output_len": draw.randint(1, outputs) if ends_early else outputs,
                "priority": draw.choice([0, 5, 20, 40]),
            }
        )
    needed = max(len(one["prompt"]) + one["max_new_tokens"] for one in requests) + 2 * page + 2
    disables_tree, chunk = draw.random() < 0.2, draw.choice([None, 16, 32, 64, 256, 1024])
    policies = ["fcfs", "fcfs", "lof"] if has_priorities else [*SCHEDULE_POLICIES, "fcfs", "fcfs"]
    refused = {"random"} | ({"shortest-prefill-first"} if disables_tree else set())
    preempts = has_priorities and draw.random() < 0.5
    return {
        "name": f"sglang-{seed}",
        "settings": {
            "page_size": page,
            "num_pages": int(needed * draw.choice([1.05, 1.3, 2, 4, 10])) // page + 2,
            "max_running_requests": draw.choice([2, 4, 8, 64]),
            "schedule_policy": draw.choice([one for one in policies if one not in refused]),
            "schedule_conservativeness": draw.choice([0.02, 0.1, 0.3, 1.0, 1.5]),
            "chunked_prefill_size": chunk,
            "max_prefill_tokens": draw.choice([64, 512, 16_384]),
            "prefill_max_requests": draw.choice([None, None, None, 2]),
            # Under pre-emption, a mixed batch leaves lengths behind that SGLang goes by once more; ours does not.
            "enable_mixed_chunk": draw.random() < 0.3 and not preempts,
            "disable_radix_cache": disables_tree,
            "radix_eviction_policy": draw.choice([*EVICTION_POLICIES, "lru", "lru", "lru"]),
            "disable_overlap_schedule": draw.random() < 0.4,
            "retraction_policy": "priority" if has_priorities and draw.random() < 0.5 else "length",
            "enable_priority_scheduling": has_priorities,
            "disable_priority_preemption": not preempts,
            "priority_scheduling_preemption_threshold": draw.choice([0, 10]),
            "ignore_eos": ignores_eos,
        },
        "requests": requests,
    }


def draw_chunks(seed: int) -> dict[str, Any]:
    """Long prompts in chunks, which are seldom whole pages, and a cache that holds two of them."""
    case, draw = draw_case(seed), random.Random(seed)
    settings, requests = case["settings"], case["requests"]
    for one in requests:
        one["prompt"] = one["prompt"] + [draw.randrange(10, 60) for _ in range(draw.randint(0, 400))]
    chunk = draw.choice([20, 50, 100])
    settings |= {
        "chunked_prefill_size": max(chunk, settings["page_size"]),
        "max_running_requests": 64,
        "num_pages": _pages_of_longest(case, draw.choice([1.1, 1.5, 2.5])),
    }
    if not settings["enable_priority_scheduling"] and not settings["disable_radix_cache"] and draw.random() < 0.4:
        settings["schedule_policy"] = "shortest-prefill-first"
    return case


def draw_retractions(seed: int) -> dict[str, Any]:
    """Requests that come one after the other and have all the outputs that they may have, of which few are expected, in
    a cache that holds two or three."""
    case, draw = draw_case(seed), random.Random(seed)
    apart = draw.choice([1, 2, 4])
    for one in case["requests"]:
        outputs = draw.randint(40, 200)
        one |= {
            "prompt": one["prompt"][: draw.choice([20, 60])],
            "max_new_tokens": outputs,
            "output_len": outputs,
            "round": one["id"] * apart,
        }
    case["settings"] |= {
        "ignore_eos": False,
        "schedule_conservativeness": 0.02,
        "max_running_requests": 64,
        "num_pages": _pages_of_longest(case, draw.choice([2, 3])),
    }
    return case


def draw_hosted(seed: int) -> dict[str, Any]:
    """A part of the cache in host memory, and prompts that begin as earlier ones."""
    case, draw = draw_case(seed), random.Random(seed)
    prompts = [one["prompt"] for one in case["requests"]]
    for one in case["requests"]:
        if draw.random() < 0.6:
            earlier = draw.choice(prompts)[: len(one["prompt"])]
            one["prompt"] = earlier + one["prompt"][len(earlier) :]
    settings = case["settings"]
    settings |= {
        "disable_radix_cache": False,
        "num_host_pages": max(1, int(settings["num_pages"] * draw.choice([0.2, 1, 1, 3]))),
        "hicache_write_policy": draw.choice(HOST_WRITE_POLICIES),
    }
    return case


def _pages_of_longest(case: dict[str, Any], count: float) -> int:
    """Pages for so many of the longest request."""
    page = int(case["settings"]["page_size"])
    longest = max(len(one["prompt"]) + one["max_new_tokens"] for one in case["requests"]) + 2 * page + 2
    return int(count * longest) // page + 2


WORKLOADS: dict[str, Callable[[int], dict[str, Any]]] = {
    "mixed": draw_case,
    "chunks": draw_chunks,
    "retractions": draw_retractions,
    "host": draw_hosted,
}
