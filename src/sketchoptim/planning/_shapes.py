"""Names, shapes and dtypes of the parameters of a plan, from a model, an optimizer or a file."""

import json
import math
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from .._group_options import compresses_dense
from .._names import named_parameters, trained_parameters
from .._parsing import parse_table
from ..deferred import is_row_sparse
from ._frequencies import RowFrequencies

Source = nn.Module | torch.optim.Optimizer | str | Path | Iterable[tuple[str, Iterable[int]]]


@dataclass(frozen=True, kw_only=True)
class ParameterShape:
    """One parameter without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    is_table: bool
    """Whether its state is to be compressed, as that of parameters with sparse gradients."""
    frequencies: RowFrequencies | None = None
    ids_per_step: int | None = None
    is_in_file: bool = False
    """Whether its weights live in a file, as those of `so.nn.FileEmbedding` do."""

    def __post_init__(self) -> None:
        if not all(isinstance(size, int) and size >= 0 for size in self.shape):
            raise ValueError(
                f"the shape of {self.name!r} must be whole numbers >= 0, got {self.shape}"
            )
        if self.is_table and (not self.shape or 0 in self.shape):
            raise ValueError(f"the table {self.name!r} must have rows, got shape {self.shape}")

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def parameter_shapes(
    source: Source, tables: Iterable[str | Tensor] | None = None
) -> list[ParameterShape]:
    """The parameters of a model, an optimizer, a file of shapes, or a list of (name, shape).

    `tables` lists the tables among them, as tensors or names. Without it, these are tables: of a
    model, the parameters of layers with sparse gradients; of an optimizer, parameters whose
    gradients are sparse or compressed; of a file, those that it lists as tables; of a list, all
    with two dimensions or more. Frozen parameters have no state and are left out.
    """
    if isinstance(source, str | Path):
        found = list(_of_file(Path(source)))
    elif isinstance(source, nn.Module):
        found = list(_of_model(source))
    elif isinstance(source, torch.optim.Optimizer):
        found = list(_of_optimizer(source))
    else:
        found = [
            ParameterShape(name=name, shape=tuple(shape), is_table=len(tuple(shape)) > 1)
            for name, shape in _pairs(source)
        ]
    names = [parameter.name for parameter in found]
    if len(set(names)) != len(names):
        raise ValueError(f"names must be distinct, got {sorted(names)}")
    if not names:
        raise ValueError("there must be at least one parameter that is trained, got none")
    if tables is None:
        _check_has_gradients(source)
        return found
    chosen = set(_table_names(source, [tables] if isinstance(tables, str | Tensor) else tables))
    if unknown := sorted(chosen.difference(names)):
        raise ValueError(
            f"tables must be trained parameters or their names, got {unknown}; there are {names}"
        )
    return [replace(parameter, is_table=parameter.name in chosen) for parameter in found]


def _table_names(source: Source, tables: Iterable[str | Tensor]) -> Iterator[str]:
    names: dict[Tensor, str] = {}
    if isinstance(source, nn.Module):
        names = {parameter: name for name, parameter in trained_parameters(source).items()}
    elif isinstance(source, torch.optim.Optimizer):
        names = {parameter: name for name, parameter, _ in named_parameters(source)}
    for table in tables:
        if isinstance(table, Tensor):
            yield names.get(table, f"a tensor of shape {list(table.shape)}")
        else:
            yield table


def _pairs(source: Any) -> Iterator[tuple[str, Any]]:
    for pair in source:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(
                "shapes must be a model, an optimizer, a file, or pairs like "
                f"('embedding', (33278, 256)); got {pair!r}"
            )
        yield pair[0], pair[1]


def _of_model(model: nn.Module) -> Iterator[ParameterShape]:
    sparse: set[Tensor] = set()
    for module in model.modules():
        # nn.Embedding, nn.EmbeddingBag and the layers of sketchoptim.nn have this attribute.
        if getattr(module, "sparse", False) is True:
            sparse.update(p for p in module.parameters(recurse=False) if p.dim() > 1)
    for name, parameter in trained_parameters(model).items():
        yield _of_tensor(name, parameter, parameter in sparse)


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[ParameterShape]:
    for name, parameter, group in named_parameters(optimizer):
        if not parameter.requires_grad:
            continue
        is_sparse = parameter.grad is not None and is_row_sparse(parameter.grad)
        is_table = is_sparse or compresses_dense(group, parameter)
        yield _of_tensor(name, parameter, is_table or isinstance(optimizer, torch.optim.SparseAdam))


def _check_has_gradients(source: Source) -> None:
    """Raises if an optimizer has no gradients, which show which parameters are tables."""
    if not isinstance(source, torch.optim.Optimizer):
        return
    is_known = isinstance(source, torch.optim.SparseAdam) or any(
        compresses_dense(group, parameter) or parameter.grad is not None
        for _, parameter, group in named_parameters(source)
    )
    if not is_known:
        raise ValueError(
            "the optimizer's parameters must have gradients, by which tables are known, got none; "
            "name the tables, or plan for the model"
        )


def _of_tensor(name: str, parameter: Tensor, is_table: bool) -> ParameterShape:
    return ParameterShape(
        name=name,
        shape=tuple(parameter.shape),
        dtype=parameter.dtype,
        is_table=is_table,
        is_in_file=hasattr(parameter, "table_file"),
    )


def _of_file(path: Path) -> Iterator[ParameterShape]:
    """The parameters that a TOML or JSON file lists under "tables" and "dense"."""
    text = path.read_text(encoding="utf-8")
    if path.suffix not in (".toml", ".json"):
        raise ValueError(f"a file of shapes must be .toml or .json, got {path.name}")
    try:
        listed = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path.name} is not {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(listed, dict) or not listed.keys() <= {"tables", "dense"}:
        keys = sorted(listed) if isinstance(listed, dict) else type(listed).__name__
        raise ValueError(f'{path.name} must list parameters under "tables" and "dense", got {keys}')
    for kind in ("tables", "dense"):
        tables = listed.get(kind, [])
        if not isinstance(tables, list):
            raise ValueError(f"{path.name}: {kind} must be a list, got {tables!r}")
        for number, table in enumerate(tables):
            entry = parse_table(_Entry, table, where=f"{path.name}: {kind}[{number}]")
            yield _of_entry(entry, path.parent, is_table=kind == "tables")


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A parameter as a file lists it."""

    name: str
    shape: tuple[int, ...]
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    zipf: float | None = None
    counts: str | None = None
    ids_per_step: int | None = None
    in_file: bool = False


def _of_entry(entry: _Entry, folder: Path, *, is_table: bool) -> ParameterShape:
    parameter = ParameterShape(
        name=entry.name,
        shape=entry.shape,
        dtype=getattr(torch, entry.dtype),
        is_table=is_table,
        ids_per_step=entry.ids_per_step,
        is_in_file=entry.in_file,
    )
    if not is_table:
        return parameter
    if entry.counts is not None:
        found = RowFrequencies.of_counts(np.load(folder / entry.counts))
        return replace(parameter, frequencies=found)
    if entry.zipf is not None:
        found = RowFrequencies.zipf(entry.shape[0], exponent=entry.zipf)
        return replace(parameter, frequencies=found)
    return parameter
