"""From a budget to a storage for each table, with its bytes and its error predicted."""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from .._validation import check_positive_int
from ..moments import Name
from ..optim import OPTIMIZERS, Optimizer
from ..storage import PRESETS, Granularity, Storage
from ._frequencies import RowFrequencies
from ._ladder import Finest, Ladder, Offer
from ._plan import Plan
from ._prediction import Workload
from ._shapes import ParameterShape, Source, parameter_shapes

if TYPE_CHECKING:
    OptimizerName = str
else:  # the choices that the command line offers
    OptimizerName = Literal[tuple(OPTIMIZERS)]

_ZIPF, _IDS_PER_STEP = 1.0, 4096
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def plan(
    model_or_shapes: Source,
    budget: int | float | str,
    *,
    optimizer: str | None = None,
    tables: Iterable[str | Tensor] | None = None,
    counts: Mapping[str, Any] | None = None,
    ids: Mapping[str, Any] | None = None,
    zipf: float | Mapping[str, float] = _ZIPF,
    ids_per_step: int | Mapping[str, int] = _IDS_PER_STEP,
    granularity: Granularity = "row",
    finest: Finest = "default",
    first: Storage | None = None,
    fold_when: float | None = None,
    beta2: float | None = None,
    steps: int = 10_000,
    ranks: int = 1,
) -> Plan:
    """A storage for each table: those that fit the budget with the least predicted error.

    Parameters with dense gradients are kept exact, and their bytes count. Each table gets a
    conservative count-min sketch and no first moment, as in the preset "lean", with its own width,
    at most that of lean. Bytes go where they reduce the sum of the tables' predicted relative
    errors most: tables whose rows are about equally frequent get more than skewed ones.

    A smaller error of v does not mean a better model. Collisions shorten the steps of rare rows, so
    the best learning rate differs from plan to plan. Eight times the counters of the default
    trained MACH better, an LSTM worse, and a recommender equally well (`docs/results.md`). So the
    plan leaves the rest of a larger budget unused unless `finest` allows more. An array
    decays a row only when it is touched, as SparseAdam does, while a sketch decays as a whole in
    each step: that too changes the steps of rare rows, and is not part of the error.

    Args:
        model_or_shapes: A model, also on the meta device; an optimizer; (name, shape) pairs; or a
            TOML or JSON file with a list of ``tables`` and one of ``dense`` parameters, each with
            ``name`` and ``shape``; a table may also have ``zipf``, ``counts``, ``ids_per_step`` or
            ``in_file``.
        budget: Bytes for the whole state: an int, or "200MB", "1.5GiB"; or a share of the exact
            state: a float up to 1, or "5%".
        optimizer: The name of one of our optimizers; "SGD" is planned with momentum. By default the
            given optimizer, with its own options, or else "Adam".
        tables: The parameters to compress, or their names, instead of those with sparse gradients.
        counts: By table, how often each row is touched, ``[rows]``.
        ids: By table, a sample of the ids that training looks up, such as a corpus.
        zipf: The exponent of row frequencies where they are not measured: 0 is uniform, text is 1.
        ids_per_step: Ids looked up in a step, repeated ones included.
        granularity: "row" keeps the mean over a row, "element" a number for each column.
        finest: The upper limit for every table: "default", the width of a `Sketched` without
            options, which is a counter for 8 rows, or for 5 elements; or "array", a number for
            each. Tables below 4,096 rows may always have an array, as under "lean".
        first: A storage for the tables' first moment; by default they have none.
        fold_when: Lets sketches halve while training as long as their estimated error stays below
            this bound (`Sketched`); they start at the plan's widths.
        beta2: Decay of the second moment; by default that of the optimizer.
        steps: Training steps after which errors are predicted.
        ranks: Processes that divide the rows of every parameter (FSDP2, DTensor's ``Shard(0)``).
            Budget and bytes are those of one of them. Arrays are divided, sketches are not: all
            ranks keep the same, and send bytes for that in each step.

    >>> shapes = [("embedding", (33_278, 256)), ("softmax", (33_278, 256))]
    >>> chosen = plan(shapes, "50KB")
    >>> chosen.state_bytes <= 50_000, chosen.ratio < 0.001
    (True, True)
    >>> plan(shapes, 100)
    Traceback (most recent call last):
    ...
    ValueError: budget must be at least 2,752 bytes for these shapes, got 100
    """
    example = _example_optimizer(model_or_shapes, optimizer)
    parameters = parameter_shapes(model_or_shapes, tables)
    check_positive_int("ranks", ranks)
    in_files = [parameter.name for parameter in parameters if parameter.is_in_file]
    if ranks > 1 and in_files:
        raise ValueError(
            f"ranks must be 1 for a table in a file, which one process trains, got {ranks} for "
            f"{in_files[0]!r}"
        )
    offer = Offer(
        names=_moment_names(model_or_shapes, example),
        granularity=granularity,
        first=first,
        fold_when=fold_when,
        finest=finest,
        fill=example.fill(example.param_groups[0]),
        ranks=ranks,
    )
    allowed = budget_bytes(budget, sum(map(offer.exact_bytes, parameters)))
    decay = _decay(example) if beta2 is None else beta2
    known = _Known(counts or {}, ids or {}, zipf, ids_per_step, decay, steps)
    known.check(parameters)
    ladders = [Ladder.of(parameter, offer, known.workload(parameter)) for parameter in parameters]
    chosen = _allocate(ladders, allowed)
    planned = (ladder.plan_at(rung) for ladder, rung in zip(ladders, chosen, strict=True))
    return Plan(tuple(planned), type(example).__name__, allowed, ranks)


