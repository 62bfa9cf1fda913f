"""A whole model as parameter groups: its tables compressed, the rest as asked."""

import inspect
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from . import moments
from ._formatting import readable_bytes
from ._group_options import KNOWN_OPTIONS, MIN_TABLE_ROWS, nearest_option
from ._names import NAME_ATTRIBUTE, trained_parameters
from ._validation import check_positive_int
from .moments import Name, Table
from .storage import PRESETS, Memory

_ADAM: tuple[Name, ...] = ("first", "second")


def find_tables(
    model: nn.Module, min_rows: int = MIN_TABLE_ROWS, *, tables: Iterable[str] = ()
) -> dict[str, nn.Parameter]:
    """The parameters of a model that are embedding or softmax tables, by name.

    A table is a trained parameter with at least `min_rows` rows that belongs to

    - an `nn.Embedding` or `nn.EmbeddingBag`, whether its gradients are sparse or dense;
    - a layer of `sketchoptim.nn`;
    - the output head that a model of transformers gives by `get_output_embeddings()`;
    - anything that shares its weight with one of these, or is named in `tables`.

    No other layer is guessed to be one: name the weight of an `nn.Linear` that is an output head.
    Works on models on the meta device, compiled, wrapped by DDP or FSDP2, and with frozen
    parameters, which are left out. Names are those of the bare model.

    Args:
        model: Any module.
        min_rows: Smaller tables are not worth compressing.
        tables: Names of further parameters that are tables, of any size.

    >>> model = nn.Sequential(nn.Embedding(5000, 16), nn.Linear(16, 5000))
    >>> list(find_tables(model)), list(find_tables(model, tables=["1.weight"]))
    (['0.weight'], ['0.weight', '1.weight'])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    check_positive_int("min_rows", min_rows)
    trained = trained_parameters(model)
    named = [tables] if isinstance(tables, str) else list(tables)
    unknown = [name for name in named if name not in trained]
    if unknown:
        raise ValueError(
            f"tables must be names of trained parameters of the model, got {unknown}; "
            "see model.named_parameters()"
        )
    found = set(_table_parameters(model))
    return {
        name: parameter
        for name, parameter in trained.items()
        if name in named
        or (parameter in found and parameter.dim() > 1 and parameter.shape[0] >= min_rows)
    }


def _table_parameters(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            yield module.weight
        own: Any = getattr(module, "table_parameters", None)  # of a layer of sketchoptim.nn
        if own is not None:
            yield from own()
        head: Any = getattr(module, "get_output_embeddings", None)
        if callable(head) and isinstance(layer := head(), nn.Module):
            # Further down where PEFT wraps the layer; the factors that it adds are no tables.
            for name, parameter in layer.named_parameters():
                if name.endswith("weight") and "lora_" not in name:
                    yield parameter


def param_groups(
    model: nn.Module,
    memory: str | Memory = "lean",
    rest: str | Memory = "exact",
    min_rows: int = MIN_TABLE_ROWS,
    *,
    tables: Iterable[str] = (),
    no_decay: Sequence[str] = (),
    **table_options: Any,
) -> "ParamGroups":
    """Groups for one of our optimizers: the model's tables in `memory`, all else in `rest`.

    Tables are compressed whether their gradients are sparse or dense. Print the result to see
    which were found and what is saved.

    Args:
        model: Any module; see `find_tables`.
        memory: A preset's name or a `Memory`, for tables.
        rest: The same for all other parameters, such as "8-bit" for hidden layers.
        min_rows: Tables with fewer rows are among the rest.
        tables: Names of further parameters that are tables.
        no_decay: Parameters whose name contains one of these have a weight decay of zero, as with
            ``["bias", "norm"]``; case is ignored.
        table_options: Options of the tables' group, such as ``lr=0.01``.

    >>> import sketchoptim as so
    >>> model = nn.Sequential(nn.Embedding(50_000, 64), nn.Linear(64, 64))
    >>> optimizer = so.AdamW(so.param_groups(model), lr=1e-3)
    >>> print(so.param_groups(model))
    1 table, 3,200,000 of 3,204,160 weights: 25.35 KB of state instead of Adam's 25.6 MB
      0.weight  50,000 x 64  v by row x column, ratio 0.125
    2 other parameters: 33.28 KB of state
    """
    _check_table_options(table_options)
    found = find_tables(model, min_rows, tables=tables)
    kept = Memory.of(memory), Memory.of(rest)
    groups: dict[tuple[bool, bool], dict[str, Any]] = {}
    for name, parameter in trained_parameters(model).items():
        is_table = name in found
        decays = not any(word.lower() in name.lower() for word in no_decay)
        if (is_table, decays) not in groups:
            options = {"memory": kept[0 if is_table else 1], **(table_options if is_table else {})}
            groups[is_table, decays] = {
                "params": [],
                **options,
                **({} if decays else {"weight_decay": 0.0}),
            }
        groups[is_table, decays]["params"].append((name, parameter))
    if not groups:
        raise ValueError("the model must have a parameter that is trained, got none")
    return ParamGroups([groups[key] for key in sorted(groups, reverse=True)], tables=set(found))


def _check_table_options(options: Collection[str]) -> None:
    """Raises unless all are options of a group; those of a user's own optimizers are known too."""
    own = inspect.signature(param_groups).parameters.keys() - {"table_options"}
    for name in options:
        if name not in KNOWN_OPTIONS:
            nearest = nearest_option(name, {*own, *KNOWN_OPTIONS})
            remedy = f"; did you mean {nearest!r}?" if nearest else ""
            raise TypeError(f"param_groups() takes no option {name!r}{remedy}")


