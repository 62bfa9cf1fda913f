"""A step from a deferred gradient is the step from the plain one."""

import contextlib
import copy
import math

import pytest
import torch
from storage_cases import MOMENTS
from torch import Tensor, nn

import sketchoptim as so
from sketchoptim import ops
from sketchoptim.deferred import Lookups
from sketchoptim.ops import LARGEST_GRADIENT

ROWS, DIM = 400, 12
MEMORIES = {
    **{name: name for name in so.storage.PRESETS},
    **{
        f"{name} in {storage}": so.Memory(**{"second": so.RowWise(), name: storage})
        for name, storage in MOMENTS.values()
    },
}
OPTIONS = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"weight_decay": 0.1, "maximize": True},
    "AdamW": {"weight_decay": 0.1},
    "Adagrad": {"lr_decay": 0.01},
    "RMSprop": {},
}


@pytest.fixture(params=[True, False], ids=["sparse", "dense"])
def is_sparse(request) -> bool:
    return request.param


def lookups(weight: Tensor, seed: int, *, is_sparse: bool, count: int = 60) -> so.DeferredGradient:
    """The gradient of lookups of which some repeat; the plain one is equally long."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(ROWS // 4, (count,), generator=generator) * 3
    upstream = torch.randn(count, DIM, generator=generator).to(weight.dtype)
    return so.DeferredGradient(weight, [Lookups(weight, ids, upstream, is_sparse=is_sparse)])


def trained(kind, memory, *, is_deferred, is_sparse, dtype=torch.float32, **options):
    """A table and its state after three steps, each along two micro-batches."""
    start = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))
    weight = nn.Parameter(start.to(dtype))
    group = {"params": [weight], "memory": memory}
    optimizer = getattr(so, kind)([group], lr=0.05, **options)
    for step in range(3):
        gradient = lookups(weight, 2 * step, is_sparse=is_sparse)
        gradient = gradient + lookups(weight, 2 * step + 1, is_sparse=is_sparse)
        weight.grad = gradient if is_deferred else gradient.to_plain()
        optimizer.step()
        assert not is_deferred or not weight.grad.exists
    return {"weight": weight.detach(), **optimizer.state[weight]}


def check_same_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, theirs[key]), key


@pytest.mark.filterwarnings("ignore:.*active rows a bucket a step:UserWarning")
@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
def test_every_storage_on_the_reference_has_the_bits_of_the_plain_gradient(memory, is_sparse):
    with ops.reference_only():
        check_same_bits(
            *(
                trained("AdamW", memory, is_deferred=is_deferred, is_sparse=is_sparse)
                for is_deferred in (True, False)
            )
        )


@pytest.mark.parametrize("memory", ["lean-0.1", "exact"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_every_rule_has_the_bits_of_the_plain_gradient(kind, memory, is_sparse):
    with ops.reference_only():
        check_same_bits(
            *(
                trained(kind, memory, is_deferred=it, is_sparse=is_sparse, **OPTIONS[kind])
                for it in (True, False)
            )
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory", ["lean-0.1", "row-wise", "exact"])
def test_kernels_take_the_rows_of_a_sparse_one(memory, dtype):
    ours, theirs = (
        trained("AdamW", memory, is_deferred=it, is_sparse=True, dtype=dtype)
        for it in (True, False)
    )
    check_same_bits(ours, theirs)


@pytest.mark.parametrize("kind", OPTIONS)
def test_an_exact_table_gets_the_bits_of_torch(kind):
    start = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    options = {"lr": 0.05, **OPTIONS[kind]}
    optimizers = (
        getattr(so, kind)([ours], memory="exact", **options),
        getattr(torch.optim, kind)([theirs], **options),
    )
    for step in range(3):
        ours.grad = lookups(ours, step, is_sparse=False)
        theirs.grad = ours.grad.to_dense()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(ours, theirs)
    assert optimizers[0].state[ours]["step"] == 3


def test_rows_that_exist_are_stepped_as_the_plain_gradient(is_sparse):
    weights = [nn.Parameter(torch.ones(ROWS, DIM)) for _ in range(2)]
    for weight in weights:
        weight.grad = lookups(weight, 0, is_sparse=is_sparse)
    with pytest.warns(UserWarning, match=r"aten\.sum"):
        weights[0].grad.sum()
    weights[1].grad = weights[1].grad.to_plain()
    for weight in weights:
        so.AdamW(so.param_groups(nn.ParameterList([weight]), memory="lean-0.1")).step()
    assert torch.equal(*weights)


def test_a_sparse_one_is_compressed_by_default_and_a_dense_one_is_exact(is_sparse):
    weight = nn.Parameter(torch.ones(ROWS, DIM))
    weight.grad = lookups(weight, 0, is_sparse=is_sparse)
    optimizer = so.Adam([weight])
    optimizer.step()
    assert optimizer.state[weight]["is_compressed"] is is_sparse


def refuse(weights, optimizer, error, pattern):
    """The step raises, and nothing has changed."""
    before = copy.deepcopy(([it.detach() for it in weights], dict(optimizer.state)))
    with pytest.raises(error, match=pattern):
        optimizer.step()
    for weight, was in zip(weights, before[0], strict=True):
        assert torch.equal(weight, was)
    assert optimizer.state.keys() == before[1].keys()


def spoiled(weight, how):
    """A deferred gradient that must be refused."""
    ids, upstream = torch.tensor([3, 5, 3]), torch.ones(3, DIM)
    if how == "an id out of range":
        ids[1] = ROWS
    if how == "a negative id":
        ids[1] = -1
    part = Lookups(weight, ids, upstream, is_sparse=False)
    if how == "stale":
        upstream.add_(1.0)
    if how == "NaN":
        upstream.detach().numpy()[1, 2] = math.nan  # without a new version
    gradient = so.DeferredGradient(weight, [part])
    return gradient * 1e30 if how == "large" else gradient


REFUSED = [
    ("an id out of range", ValueError, "row ids between 0 and 399, got 3 to 400"),
    ("a negative id", ValueError, "row ids between 0 and 399, got -1 to 3"),
    ("stale", RuntimeError, "the output_gradient behind .* was modified in place"),
    ("NaN", ValueError, "must be finite"),
    ("large", ValueError, "must be finite"),
]


@pytest.mark.parametrize("is_reference", [True, False], ids=["reference", "kernels"])
@pytest.mark.parametrize(
    ("memory", "how", "error", "pattern"),
    # Exact parameters take what is not finite, as torch.optim does.
    [("lean-0.1", *case) for case in REFUSED] + [("exact", *case) for case in REFUSED[:3]],
)
def test_a_bad_gradient_refuses_the_whole_step(memory, how, error, pattern, is_reference):
    weights = [nn.Parameter(torch.ones(ROWS, DIM)) for _ in range(2)]
    optimizer = so.AdamW([{"params": weights, "memory": memory}])
    weights[0].grad = lookups(weights[0], 0, is_sparse=True)
    weights[1].grad = spoiled(weights[1], how)
    with ops.reference_only() if is_reference else contextlib.nullcontext():
        refuse(weights, optimizer, error, pattern)


def test_nonfinite_skip_leaves_the_table_and_counts(is_sparse):
    weight = nn.Parameter(torch.ones(ROWS, DIM))
    optimizer = so.AdamW([{"params": [weight], "memory": "lean-0.1"}], nonfinite="skip")
    weight.grad = lookups(weight, 0, is_sparse=is_sparse) * math.nan
    optimizer.step()
    assert torch.equal(weight, torch.ones(ROWS, DIM))
    assert optimizer.state[weight]["skipped"] == 1


def test_bounds_that_are_too_large_do_not_refuse_a_finite_gradient():
    weight = nn.Parameter(torch.ones(ROWS, DIM))
    large = torch.full((1, DIM), 0.7 * LARGEST_GRADIENT)
    parts = [Lookups(weight, torch.tensor([row]), large, is_sparse=False) for row in (3, 5)]
    weight.grad = so.DeferredGradient(weight, parts)
    assert weight.grad.bound() > LARGEST_GRADIENT
    with ops.reference_only():
        so.AdamW([{"params": [weight], "memory": "lean-0.1"}]).step()
    assert (weight[[3, 5]] < 1).all()