def budget_bytes(budget: int | float | str, exact_bytes: int) -> int:
    """The bytes that a budget allows: a number of them, "200MB", or a share of the exact state.

    >>> budget_bytes("1.5GiB", 10**12), budget_bytes(0.01, 10**12), budget_bytes("5%", 1000)
    (1610612736, 10000000000, 50)
    """
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*([\d_.,]+)\s*([A-Za-z]*|%)\s*", budget)
        number = match[1].replace(",", "").replace("_", "") if match else ""
        if match is None or not re.fullmatch(r"\d+(\.\d*)?|\.\d+", number):
            raise ValueError(
                f'budget must be like 200000000, "200MB", "1.5GiB" or "5%", got {budget!r}'
            )
        if match[2] == "%":
            return budget_bytes(float(number) / 100, exact_bytes)
        units = {unit.lower(): factor for unit, factor in _UNITS.items()}
        if match[2].lower() not in units:
            raise ValueError(
                f"the unit of a budget must be one of {list(_UNITS)}, got {match[2]!r}"
            )
        found = float(number) * units[match[2].lower()]
        if units[match[2].lower()] == 1 and found != int(found):
            raise ValueError(f'budget must be whole bytes, or a share like "50%", got {budget!r}')
        return int(found)
    if isinstance(budget, bool) or not isinstance(budget, Real):  # NumPy's numbers are Real too
        raise TypeError(f"budget must be bytes, a share or a string, got {budget!r}")
    if not isinstance(budget, Integral):
        if not 0 < budget <= 1:
            raise ValueError(f"a float budget is a share of exact state, in (0, 1], got {budget}")
        return int(float(budget) * exact_bytes)
    if budget < 0:
        raise ValueError(f"budget must be >= 0 bytes, got {budget}")
    return int(budget)


@dataclass(frozen=True)
class _Known:
    """How training touches rows, by table or for all tables."""

    counts: Mapping[str, Any]
    ids: Mapping[str, Any]
    zipf: float | Mapping[str, float]
    ids_per_step: int | Mapping[str, int]
    decay: float
    steps: int

    def check(self, parameters: Sequence[ParameterShape]) -> None:
        """Raises if a name is not that of a table."""
        tables = [parameter.name for parameter in parameters if parameter.is_table]
        for option in ("counts", "ids", "zipf", "ids_per_step"):
            given = getattr(self, option)
            if isinstance(given, Mapping) and (unknown := sorted(set(given).difference(tables))):
                raise ValueError(
                    f"{option} must be given for tables, which are {tables}; got {unknown}"
                )

    def workload(self, parameter: ParameterShape) -> Workload | None:
        """How training touches a table; None for any other parameter."""
        if not parameter.is_table:
            return None
        per_step = parameter.ids_per_step
        if per_step is None:
            per_step = _for_table(self.ids_per_step, parameter.name, _IDS_PER_STEP)
        return Workload(
            frequencies=self._frequencies(parameter),
            ids_per_step=per_step,
            decay=self.decay,
            steps=self.steps,
        )

    def _frequencies(self, table: ParameterShape) -> RowFrequencies:
        rows = table.shape[0]
        if table.name in self.counts:
            found = RowFrequencies.of_counts(self.counts[table.name])
        elif table.name in self.ids:
            found = RowFrequencies.of_ids(self.ids[table.name], rows=rows)
        elif table.frequencies is not None:
            found = table.frequencies
        else:
            found = RowFrequencies.zipf(rows, exponent=_for_table(self.zipf, table.name, _ZIPF))
        if found.total_rows != rows:
            raise ValueError(
                f"counts of {table.name!r} must be {rows:,}, one per row, got {found.total_rows:,}"
            )
        return found


