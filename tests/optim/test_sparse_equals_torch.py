"""Exact storage moves rows as torch.optim does: to the last bit in float64, nearly elsewhere."""

import copy
import math

import backends
import pytest
import torch
from gradients import dense_stream, sparse, sparse_stream, start
from torch import nn
from torch.optim import adam as torch_adam
from torch.optim import lr_scheduler
from torch_twins import STEPS, check_same_bits, step_both

import sketchoptim as so

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

BACKENDS = (None, *backends.LEVELS[-1:])
SPARSE_SHAPES = [(9, 4), (9,), (6, 2, 3), (5, 2, 1, 2)]


def sparse_pair(ours, theirs, shape, *, dtype=torch.float64, **options):
    built = []
    for optimizer in (ours, theirs):
        parameter = nn.Parameter(start(shape, dtype=dtype))
        own = {"memory": "exact"} if optimizer is ours else {}
        built.append(([parameter], optimizer([parameter], lr=0.05, **options, **own)))
    return built


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        *(({}, shape) for shape in SPARSE_SHAPES),
        ({"maximize": True}, (9, 4)),
        ({"betas": (0.6, 0.9), "eps": 0.1}, (9, 4)),
    ],
    ids=str,
)
def test_exact_sparse_adam_gives_the_bits_of_sparse_adam_in_float64(options, shape):
    ours, theirs = sparse_pair(so.Adam, torch.optim.SparseAdam, shape, **options)
    for gradient in sparse_stream(shape, 40, dtype=torch.float64):
        step_both(ours, theirs, [gradient.coalesce()])
        check_same_bits(ours, theirs)


