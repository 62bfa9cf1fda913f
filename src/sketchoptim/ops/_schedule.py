"""What of a rule depends on the number of the step, for kernels that count steps by themselves."""

import math
from typing import NamedTuple


class Schedule(NamedTuple):
    """The numbers behind those of a `FusedRule` that change from step to step. In step t::

    corrected = sqrt(1 - second_decay^t),  denominator = 1 - first_decay^t
    before epsilon:  step_size = rate * corrected / denominator
                     clip      = clip * denominator / corrected
    after epsilon:   step_size = rate / denominator,  second_root = corrected
                     clip      = clip * denominator
    no correction:   step_size = rate / (1 + (t - 1) * rate_decay)
    """

    step: int
    """The number of the step by the host's count."""
    rate: float
    first_decay: float = 0.0
    second_decay: float = 0.0
    is_after_eps: bool | None = None
    """Where the bias correction joins the second moment; None where there is no correction."""
    rate_decay: float = 0.0
    clip: float | None = None

    def numbers(self) -> tuple[float, float, float | None]:
        """Step size, root of the second moment's correction, and corrected clip, if any."""
        if self.is_after_eps is None:
            return self.rate / (1 + (self.step - 1) * self.rate_decay), 1.0, None
        corrected = math.sqrt(1 - self.second_decay**self.step)
        denominator = 1 - self.first_decay**self.step
        numerator = 1.0 if self.is_after_eps else corrected
        clip = None if self.clip is None else self.clip * denominator / numerator
        root = corrected if self.is_after_eps else 1.0
        return self.rate * numerator / denominator, root, clip
