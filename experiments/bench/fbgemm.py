"""FBGEMM, where it is installed: it is no dependency, and each release is for one torch."""

import importlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .gradients import Batch


class FbgemmStepper:
    """FBGEMM's table-batched exact row-wise Adagrad, which updates rows in its backward pass.

    The forward pass, a lookup of one row for each bag, is not timed. ``output.backward(gradient)``
    is: it groups equal ids and updates state and rows, like the others' ``optimizer.step()``, with
    the call of the autograd engine on top.
    """

    def __init__(self, parameter: nn.Parameter, *, lr: float) -> None:
        rows, dim = parameter.shape
        self.tables: Any = fbgemm_tables([(rows, dim)], lr=lr)
        self.output = self.values = torch.empty(0)

    def prepare(self, batch: Batch) -> None:
        self.values = batch.values
        self.output = self.tables(batch.ids, torch.arange(batch.entries + 1))

    def step(self) -> None:
        self.output.backward(self.values)

    def state_bytes(self) -> int:
        return int(self.tables.momentum1_host.nbytes)


def fbgemm_tables(shapes: Sequence[tuple[int, int]], *, lr: float) -> Any:
    """FBGEMM's module for tables of these rows and columns."""
    training, configs, common = _modules()
    place = (common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
    return training.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, *place) for rows, dim in shapes],
        optimizer=configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=lr,
        eps=1e-8,
        bounds_check_mode=common.BoundsCheckMode.NONE,
    )


def _modules() -> tuple[Any, Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations in its own imports
        importlib.import_module("fbgemm_gpu")
        return (
            importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training"),
            importlib.import_module("fbgemm_gpu.split_embedding_configs"),
            importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common"),
        )


def absence_reason() -> str | None:
    """Why FBGEMM cannot be measured here, or None."""
    try:
        _modules()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "fbgemm_gpu":
            return f"installed, but it needs {error.name}"
        return "not installed"
    except OSError as error:
        return f"installed, but built for another torch: {error}"
    return None