class ParamGroups(list[dict[str, Any]]):
    """Parameter groups; printing them gives the tables that were found, and the bytes saved."""

    def __init__(self, groups: Iterable[dict[str, Any]], *, tables: Collection[str]) -> None:
        super().__init__(groups)
        self.tables = tables
        """Names of the parameters that are tables."""

    def unnamed(self) -> list[dict[str, Any]]:
        """The groups with parameters alone, for wrappers that take no names.

        ZeroRedundancyOptimizer is one. Each parameter has its name as an attribute from then on, so
        its hash is the same as in an optimizer that is given the names.

        >>> groups = param_groups(nn.Embedding(5000, 16)).unnamed()
        >>> [list(map(type, group["params"])) for group in groups]
        [[<class 'torch.nn.parameter.Parameter'>]]
        """
        plain = []
        for group in self:
            for name, parameter in group["params"]:
                setattr(parameter, NAME_ATTRIBUTE, name)
            plain.append({**group, "params": [parameter for _, parameter in group["params"]]})
        return plain

    def __repr__(self) -> str:
        named = [(name, it, group["memory"]) for group in self for name, it in group["params"]]
        tables = [entry for entry in named if entry[0] in self.tables]
        others = [entry for entry in named if entry[0] not in self.tables]
        weights, all_weights = (sum(it.numel() for _, it, _ in part) for part in (tables, named))
        kept, exact = (_bytes(tables, memory) for memory in (None, PRESETS["exact"]))
        plural = "" if len(tables) == 1 else "s"
        lines = [
            f"{len(tables)} table{plural}, {weights:,} of {all_weights:,} weights: "
            f"{readable_bytes(kept)} of state instead of Adam's {readable_bytes(exact)}"
        ]
        for name, parameter, memory in tables:
            shape = " x ".join(f"{size:,}" for size in parameter.shape)
            lines.append(f"  {name}  {shape}  {memory.describe(parameter.shape[0])}")
        plural = "" if len(others) == 1 else "s"
        size = readable_bytes(_bytes(others, None))
        lines.append(f"{len(others)} other parameter{plural}: {size} of state")
        return "\n".join(lines)


def _bytes(named: Iterable[tuple[str, Tensor, Memory]], memory: Memory | None) -> int:
    """What Adam's moments of some parameters take, in their own memory or in a given one."""
    total = 0
    for name, parameter, own in named:
        table = Table(parameter.shape, parameter.dtype, parameter.device, name)
        for moment in _ADAM:
            storage = getattr(memory or own, moment)
            parts = () if storage is None else moments.declare(storage, moment, table)
            total += sum(part.nbytes(parameter.dtype) for part in parts)
    return total
