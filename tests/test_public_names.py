"""The names and signatures that users may rely on: changing one is changing the product."""

import inspect
import re
from typing import Any

import pytest
import torch

import sketchoptim as so

NAMES = [
    "SGD", "Adagrad", "Adam", "AdamW", "CountMinSketch", "CountSketch",
    "DeferredGradient", "Exact", "Memory", "Quantized", "RMSprop", "RankOne", "RowWise", "Sketched",
    "TopSingular", "clip_grad_norm_",
    "diagnose", "enable_sparse_clipping", "find_tables", "from_torch", "memory_report", "nn",
    "param_groups", "plan", "save_checkpoint", "to_torch",
]  # fmt: skip

# What an optimizer of one's own is written with.
BUILDING_BLOCKS = ["Average", "FusedRule", "Optimizer", "Rule"]

OPTIMIZER_NAMES = ["Adam", "AdamW", "RMSprop", "Adagrad", "SGD"]
FUNCTIONS = ["OPTIMIZERS", "clip_grad_norm_", "from_torch", "to_torch"]


def found(path: str) -> Any:
    thing = so
    for part in path.split("."):
        thing = getattr(thing, part)
    return thing


def test_the_public_names_are_these():
    assert so.__all__ == NAMES


def test_an_optimizer_of_ones_own_is_written_with_these():
    assert set(so.optim.__all__) == {*BUILDING_BLOCKS, *OPTIMIZER_NAMES, *FUNCTIONS}


def test_every_public_name_exists_once():
    assert len({id(found(name)) for name in so.__all__}) == len(so.__all__)


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_arguments_by_position_are_the_first_of_torch_with_its_defaults(name):
    ours, torchs = (
        [
            (it.name, it.default)
            for it in inspect.signature(kind).parameters.values()
            if it.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        for kind in (found(name), getattr(torch.optim, name))
    )
    dropped = {"amsgrad", "centered", "foreach", "maximize", "momentum"} - {it for it, _ in ours}
    assert ours == [it for it in torchs if it[0] not in dropped][: len(ours)]


@pytest.mark.parametrize("name", ["CountSketch", "CountMinSketch"])
def test_a_sketch_has_its_counters_and_its_bytes(name):
    sketch = found(name)(2, 5, 3)
    assert sketch.counters.shape == (2, 5, 3)
    assert sketch.nbytes == 2 * 5 * 3 * 4


def test_the_presets_are_these():
    expected = "lean, exact, 8-bit, paper-mv, paper-v, paper-v-only, row-wise, rank-one"
    assert list(so.storage.PRESETS) == expected.split(", ")
    for name in so.storage.PRESETS:
        assert so.Memory.of(name) is so.storage.PRESETS[name]


def test_lean_is_half_a_byte_a_row_without_a_first_moment():
    lean = so.Memory.of("lean")
    assert lean.first is None
    assert lean.second == so.Sketched(
        granularity="row", ratio=1 / 8, depth=3, decay="linear", conservative=True
    )


@pytest.mark.parametrize("name", ["paper-mv", "paper-v", "paper-v-only"])
def test_the_presets_of_the_paper_keep_a_fifth_by_element(name):
    paper = so.Sketched(granularity="element", ratio=0.2, depth=3, decay="paper")
    first = {"paper-mv": paper, "paper-v": so.Exact(), "paper-v-only": None}[name]
    assert so.Memory.of(name) == so.Memory(first=first, second=paper)


def test_the_list_of_optimizers_has_them_all():
    assert {name: found(name) for name in OPTIMIZER_NAMES} == so.optim.OPTIMIZERS
    for kind in so.optim.OPTIMIZERS.values():
        assert issubclass(kind, so.optim.Optimizer)
    assert issubclass(so.optim.Optimizer, torch.optim.Optimizer)


@pytest.mark.parametrize("name", so.__all__)
def test_a_public_name_says_what_it_is(name):
    first, *_ = (inspect.getdoc(found(name)) or "").splitlines() or [""]
    assert re.match(r"[A-Z`].{15,}[.:`]", first), first
    module = getattr(found(name), "__module__", found(name).__name__)  # or is one itself
    assert module.startswith("sketchoptim.")


def test_the_version_is_that_of_the_package():
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", so.__version__)
