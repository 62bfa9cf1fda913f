"""How the numbers of a rule depend on the number of the step."""

import math
from typing import NamedTuple


class Numbers(NamedTuple):
    """What a step multiplies, divides and clips by."""

    step_size: float
    second_root: float
    """The square root of the second moment's bias correction."""
    clip: float | None


class Schedule(NamedTuple):
    """The step of a rule, and what its number changes. In step t::

    corrected = sqrt(1 - second_decay^t),  denominator = 1 - first_decay^t
    before epsilon:  step_size <- step_size * corrected / denominator
                     clip      <- clip * denominator / corrected
    after epsilon:   step_size <- step_size / denominator,  second_root <- corrected
                     clip      <- clip * denominator
    no correction:   step_size <- step_size / (1 + (t - 1) * rate_decay)

    The clip is a bound for the step, which has the bias correction in it; the direction has not.
    """

    step: int
    """The number of the step by the host's count."""
    first_decay: float = 0.0
    second_decay: float = 0.0
    is_after_eps: bool | None = None
    """Whether eps is added after the bias correction of v, as in dense Adam; None without one."""
    rate_decay: float = 0.0

    def applied(self, numbers: Numbers) -> Numbers:
        """The numbers of this step."""
        step_size, _, clip = numbers
        if self.is_after_eps is None:
            rate = step_size / (1 + (self.step - 1) * self.rate_decay)
            return numbers._replace(step_size=rate)
        corrected = math.sqrt(1 - self.second_decay**self.step)
        denominator = 1 - self.first_decay**self.step
        numerator = 1.0 if self.is_after_eps else corrected
        return Numbers(
            step_size * numerator / denominator,
            corrected if self.is_after_eps else 1.0,
            None if clip is None else clip * denominator / numerator,
        )