def test_exact_sparse_adam_matches_sparse_adam_on_repeated_rows():
    """Not in the last bits: torch's sort, and with it the order of a sum, is not stable."""
    shape = (6, 2, 3)
    ours, theirs = sparse_pair(so.Adam, torch.optim.SparseAdam, shape)
    for gradient in sparse_stream(shape, 40, dtype=torch.float64):
        step_both(ours, theirs, [gradient])
    torch.testing.assert_close(ours[0][0], theirs[0][0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_exact_sparse_adam_matches_sparse_adam_in_float32(backend):
    shape = (40, 16)
    ours, theirs = sparse_pair(so.Adam, torch.optim.SparseAdam, shape, dtype=torch.float32)
    with backends.stepping_by(backend):
        for gradient in sparse_stream(shape, 50):
            step_both(ours, theirs, [gradient])
    torch.testing.assert_close(ours[0][0], theirs[0][0], rtol=1e-6, atol=1e-6)


def test_exact_sparse_adam_follows_sparse_adam_through_a_schedule():
    shape = (9, 4)
    ours, theirs = sparse_pair(so.Adam, torch.optim.SparseAdam, shape)
    schedulers = [lr_scheduler.CosineAnnealingLR(o, 9) for _, o in (ours, theirs)]
    for gradient in sparse_stream(shape, 30, dtype=torch.float64):
        step_both(ours, theirs, [gradient.coalesce()])
        for each in schedulers:
            each.step()
    check_same_bits(ours, theirs)


@pytest.mark.parametrize(
    "options",
    [{}, {"lr_decay": 0.1}, {"initial_accumulator_value": 0.5, "eps": 0.1}, {"maximize": True}],
    ids=str,
)
def test_exact_sparse_adagrad_matches_torch(options):
    shape = (6, 2, 3)
    ours, theirs = sparse_pair(so.Adagrad, torch.optim.Adagrad, shape, **options)
    for gradient in sparse_stream(shape, 40, dtype=torch.float64):
        step_both(ours, theirs, [gradient])
    # torch adds with a fused multiply, which rounds once less.
    torch.testing.assert_close(ours[0][0], theirs[0][0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"maximize": True}], ids=str)
def test_sparse_sgd_without_momentum_matches_torch(options):
    shape = (9, 4)
    ours, theirs = sparse_pair(so.SGD, torch.optim.SGD, shape, **options)
    for gradient in sparse_stream(shape, 40, dtype=torch.float64):
        step_both(ours, theirs, [gradient])
    torch.testing.assert_close(ours[0][0], theirs[0][0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "twin"),
    [("Adam", torch.optim.SparseAdam), ("Adagrad", torch.optim.Adagrad)],
    ids=["Adam", "Adagrad"],
)
@pytest.mark.parametrize("value", [1e30, math.inf, math.nan], ids=str)
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_exact_storage_takes_extreme_sparse_gradients_as_torch_does(backend, name, twin, value):
    """An overflowing square stops a row in Adagrad and spoils it in SparseAdam, for good."""
    shape = (4, 2)
    ours, theirs = sparse_pair(getattr(so, name), twin, shape, dtype=torch.float32)
    with backends.stepping_by(backend):
        for size in (1.0, value, 1.0, 2.0):
            gradient = sparse(torch.tensor([0, 2]), torch.full((2, 2), size), shape)
            step_both(ours, theirs, [gradient])
    torch.testing.assert_close(ours[0][0], theirs[0][0], rtol=1e-6, atol=0.0, equal_nan=True)


# -- sparse and dense together ---------------------------------------------------------------------


def test_one_optimizer_takes_sparse_and_dense_parameters():
    table, weight = (9, 4), (4, 3)
    mine = [nn.Parameter(start(shape, dtype=torch.float64)) for shape in (table, weight)]
    others = copy.deepcopy(mine)
    optimizer = so.Adam(mine, lr=0.05, memory="exact")
    twins = [
        torch.optim.SparseAdam(others[:1], lr=0.05),
        torch.optim.Adam(others[1:], lr=0.05),
    ]
    streams = (
        sparse_stream(table, STEPS, dtype=torch.float64),
        dense_stream(weight, STEPS, dtype=torch.float64),
    )
    for gradients in zip(*streams, strict=True):
        for parameters in (mine, others):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
        optimizer.step()
        for twin in twins:
            twin.step()
    for parameter, other in zip(mine, others, strict=True):
        assert torch.equal(parameter, other)


@pytest.mark.parametrize("first_kind", ["sparse", "dense"])
def test_exact_moments_survive_a_change_between_sparse_and_dense_gradients(first_kind):
    """torch has no optimizer that takes both, so its two take turns on one pair of moments."""
    shape = (9, 4)
    mine, other = (nn.Parameter(start(shape, dtype=torch.float64)) for _ in range(2))
    optimizer = so.Adam([mine], lr=0.05, memory="exact")
    m, v = torch.zeros_like(other), torch.zeros_like(other)
    options = {"lr": 0.05, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "maximize": False}
    sparse_gradients = (g.coalesce() for g in sparse_stream(shape, STEPS, dtype=torch.float64))
    dense_gradients = dense_stream(shape, STEPS, dtype=torch.float64)
    for step in range(STEPS):
        is_sparse = (step // 2) % 2 == (first_kind == "dense")
        gradient = next(sparse_gradients if is_sparse else dense_gradients)
        mine.grad = gradient
        optimizer.step()
        with torch.no_grad():
            if is_sparse:
                torch.optim._functional.sparse_adam(
                    [other], [gradient], [m], [v], [step + 1], **options
                )
            else:
                torch_adam.adam(
                    [other],
                    [gradient],
                    [m],
                    [v],
                    [],
                    [torch.tensor(float(step))],
                    amsgrad=False,
                    weight_decay=0.0,
                    **options,
                )
        assert torch.equal(mine, other)


# -- embeddings ------------------------------------------------------------------------------------


def test_an_embedding_never_moves_its_padding_row():
    table = nn.Embedding(9, 4, padding_idx=2, sparse=True)
    begin = table.weight.detach().clone()
    optimizer = so.Adam(table.parameters(), lr=0.05)
    ids = torch.tensor([2, 0, 2, 5, 2])
    for _ in range(3):
        optimizer.zero_grad()
        table(ids).sum().backward()
        optimizer.step()
    moved = (table.weight != begin).any(1).nonzero().flatten()
    assert moved.tolist() == [0, 5]


def test_an_embedding_trains_as_with_sparse_adam():
    ours, theirs = (nn.Embedding(9, 4, sparse=True, dtype=torch.float64) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    target = start((6, 4), seed=5, dtype=torch.float64)
    optimizers = [
        so.Adam(ours.parameters(), lr=0.05, memory="exact"),
        torch.optim.SparseAdam(theirs.parameters(), lr=0.05),
    ]
    generator = torch.Generator().manual_seed(16)
    for _ in range(STEPS):
        # No more than two of a kind, whose sum does not depend on their order.
        ids = torch.cat([torch.randperm(9, generator=generator)[:3] for _ in range(2)])
        for table, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            # Two backward passes: their gradients meet in one uncoalesced tensor.
            for half in (slice(0, 3), slice(3, 6)):
                (table(ids[half]) - target[half]).square().sum().backward()
            optimizer.step()
    assert torch.equal(ours.weight, theirs.weight)
