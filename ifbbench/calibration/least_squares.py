"""Non-linear least squares in few unknowns."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

STEP = 1e-4
LONGEST_STEP = 1.0
MAX_ITERATIONS = 100
CONVERGED = 1e-9
FIRST_DAMPING, LOWEST_DAMPING, HIGHEST_DAMPING = 1e-2, 1e-9, 1e9


def least_squares(residuals: Callable[[Floats], Floats], start: Floats) -> Floats:
    """The unknowns, from `start` on, at which the sum of the squared residuals is least, for all that is near.

    The method is Levenberg's and Marquardt's: a Gauss–Newton step, shortened until the sum gets smaller. Derivatives
    are differences over STEP, and no unknown moves by more than LONGEST_STEP at once, so they should be of the order
    of 1.
    """
    unknowns, damping = start, FIRST_DAMPING
    values = residuals(unknowns)
    for _ in range(MAX_ITERATIONS):
        slopes = np.stack(
            [(residuals(unknowns + STEP * unit) - values) / STEP for unit in np.eye(len(unknowns))], axis=1
        )
        square, gradient = slopes.T @ slopes, slopes.T @ values
        gain = 0.0
        while gain <= 0 and damping < HIGHEST_DAMPING:
            step = np.linalg.solve(square + damping * np.diag(np.diag(square) + LOWEST_DAMPING), -gradient)
            step = np.clip(step, -LONGEST_STEP, LONGEST_STEP)
            tried = residuals(unknowns + step)
            gain = float(values @ values - tried @ tried)
            damping = max(damping / 10, LOWEST_DAMPING) if gain > 0 else damping * 10
        if gain <= 0:
            break
        is_done = gain < CONVERGED * float(values @ values)
        unknowns, values = unknowns + step, tried
        if is_done:
            break
    return unknowns
