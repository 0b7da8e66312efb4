"""Generation spans with draft tokens, whose iterations yield several tokens each."""

from collections.abc import Sequence


def steps_of(first: int, last: int, extra: Sequence[tuple[int, int]]) -> list[int]:
    """Tokens of each iteration from `first` to `last`. extra: iterations with several, and how many beyond one."""
    steps = [1] * (last - first + 1)
    for iteration, more in extra:
        steps[iteration - first] += more
    return steps


def stretches_of(first: int, steps: Sequence[int], produced: int) -> list[tuple[int, int]]:
    """The last `produced` tokens of `steps`, iterations from `first` on, as [first, last] stretches of iterations with a
    token in each. Tokens that come together make several stretches, so that the gaps between them are 0."""
    again, stretches = sum(steps) - produced, list[tuple[int, int]]()
    for iteration, count in enumerate(steps, start=first):
        skipped = min(again, count)
        again -= skipped
        if count == skipped:
            continue
        if stretches and stretches[-1][1] == iteration - 1:
            stretches[-1] = (stretches[-1][0], iteration)
        else:
            stretches.append((iteration, iteration))
        stretches += [(iteration, iteration)] * (count - skipped - 1)
    return stretches
