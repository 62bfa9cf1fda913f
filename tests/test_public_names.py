"""The names and signatures that users may rely on: changing one is changing the product."""

from typing import Any

import torch

import sketchoptim as so

NAMES = [
    "SGD", "Adagrad", "Adam", "AdamW", "CountMinSketch", "CountSketch",
    "DeferredGradient", "Exact", "Memory", "Quantized", "RMSprop", "RankOne", "RowWise", "Sketched",
    "TopSingular", "clip_grad_norm_", "defer_gradients", "diagnose", "doctor",
    "enable_sparse_clipping", "find_tables", "from_torch", "materialize_gradients",
    "memory_report", "nn",
    "param_groups", "plan", "replace_parameters", "save_checkpoint", "to_torch",
]  # fmt: skip

# What an optimizer of one's own is written with.
BUILDING_BLOCKS = ["Average", "FusedRule", "Optimizer", "Rule"]

OPTIMIZER_NAMES = ["Adam", "AdamW", "RMSprop", "Adagrad", "SGD"]
FUNCTIONS = ["OPTIMIZERS", "clip_grad_norm_", "from_torch", "replace_parameters", "to_torch"]


def found(path: str) -> Any:
    thing = so
    for part in path.split("."):
        thing = getattr(thing, part)
    return thing


def test_the_public_names_are_these():
    assert so.__all__ == NAMES


def test_an_optimizer_of_ones_own_is_written_with_these():
    assert set(so.optim.__all__) == {*BUILDING_BLOCKS, *OPTIMIZER_NAMES, *FUNCTIONS}


def test_the_list_of_optimizers_has_them_all():
    assert {name: found(name) for name in OPTIMIZER_NAMES} == so.optim.OPTIMIZERS
    for kind in so.optim.OPTIMIZERS.values():
        assert issubclass(kind, so.optim.Optimizer)
    assert issubclass(so.optim.Optimizer, torch.optim.Optimizer)
