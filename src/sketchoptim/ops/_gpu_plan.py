"""The launches of one kind of step of one parameter, built once and then only given new inputs."""

from array import array
from collections.abc import Sequence
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ._gpu_launches import OPTIONS, Bound, Kind, Launch, bits_of, launches
from ._rule import FusedRule
from ._triton import prepare, rows
from ._triton.together import WORDS

if TYPE_CHECKING:
    from ._gpu_together import Family

# What kernels are given in each step: its number, a key of rounding, step size and shrinkage.
NUMBERS = ("expected_step", "weights_key", "step_size", "shrink")
PIECE = int(rows.PIECE.value)
KEYS_AT_ONCE = 1024
# Tables that are sorted together have ids that begin at multiples of this: addresses of their rows
# are moved back by as many, and stay multiples of 16 bytes.
ROWS_ALIGNED = 16
_ALIGNMENT = 16
_numbers = count(1)
WORD = {name: number for number, name in enumerate(WORDS)}

# What of a rule stays the same in the steps that a plan is for, beside its schedule.
_CHANGING = ("step_size", "shrink", "schedule")
_constants_of = attrgetter(*(it for it in FusedRule._fields if it not in _CHANGING))


class RuleNumbers:
    """What plans need of a rule, computed once for all tables of a group."""

    __slots__ = ("constants", "rule", "words")

    _last: "ClassVar[RuleNumbers | None]" = None

    def __init__(self, rule: FusedRule, previous: "RuleNumbers | None") -> None:
        schedule = rule.schedule
        self.rule = rule
        step = -1 if schedule is None else schedule.step
        self.words = step, *bits_of(rule.step_size, rule.shrink)
        constants = _constants_of(rule), None if schedule is None else schedule[1:]
        if previous is not None and previous.constants == constants:
            constants = previous.constants  # the same object while nothing has changed
        self.constants: tuple[object, object] = constants

    @classmethod
    def of(cls, rule: FusedRule) -> "RuleNumbers":
        found = cls._last
        if found is None or found.rule is not rule:
            found = cls._last = cls(rule, found)
        return found


class Plan:
    """What a kind of step launches, for its table alone or as a row of words among others.

    Args:
        bound: The parameter, its moments, and where they are in memory.
        rule: Its numbers, all but step size and shrinkage, are those of all steps.
        kind: Of the step.
    """

    family: "Family | None"
    """Launches that take this table with others."""

    def __init__(self, bound: Bound, rule: FusedRule, kind: Kind) -> None:
        self.bound, self.kind, self.dim = bound, kind, bound.dim
        self.number = next(_numbers)
        self.launches = launches(bound, rule, kind)
        self.is_sorting = not (kind.is_dense or kind.is_empty or kind.is_sorted)
        self.has_row_values = bound.second.is_by_row and rule.second is not None
        self.keys = torch.int32 if bound.rows < 2**31 - ROWS_ALIGNED else torch.int64
        names = {"ids": None, "keys": None, "row_count": bound.rows, "least_id": 0}
        self.sort = Launch(
            prepare.collect_keys, (1,), {**names, "count": 0, "BLOCK": KEYS_AT_ONCE}, OPTIONS,
            rows=KEYS_AT_ONCE,
        )  # fmt: skip
        blank = bound.first.blank
        self.unused = {
            "ids": blank.words, "order": blank.words, "partials": blank.numbers,
            "row_values": blank.numbers,
        }  # fmt: skip
        found = {name: it for launch in self.launches for name, it in launch.arguments.items()}
        self.words = array("q", [_word(found.get(name)) for name in WORDS])
        self.kept = tuple(it for it in found.values() if isinstance(it, Tensor))
        self.row_bytes = {
            "parameter": bound.dim * bound.parameter.element_size(),
            **bound.first.row_bytes("first", bound.dim),
            **bound.second.row_bytes("second", bound.dim),
        }
        aligned = (bound.parameter, bound.first.data, bound.second.data)
        self.is_aligned = (
            kind.is_aligned
            and self.row_bytes["parameter"] % _ALIGNMENT == 0
            and not any(it.data_ptr() % _ALIGNMENT for it in aligned)
        )

    def run_(
        self, ids: Tensor | None, values: Tensor, positions: int, numbers: Sequence[int]
    ) -> None:
        """Launches a step along the ids of a sparse gradient, or a dense one."""
        inputs: dict[str, Any] = {**self.unused, "entries": values, "count": positions}
        inputs.update(zip(NUMBERS, numbers, strict=True))
        if ids is not None:
            inputs["ids"] = ids
        if self.is_sorting:
            inputs["keys"] = values.new_empty(positions, dtype=self.keys)
            self.sort.give_(inputs)
            self.sort.run_()
            self.sort.release_()
            inputs["ids"], inputs["order"] = inputs["keys"].sort(stable=True)
        if self.kind.has_pieces:
            inputs["partials"] = self._floats(self.partials_of(positions))
        if self.has_row_values:
            inputs["row_values"] = self._floats(positions)
        for launch in self.launches:
            launch.give_(inputs)
            launch.run_()
            launch.release_()

    def partials_of(self, positions: int) -> int:
        """How many numbers the partial sums of so many entries are."""
        return -(-positions // PIECE) * self.dim if self.kind.has_pieces else 0

    def _floats(self, size: int) -> Tensor:
        return self.bound.ledger.new_empty(size, dtype=torch.float32)

    def shifted_words(self, least_id: int) -> "array[int]":
        """Its words for ids that begin at a number; addresses of rows move back by as many."""
        words = self.words[:]
        for name, length in self.row_bytes.items():
            words[WORD[name]] -= least_id * length
        words[WORD["first_row"]] -= least_id
        words[WORD["least_id"]] = least_id
        return words


def _word(argument: Any) -> int:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return 0 if argument is None else int(argument)
