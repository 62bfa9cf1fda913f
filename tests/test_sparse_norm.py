"""torch's own clipping of sparse gradients, once it is enabled."""

import copy
import math
import subprocess
import sys
import warnings

import pytest
import torch
from gradients import sparse
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import TinyModel, batches
from torch import nn

import sketchoptim as so

FOREACH = [None, True, False]


@pytest.fixture(scope="module", autouse=True)
def enabled() -> None:
    so.enable_sparse_clipping()


def with_gradients(
    *, seed: int = 0, passes: int = 2, dtype: torch.dtype = torch.float32
) -> TinyModel:
    """A model with dense layers, and tables that have uncoalesced gradients."""
    torch.manual_seed(seed)
    model = TinyModel(dtype)
    for ids in batches(passes, seed=seed):
        model.loss(ids).backward()
    return model


def twin_of(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        theirs.grad = ours.grad.clone()
    return twin


def assert_same_gradients(one: nn.Module, other: nn.Module) -> None:
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert ours.grad.layout == theirs.grad.layout
        torch.testing.assert_close(ours.grad.to_dense(), theirs.grad.to_dense())


def a_table(ids: list[int], values: torch.Tensor, *, rows: int = 10) -> nn.Parameter:
    shape = (rows, *values.shape[1:])
    table = nn.Parameter(torch.zeros(shape, dtype=values.dtype))
    table.grad = sparse(torch.tensor(ids, dtype=torch.int64), values, shape)
    return table


@given(
    seed=st.integers(0, 100),
    max_norm=st.floats(1e-3, 1e3),
    norm_type=st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, math.inf]),
    foreach=st.sampled_from(FOREACH),
)
def test_torch_clips_sparse_and_dense_gradients_as_we_do(seed, max_norm, norm_type, foreach):
    theirs = with_gradients(seed=seed)
    ours = twin_of(theirs)
    norm = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm, norm_type, foreach=foreach)
    torch.testing.assert_close(norm, so.clip_grad_norm_(ours.parameters(), max_norm, norm_type))
    assert_same_gradients(theirs, ours)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("foreach", FOREACH)
def test_every_precision_is_clipped(dtype, foreach):
    model = with_gradients(dtype=dtype, passes=1)  # torch adds no sparse float16
    expected = so.clip_grad_norm_(twin_of(model).parameters(), 0.01)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=foreach)
    assert norm.dtype == dtype  # as with dense gradients
    assert norm.item() == pytest.approx(expected.item(), rel=0.02)
    clipped = [parameter.grad.to_dense().double() for parameter in model.parameters()]
    assert nn.utils.get_total_norm(clipped) == pytest.approx(0.01, rel=0.02)
    assert all(parameter.grad.dtype == dtype for parameter in model.parameters())


def test_tables_that_share_one_gradient_are_scaled_once():
    first, second = (nn.Embedding(10, 2, sparse=True) for _ in range(2))
    ids = torch.tensor([1, 2])
    ((first(ids) + second(ids)) * torch.tensor([[3.0, 4.0], [0.0, 0.0]])).sum().backward()
    assert first.weight.grad._values().data_ptr() == second.weight.grad._values().data_ptr()
    nn.utils.clip_grad_norm_([first.weight, second.weight], 1.0)
    for table in (first, second):
        expected = torch.tensor([0.6, 0.8]) / math.sqrt(2)
        torch.testing.assert_close(table.weight.grad.to_dense()[1], expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("foreach", FOREACH)
def test_a_norm_that_is_not_finite_raises_if_asked_to(bad, foreach):
    table = a_table([3, 5], torch.tensor([[1.0, 2.0], [bad, 0.0]]))
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(table, 1.0, error_if_nonfinite=True, foreach=foreach)
    assert torch.equal(table.grad._values()[0], torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("norm_type", [-1.0, -math.inf, math.nan])
def test_negative_norm_types_are_refused_and_nothing_changes(norm_type):
    model = with_gradients()
    before = twin_of(model)
    with pytest.raises(ValueError, match="norm type of a sparse tensor must be >= 0, got"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type)
    assert_same_gradients(model, before)


@pytest.mark.parametrize("order", [0, 1, 2, math.inf])
def test_tensors_that_are_sparse_in_every_dimension_have_a_norm(order):
    tensor = torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 2], [0, 0, 1]]),
        torch.tensor([1.0, 2.0, -4.0]),
        (3, 2),
        check_invariants=True,
    )
    expected = torch.linalg.vector_norm(tensor.to_dense(), order)
    assert torch.linalg.vector_norm(tensor, order) == expected


def test_the_dtype_of_the_norm_is_an_option():
    table = a_table([3, 3], torch.tensor([[0.1], [0.2]]))
    norm = torch.linalg.vector_norm(table.grad, dtype=torch.float64)
    assert norm == torch.tensor([0.1]).double() + torch.tensor([0.2]).double()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda it: torch.linalg.vector_norm(it, dim=1), NotImplementedError, "got dim=.1."),
        (lambda it: torch.linalg.vector_norm(it, keepdim=True), NotImplementedError, "keepdim="),
        (lambda it: torch.linalg.vector_norm(it.to(torch.cfloat)), TypeError, "real numbers"),
    ],
)
def test_norms_that_clipping_does_not_need_are_refused(call, error, message):
    table = a_table([1], torch.ones(1, 2))
    with pytest.raises(error, match=message):
        call(table.grad)


def test_enabling_again_registers_nothing_and_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns when a kernel replaces another
        so.enable_sparse_clipping()


def test_importing_the_package_leaves_torch_as_it_is():
    program = """
import torch, sketchoptim
for key in ("SparseCPU", "SparseCUDA"):
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::linalg_vector_norm", key)
before = torch._C._dispatch_dump("aten::linalg_vector_norm").splitlines()
sketchoptim.enable_sparse_clipping()
after = torch._C._dispatch_dump("aten::linalg_vector_norm").splitlines()
print([line.split(":")[0] for line in after if line not in before])
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    assert run.stdout.strip() == "['SparseCPU', 'SparseCUDA']"
