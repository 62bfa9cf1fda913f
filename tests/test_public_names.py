"""The names and signatures that users may rely on: changing one is changing the product."""

import inspect
import re
from typing import Any

import pytest
import torch

import sketchoptim as so

NAMES = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "CountMinSketch",
    "CountSketch",
    "Diagnosis",
    "Exact",
    "Memory",
    "MemoryReport",
    "ParamGroups",
    "Plan",
    "Quantized",
    "RMSprop",
    "RankOne",
    "RowWise",
    "Sketched",
    "TopSingular",
    "clip_grad_norm_",
    "diagnose",
    "enable_sparse_clipping",
    "find_tables",
    "from_torch",
    "memory_report",
    "nn",
    "param_groups",
    "plan",
    "save_checkpoint",
    "theory",
    "to_torch",
]

# What an optimizer of one's own is written with.
BUILDING_BLOCKS = ["Average", "FusedRule", "Optimizer", "Rule"]

OPTIMIZER_NAMES = ["Adam", "AdamW", "RMSprop", "Adagrad", "SGD"]
FUNCTIONS = ["OPTIMIZERS", "clip_grad_norm_", "from_torch", "to_torch"]

LAST = "*, memory='lean', maximize=False, nonfinite='raise', rounding=None"
SIGNATURES = {
    "Adam": f"params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0, {LAST}",
    "AdamW": f"params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01, {LAST}",
    "RMSprop": f"params, lr=0.01, alpha=0.99, eps=1e-08, weight_decay=0.0, {LAST}",
    "Adagrad": "params, lr=0.01, lr_decay=0.0, weight_decay=0.0, initial_accumulator_value=0.0, "
    f"eps=1e-10, {LAST}",
    "SGD": "params, lr=0.001, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, "
    f"{LAST}",
    "optim.Optimizer": "params, *, memory, rounding=None, **options",
    "optim.Optimizer.rule": "self, group, step, *, memory, is_sparse",
    "optim.Rule": "update, first=None, second=None, maximize=False, weight_decay=0.0, "
    "reads_before=False",
    "optim.Average": "decay, weight",
    "Exact": "",
    "RowWise": "",
    "RankOne": "",
    "TopSingular": "",
    "Quantized": "*, bits=8, block=256",
    "Sketched": "*, ratio=None, width=None, depth=3, granularity='row', decay='linear', "
    "conservative=False, clean_every=None, clean_by=None, fold_at=(), fold_when=None, "
    "dtype=torch.float32, seed=0",
    "Memory": "first=None, second=None, form='moments', clip=None",
    "CountSketch": "depth, width, dim, *, seed=0, dtype=torch.float32, device=None",
    "CountSketch.for_error": "epsilon, delta, items, dim, **options",
    "CountMinSketch": "depth, width, dim, *, conservative=False, **options",
    "CountMinSketch.for_error": "epsilon, delta, items, dim, **options",
    "CountSketch.add_": "self, ids, values",
    "CountSketch.query": "self, ids",
    "CountSketch.scale_": "self, factor",
    "CountSketch.fold_": "self",
    "CountSketch.merge_": "self, other",
    "clip_grad_norm_": "parameters, max_norm, norm_type=2.0, error_if_nonfinite=False",
    "find_tables": "model, min_rows=1000, *, tables=()",
    "param_groups": "model, memory='lean', rest='exact', min_rows=1000, *, tables=(), no_decay=(), "
    "**table_options",
    "enable_sparse_clipping": "",
    "memory_report": "optimizer",
    "save_checkpoint": "content, path",
    "diagnose": "subject, *, since=None",
    "from_torch": "optimizer, memory='lean', *, tables=(), schedulers=None",
    "to_torch": "optimizer, kind=None, *, parameters=None, schedulers=None",
    "plan": "model_or_shapes, budget, *, optimizer=None, tables=None, counts=None, ids=None, "
    "zipf=1.0, ids_per_step=4096, granularity='row', finest='default', first=None, fold_when=None, "
    "beta2=None, steps=10000, ranks=1",
    "Plan.param_groups": "self, model",
    "Plan.to_json": "self",
    "Plan.from_json": "text",
}


LAYERS = {
    "EmbeddingBags": "tables, mode='sum', *, features=None, device=None, dtype=None",
    "FileEmbedding": "path, rows, dim, dtype=torch.float32, *, padding_idx=None, init_bound=0.05, "
    "seed=0, reserve=False, copied=False",
    "LSHSoftmax": "dim, classes, *, bits=None, tables=16, budget=256, negatives=16, "
    "corrected=False, rebuild_every=250, bias=False, weight=None, ignore_index=-100, seed=0",
    "SampledSoftmax": "dim, classes, *, samples, bias=False, weight=None, sampler=None, "
    "repeats='merged', ignore_index=-100",
    "LogUniformSampler": "classes",
    "UnigramSampler": "counts",
}
HEAD_METHODS = {
    "forward": "self, hidden, labels, *, reduction='mean', generator=None",
    "full_loss": "self, hidden, labels, *, reduction='mean', chunk=4096",
    "top_k": "self, hidden, k, *, chunk=4096",
}
SIGNATURES |= {f"nn.{name}": signature for name, signature in LAYERS.items()}
SIGNATURES |= {
    f"nn.{head}.{method}": signature
    for head in ("LSHSoftmax", "SampledSoftmax")
    for method, signature in HEAD_METHODS.items()
}


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


@pytest.mark.parametrize("path", SIGNATURES)
def test_a_signature_is_this(path):
    signature = inspect.signature(found(path))
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    shown = str(inspect.Signature(bare))
    assert shown == f"({SIGNATURES[path]})"


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
