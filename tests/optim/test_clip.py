"""Clipping the norm of sparse and dense gradients together."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from step_footprint import measured, sparse_gradient
from tiny_runs import TinyModel, batches
from torch import Tensor, nn

import sketchoptim as so
from sketchoptim._rows import of_gradient


def with_gradients(*, seed: int = 0, passes: int = 2, dtype: torch.dtype = torch.float32):
    """A model whose tables have uncoalesced gradients, and its twin with the same, dense ones."""
    torch.manual_seed(seed)
    model = TinyModel(dtype)
    for ids in batches(passes, seed=seed):
        model.loss(ids).backward()
    twin = copy.deepcopy(model)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        theirs.grad = ours.grad.to_dense() if ours.grad.is_sparse else ours.grad.clone()
    return model, twin


def close(ours: nn.Module, theirs: nn.Module) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.to_dense(), other.grad)


@given(
    seed=st.integers(0, 100),
    max_norm=st.floats(1e-3, 1e3),
    norm_type=st.sampled_from([1.0, 2.0, 3.0, math.inf]),
)
def test_it_does_to_sparse_gradients_what_torch_does_to_dense_ones(seed, max_norm, norm_type):
    model, twin = with_gradients(seed=seed)
    ours = so.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    theirs = nn.utils.clip_grad_norm_(twin.parameters(), max_norm, norm_type)
    torch.testing.assert_close(ours, theirs)
    close(model, twin)


@given(seed=st.integers(0, 100), max_norm=st.floats(1e-3, 1e2))
def test_the_norm_afterwards_is_at_most_what_was_asked_for(seed, max_norm):
    model, _ = with_gradients(seed=seed)
    so.clip_grad_norm_(model.parameters(), max_norm)
    gradients = [parameter.grad.to_dense() for parameter in model.parameters()]
    assert nn.utils.get_total_norm(gradients) <= max_norm * (1 + 1e-5)


def test_a_row_that_comes_twice_counts_once_with_its_sum():
    table = nn.Parameter(torch.zeros(10, 2))
    table.grad = torch.sparse_coo_tensor(
        torch.tensor([[3, 3]]),
        torch.tensor([[3.0, 0.0], [0.0, 4.0]]),
        (10, 2),
        check_invariants=True,
    )
    assert so.clip_grad_norm_(table, 100.0) == 5.0


def test_rows_that_cancel_have_no_norm():
    table = nn.Parameter(torch.zeros(10, 2))
    table.grad = torch.sparse_coo_tensor(
        torch.tensor([[3, 3]]),
        torch.tensor([[3.0, 1.0], [-3.0, -1.0]]),
        (10, 2),
        check_invariants=True,
    )
    assert so.clip_grad_norm_(table, 1.0) == 0.0
    assert torch.equal(table.grad.to_dense(), torch.zeros(10, 2))


def test_gradients_below_the_norm_keep_their_bits():
    model, twin = with_gradients(passes=1)
    so.clip_grad_norm_(model.parameters(), 1e6)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad.to_dense(), theirs.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_every_precision_is_clipped(dtype):
    model, twin = with_gradients(dtype=dtype, passes=1)
    theirs = nn.utils.get_total_norm([p.grad.double() for p in twin.parameters()])
    ours = so.clip_grad_norm_(model.parameters(), 0.01)
    assert ours.item() == pytest.approx(theirs.item(), rel=0.02)
    assert all(parameter.grad.dtype == dtype for parameter in model.parameters())
    clipped = [parameter.grad.to_dense().double() for parameter in model.parameters()]
    assert nn.utils.get_total_norm(clipped) == pytest.approx(0.01, rel=0.02)


def test_an_uncoalesced_gradient_stays_the_same_object_and_uncoalesced():
    model, _ = with_gradients()
    gradient = model.table.weight.grad
    ids = gradient._indices().clone()
    assert not gradient.is_coalesced()
    so.clip_grad_norm_(model.parameters(), 0.1)
    assert model.table.weight.grad is gradient
    assert not gradient.is_coalesced()
    assert torch.equal(gradient._indices(), ids)


def test_a_coalesced_gradient_stays_coalesced():
    model, _ = with_gradients()
    model.table.weight.grad = model.table.weight.grad.coalesce()
    so.clip_grad_norm_(model.parameters(), 0.1)
    assert model.table.weight.grad.is_coalesced()


def test_a_frequent_row_of_a_narrow_table_is_summed_in_float32():
    table = nn.Embedding(10, 16, sparse=True, dtype=torch.bfloat16)
    table(torch.full((1000,), 3)).sum().backward()
    assert so.clip_grad_norm_(table.parameters(), 1e9) == 4000.0
    assert table.weight.grad._values().float().sum() == 16_000.0
    assert so.clip_grad_norm_(table.parameters(), 1000.0) == 4000.0
    assert of_gradient(table.weight.grad).values[0, 0] == 250.0


def test_tables_that_share_one_gradient_are_scaled_once():
    first, second = (nn.Embedding(10, 2, sparse=True) for _ in range(2))
    ids = torch.tensor([1, 2])
    ((first(ids) + second(ids)) * torch.tensor([[3.0, 4.0], [0.0, 0.0]])).sum().backward()
    shared = first.weight.grad._values()
    assert shared.data_ptr() == second.weight.grad._values().data_ptr()
    so.clip_grad_norm_([first.weight, second.weight], 1.0)
    for table in (first, second):
        expected = torch.tensor([0.6, 0.8]) / math.sqrt(2)
        torch.testing.assert_close(table.weight.grad.to_dense()[1], expected)
    assert torch.equal(shared[0], torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize(
    "values",
    [torch.ones(1, 1).expand(4, 9), torch.ones(9, 4).t(), torch.ones(4, 18)[:, ::2]],
    ids=["expanded", "transposed", "strided"],
)
def test_values_in_any_layout_are_scaled(values):
    table = nn.Parameter(torch.zeros(10, 9))
    table.grad = torch.sparse_coo_tensor(
        torch.tensor([[1, 2, 3, 4]]), values, (10, 9), check_invariants=True
    )
    assert so.clip_grad_norm_(table, 3.0) == 6.0
    torch.testing.assert_close(table.grad._values(), torch.full((4, 9), 0.5))


def test_temporaries_stay_below_two_copies_of_the_touched_rows():
    gradient = sparse_gradient(2000, is_coalesced=False)
    table = torch.empty(gradient.shape)  # of which no page is ever written
    table.grad = gradient
    footprint = measured(lambda: so.clip_grad_norm_(table, 1.0))
    assert footprint.allocated_bytes < 2 * 2000 * gradient.shape[1] * 4


def test_a_gradient_that_is_not_sparse_in_rows_is_refused_and_nothing_changes():
    table, other = nn.Parameter(torch.zeros(3, 2)), a_parameter()
    table.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(ValueError, match="sparse in rows alone"):
        so.clip_grad_norm_([other, table], 1.0)
    assert torch.equal(other.grad, torch.tensor([3.0, 4.0]))


def a_parameter() -> Tensor:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    return parameter


@pytest.mark.parametrize(
    "given",
    [lambda p: p, lambda p: [p], lambda p: iter([p]), lambda p: (q for q in [p, nn.Parameter(p)])],
    ids=["tensor", "list", "iterator", "generator"],
)
def test_parameters_come_in_any_form(given):
    parameter = a_parameter()
    assert so.clip_grad_norm_(given(parameter), 1.0) == 5.0
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("parameters", [[], [nn.Parameter(torch.ones(2))]], ids=["none", "no grad"])
def test_without_gradients_the_norm_is_zero(parameters):
    assert so.clip_grad_norm_(parameters, 1.0) == 0.0


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_an_empty_sparse_gradient_has_no_norm(norm_type):
    table = nn.Parameter(torch.zeros(10, 2))
    table.grad = torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 2), (10, 2), check_invariants=True
    )
    norm = so.clip_grad_norm_([table, a_parameter()], 1.0, norm_type)
    assert norm == (4.0 if norm_type == math.inf else 5.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_raises_if_asked_to_and_changes_nothing(bad):
    model, twin = with_gradients(passes=1)
    for each in (model, twin):
        each.head.bias.grad[0] = bad
    with pytest.raises(RuntimeError, match="non-finite"):
        so.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad.to_dense(), theirs.grad, rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_does_what_torch_does(bad):
    model, twin = with_gradients(passes=1)
    for each in (model, twin):
        each.head.bias.grad[0] = bad
    ours = so.clip_grad_norm_(model.parameters(), 1.0)
    theirs = nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    head, other = model.head.weight.grad, twin.head.weight.grad
    torch.testing.assert_close(head, other, equal_nan=True)
    rows = model.table.weight.grad.coalesce()
    torch.testing.assert_close(
        rows.values(), twin.table.weight.grad[rows.indices()[0]], equal_nan=True
    )


@pytest.mark.parametrize(
    ("max_norm", "error"),
    [(math.nan, ValueError), (-1.0, ValueError), ("1", TypeError), (None, TypeError)],
)
def test_a_norm_out_of_range_is_refused_and_nothing_changes(max_norm, error):
    parameter = a_parameter()
    with pytest.raises(error, match="max_norm must be"):
        so.clip_grad_norm_([parameter], max_norm)
    assert torch.equal(parameter.grad, torch.tensor([3.0, 4.0]))