def _allocate(ladders: Sequence[Ladder], allowed: int) -> list[int]:
    """A rung for each ladder: what reduces the summed error most for its bytes goes first."""
    bytes_at = [ladder.state_bytes for ladder in ladders]
    smallest = sum(sizes[0] for sizes in bytes_at)
    if smallest > allowed:
        dense = sum(ladder.state_bytes[0] for ladder in ladders if ladder.rungs[0].memory is None)
        remedy = (
            f"; {dense:,} of them are exact state of parameters with dense gradients: "
            "name large ones as tables to compress them"
            if dense
            else ""
        )
        raise ValueError(
            f"budget must be at least {smallest:,} bytes for these shapes, got {allowed:,}{remedy}"
        )
    if sum(sizes[-1] for sizes in bytes_at) <= allowed:
        return [len(sizes) - 1 for sizes in bytes_at]
    chosen, left = [0] * len(ladders), allowed - smallest
    sizes = [np.array(sizes, dtype=np.float64) for sizes in bytes_at]
    errors = [ladder.errors() for ladder in ladders]
    while True:
        best_gain, best = 0.0, None
        for number, (size, error, rung) in enumerate(zip(sizes, errors, chosen, strict=True)):
            cost = size[rung + 1 :] - size[rung]
            gain = np.where(cost <= left, error[rung] - error[rung + 1 :], 0.0) / cost
            if gain.size and gain.max() > best_gain:
                best_gain, best = float(gain.max()), (number, rung + 1 + int(gain.argmax()))
        if best is None:
            return chosen
        number, rung = best
        left -= bytes_at[number][rung] - bytes_at[number][chosen[number]]
        chosen[number] = rung


def _example_optimizer(source: Source, name: str | None) -> Optimizer:
    """An optimizer whose rule is planned for: the given one, or a new one of the kind."""
    if isinstance(source, Optimizer) and name in (None, type(source).__name__):
        return source
    kind = _kind(source, name)
    # Not constructed: torch would import its compiler, which takes two seconds. Neither rules nor
    # storages read more of an optimizer than the options of a group.
    example = kind.__new__(kind)
    defaults = _default_options(kind)
    given = source.param_groups if isinstance(source, torch.optim.Optimizer) else [{}]
    example.param_groups = [
        {**defaults, **{option: group[option] for option in defaults.keys() & group.keys()}}
        for group in given
    ]
    return example


def _default_options(kind: type[Optimizer]) -> dict[str, Any]:
    """The options of a group of an optimizer that is built with parameters alone."""
    found: dict[str, Any] = {}
    constructors = (vars(base).get("__init__") for base in reversed(kind.__mro__))
    for constructor in filter(None, constructors):
        for option in inspect.signature(constructor).parameters.values():
            if option.default is not inspect.Parameter.empty:
                found[option.name] = option.default
    return found


def _kind(source: Source, name: str | None) -> type[Optimizer]:
    if name is None and isinstance(source, torch.optim.Optimizer):
        for kind in OPTIMIZERS.values():
            if type(source) in kind.torch_twins:
                return kind
        name = type(source).__name__
    names = {known.lower(): known for known in OPTIMIZERS}  # recipes write them in lower case
    found = names.get(str(name or "Adam").lower())
    if found is None:
        raise ValueError(f"optimizer must be one of {list(OPTIMIZERS)}, got {name!r}")
    return OPTIMIZERS[found]


def _moment_names(source: Source, example: Optimizer) -> tuple[Name, ...]:
    """The moments that a given optimizer keeps, or all of the algorithm."""
    if not isinstance(source, torch.optim.Optimizer):
        return example.moment_names
    exact = PRESETS["exact"]
    kept = {name for group in example.param_groups for name in example.storages(group, exact)}
    return tuple(name for name in example.moment_names if name in kept)


def _decay(example: Optimizer) -> float:
    """The decay of the second moment; 0 where the algorithm has none."""
    group = example.param_groups[0]
    rule = example.rule(group, 1, memory=PRESETS["exact"], is_sparse=True)
    return 0.0 if rule.second is None else rule.second.decay


def _for_table(given: Any, name: str, otherwise: Any) -> Any:
    return given.get(name, otherwise) if isinstance(given, Mapping) else given
