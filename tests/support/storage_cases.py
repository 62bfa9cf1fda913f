"""Every storage, in every form of its moments, over tables of different shapes and dtypes."""

import pytest
import torch

import sketchoptim as so
from sketchoptim.moments import Name, Table
from sketchoptim.storage import Storage

NAMES: tuple[Name, ...] = ("first", "second")
# Without those that a test has defined.
KINDS = [kind for kind in Storage.__subclasses__() if kind.__module__ == Storage.__module__]

STORAGES: dict[str, Storage] = {
    **{kind.__name__: kind() for kind in KINDS if kind is not so.Sketched},
    "linear": so.Sketched(width=512, granularity="element"),
    "conservative": so.Sketched(width=512, conservative=True),
    "paper": so.Sketched(width=512, granularity="element", decay="paper"),
    "bucket": so.Sketched(width=512, granularity="element", decay="bucket"),
    "bfloat16": so.Sketched(width=512, dtype=torch.bfloat16),
    "columns": so.Sketched(width=512, conservative=True, columns=True),
    "row columns": so.RowWise(columns=True),
    "folding": so.Sketched(width=512, fold_when=0.1),
}
TABLES = {
    "matrix": Table(torch.Size((40, 6)), torch.float32, torch.device("cpu")),
    "many": Table(torch.Size((90, 70)), torch.float32, torch.device("cpu"), "embedding.weight"),
    "vector": Table(torch.Size((5,)), torch.bfloat16, torch.device("cpu"), 3),
    "scalar": Table(torch.Size(()), torch.float32, torch.device("cpu")),
    "cube": Table(torch.Size((4, 2, 3)), torch.float64, torch.device("cpu")),
    "empty": Table(torch.Size((0, 3)), torch.float32, torch.device("cpu")),
}
MOMENTS = {
    f"{name} {kind}": (name, storage)
    for name in NAMES
    for kind, storage in STORAGES.items()
    if not (name == "first" and storage.unsuitable_for_first())
}
each_moment = pytest.mark.parametrize(("name", "storage"), MOMENTS.values(), ids=MOMENTS)
each_table = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
