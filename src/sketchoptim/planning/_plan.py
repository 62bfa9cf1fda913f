"""A plan: where every parameter's moments will live, their bytes, and their predicted error."""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from .._formatting import text_table
from .._names import trained_parameters
from .._parsing import check_table, parse_table
from ..diagnostics import MemoryReport, ParameterMemory
from ..storage import Memory
from ..theory import error_verdict
from ._prediction import NO_ERROR, PredictedError

_REMEDY = "a plan is what Plan.to_json() writes"
_LEGEND = """\
Zipf: the exponent of row frequencies. Error: what collisions add to the second moment v of the rows
that a step touches, |estimate - v| / |v|; row: the median of (estimate - v) / v, where rare rows
weigh most. Verdict: too narrow is an error above 1, wide one below 0.05.
Sketches wider than the default, which finest="array" offers, train better on some tasks only."""


@dataclass(frozen=True)
class PlannedParameter(ParameterMemory):
    """The planned state of one parameter: its memory, its bytes, its error, and the reason."""

    memory: Memory | None
    """The memory of a table; None if the parameter stays exact because its gradients are dense."""
    error: PredictedError | None
    """The predicted error of a table's second moment; None without one."""
    exponent: float | None
    """The Zipf exponent of a table's row frequencies, measured or assumed."""
    reason: str
    sent_bytes: int
    """Bytes that a rank sends in a step so that all ranks keep the same state."""
    file_bytes: int
    """Bytes of the weights if they live in a file (`so.nn.FileEmbedding`); else 0."""
    paged_bytes: int
    """Bytes of the file's pages that a step reads and writes, at most."""

    @property
    def verdict(self) -> str:
        """ "fine", "wide" or "too narrow: ..."; empty without a sketch (`theory.error_verdict`)."""
        if self.error is None or self.error == NO_ERROR:
            return ""
        return error_verdict(self.error.relative)

    def to_dict(self) -> dict[str, Any]:
        """The planned parameter in dicts, lists, numbers and strings."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain["shape"] = list(self.shape)
        plain["memory"] = None if self.memory is None else self.memory.to_dict()
        plain["error"] = None if self.error is None else dataclasses.asdict(self.error)
        return plain

    @classmethod
    def from_dict(cls, plain: object, *, where: str = "parameter") -> "PlannedParameter":
        """The parameter that `to_dict` described; `where` is its place, for errors."""
        table = dict(check_table(plain, where=where))
        built: dict[str, Any] = {}
        for key in ("memory", "error"):
            if key not in table:
                raise ValueError(f"{where}.{key} is missing")
            built[key] = _built(key, table.pop(key), f"{where}.{key}")
        return parse_table(cls, table, where=where, **built)


@dataclass(frozen=True)
class Plan(MemoryReport):
    """The memory that `plan` chose for each parameter; printing it gives a table with the reasons.

    ``plan.memory["embedding.weight"]`` is the `Memory` of one table; ``plan.param_groups(model)``
    are groups for the optimizer. Its bytes are those that `memory_report` will measure
    (`tests/planning/test_planner.py::test_predicted_bytes_are_those_that_training_measures`).
    """

    parameters: tuple[PlannedParameter, ...]
    optimizer: str
    """The name of the optimizer that it is for, such as "Adam"."""
    budget_bytes: int
    ranks: int
    """Processes that divide the rows of the parameters; all bytes are those of one of them."""

    @property
    def sent_bytes(self) -> int:
        return sum(parameter.sent_bytes for parameter in self.parameters)

    @property
    def file_bytes(self) -> int:
        """Bytes of all weights that live in files."""
        return sum(parameter.file_bytes for parameter in self.parameters)

    @property
    def memory(self) -> dict[str, Memory]:
        """The memory of each table, by the parameter's name."""
        return {p.name: p.memory for p in self.parameters if p.memory is not None}

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Groups of named parameters to build the optimizer with, one for each memory.

        Parameters with dense gradients come first, in a group that names no memory. Frozen
        parameters are left out.
        """
        named = trained_parameters(model)
        planned = {parameter.name: parameter for parameter in self.parameters}
        if named.keys() != planned.keys():
            raise ValueError(
                "the model's trained parameters must be those of the plan; missing "
                f"in the model: {sorted(planned.keys() - named.keys())}, not in the plan: "
                f"{sorted(named.keys() - planned.keys())}; pass the model that was planned"
            )
        for name, parameter in named.items():
            if tuple(parameter.shape) != planned[name].shape:
                raise ValueError(
                    f"{name} must have shape {planned[name].shape} as in the plan, "
                    f"got {tuple(parameter.shape)}; plan again"
                )
        groups: dict[Memory | None, dict[str, Any]] = {None: {"params": []}}
        for name, parameter in named.items():
            memory = planned[name].memory
            group = groups.setdefault(memory, {"params": [], "memory": memory})
            group["params"].append((name, parameter))
        return [group for group in groups.values() if group["params"]]

    def to_json(self) -> str:
        """The plan as JSON text, which `from_json` reads."""
        plain = {
            "optimizer": self.optimizer,
            "budget_bytes": self.budget_bytes,
            "ranks": self.ranks,
            "parameters": [parameter.to_dict() for parameter in self.parameters],
        }
        return json.dumps(plain, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | Path) -> "Plan":
        """The plan that `to_json` wrote, from its text or from a file with it.

        A string is the path of a file unless it is JSON, which starts with a brace.
        """
        if not isinstance(text, str | Path):
            raise TypeError(f"text must be JSON text or a path, got {type(text).__name__}")
        if isinstance(text, Path) or not text.lstrip().startswith("{"):
            text = Path(text).read_text(encoding="utf-8")
        try:
            return cls._from_plain(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"plan must be JSON, but {error}; {_REMEDY}") from None
        except ValueError as error:
            raise ValueError(f"{error}; {_REMEDY}") from None

    @classmethod
    def _from_plain(cls, plain: object) -> "Plan":
        table = dict(check_table(plain, where="plan"))
        if "parameters" not in table:
            raise ValueError("plan.parameters is missing")
        entries = table.pop("parameters")
        if not isinstance(entries, list):
            raise ValueError(f"plan.parameters must be a list, got {entries!r}")
        parameters = tuple(
            PlannedParameter.from_dict(entry, where=f"plan.parameters[{number}]")
            for number, entry in enumerate(entries)
        )
        return parse_table(cls, table, where="plan", parameters=parameters)

    def __str__(self) -> str:
        header = (
            "parameter", "shape", "kept", "why",
            "bytes", "of exact", "Zipf", "error", "row", "verdict",
        )  # fmt: skip
        lines: list[tuple[str, ...]] = [header]
        for p in self.parameters:
            shape = " x ".join(f"{size:,}" for size in p.shape)
            share = p.state_bytes / p.exact_bytes if p.exact_bytes else 1.0
            exponent = "" if p.exponent is None else f"{p.exponent:.2f}"
            errors = ("", "")
            if p.error is not None:
                errors = (f"{p.error.relative:.2%}", f"{p.error.median:.0%}")
            sizes = (f"{p.state_bytes:,}", f"{share:.3%}", exponent, *errors)
            kept = "exact" if p.memory is None else p.memory.describe(p.shape[0])
            lines.append((p.name, shape, kept, p.reason, *sizes, p.verdict))
        totals = (f"{self.state_bytes:,}", f"{self.ratio:.3%}", "", "", "", "")
        lines.append(("total", "", "", f"of {self.budget_bytes:,} allowed", *totals))
        return "\n".join([text_table(lines, left=4), *self._notes(), _LEGEND])

    def _notes(self) -> Iterator[str]:
        """Lines below the table: tables in files, and the bytes that ranks hold and send."""
        for p in self.parameters:
            if p.file_bytes:
                yield (
                    f"{p.name}: {p.file_bytes:,} bytes of weights in a file, of which a step reads "
                    f"and writes pages of {p.paged_bytes:,} bytes at most. The state is in memory."
                )
        if self.ranks > 1:
            weights = sum(p.parameter_bytes for p in self.parameters)
            yield (
                f"Bytes are those of one of {self.ranks:,} ranks. It also holds {weights:,} bytes "
                f"of weights, and sends {self.sent_bytes:,} bytes a step for the state."
            )


def _built(key: str, value: object, where: str) -> Memory | PredictedError | None:
    """The memory or the predicted error that a value describes."""
    if value is None:
        return None
    if key == "error":
        return parse_table(PredictedError, value, where=where)
    try:
        return Memory.from_dict(value)  # type: ignore[arg-type]  # which it checks
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
