"""A deferred gradient is the plain gradient to whoever reads it."""

import copy
import math
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn

import sketchoptim as so
from sketchoptim.deferred import Lookups, PlainRows

ROWS, DIM = 500, 4


class LookUp(torch.autograd.Function):
    """Rows of a table, whose gradient is deferred."""

    @staticmethod
    def forward(ctx, weight, ids, is_sparse):
        ctx.weight, ctx.ids, ctx.is_sparse = weight.detach(), ids, is_sparse
        return weight[ids]

    @staticmethod
    def backward(ctx, upstream):
        part = Lookups(ctx.weight, ctx.ids, upstream, is_sparse=ctx.is_sparse)
        return so.DeferredGradient(ctx.weight, [part]), None, None


def table() -> nn.Parameter:
    return nn.Parameter(torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0)))


def batch(seed: int) -> Tensor:
    """Ids of which some repeat."""
    return torch.randint(20, (12,), generator=torch.Generator().manual_seed(seed)) * 7


def twins(
    batches: int = 1, *, is_sparse: bool = False, deferred: int | None = None
) -> tuple[nn.Parameter, nn.Parameter]:
    """A table with a deferred gradient after some batches, and one with the plain gradient.

    With a number, only the batch of that number has a deferred gradient, and the others do not.
    """
    ours, theirs = table(), table()
    for seed in range(batches):
        ids = batch(seed)
        is_plain = deferred is not None and seed != deferred
        rows = ours[ids] if is_plain else LookUp.apply(ours, ids, is_sparse)
        rows.square().sum().backward()
        theirs[ids].square().sum().backward()
    return ours, theirs


@pytest.fixture(params=[True, False], ids=["sparse", "dense"])
def is_sparse(request) -> bool:
    return request.param


def test_it_is_the_gradient_of_a_plain_parameter(is_sparse):
    ours, theirs = twins(is_sparse=is_sparse)
    assert isinstance(ours.grad, so.DeferredGradient)
    assert (ours.grad.shape, ours.grad.dtype) == (ours.shape, ours.dtype)
    assert ours.grad.nbytes < theirs.grad.nbytes / 10
    assert torch.equal(ours.grad.to_dense(), theirs.grad)
    assert torch.equal(ours.grad.rows(10, 90), theirs.grad[10:90])
    assert isinstance(ours.grad, so.DeferredGradient)


def test_micro_batches_concatenate_their_parts(is_sparse):
    ours, theirs = twins(batches=8, is_sparse=is_sparse)
    assert len(ours.grad.terms) == 8
    torch.testing.assert_close(ours.grad.to_dense(), theirs.grad)


@pytest.mark.parametrize("deferred", [0, 1, 2])
def test_a_plain_gradient_is_added(deferred):
    ours, theirs = twins(batches=3, deferred=deferred)
    torch.testing.assert_close(torch.as_tensor(ours.grad).clone(), theirs.grad)


def test_a_sparse_gradient_is_added(is_sparse):
    ours, theirs = twins(is_sparse=is_sparse)
    ids = batch(1)
    for weight, lookup_is_sparse in ((ours, True), (theirs, False)):
        nn.functional.embedding(ids, weight, sparse=lookup_is_sparse).sum().backward()
    assert ours.grad.is_row_sparse is is_sparse
    torch.testing.assert_close(ours.grad.to_dense(), theirs.grad)


def test_a_gradient_whose_parts_are_larger_becomes_plain():
    ours, theirs = twins(batches=60)
    assert ours.grad.nbytes == theirs.grad.nbytes
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("norm_type", [0.0, 1.0, 2.0, math.inf, -math.inf])
def test_clipping_reads_no_row_into_memory(is_sparse, norm_type):
    ours, theirs = twins(batches=2, is_sparse=is_sparse)
    norms = [nn.utils.clip_grad_norm_([weight], 0.1, norm_type) for weight in (ours, theirs)]
    torch.testing.assert_close(*norms)
    assert not ours.grad.exists
    torch.testing.assert_close(ours.grad.to_dense(), theirs.grad)


def test_accumulation_goes_on_after_scaling(is_sparse):
    ours, theirs = twins(batches=2, is_sparse=is_sparse)
    for weight in (ours, theirs):
        weight.grad.mul_(torch.tensor(0.5)).div_(3)
    LookUp.apply(ours, batch(9), is_sparse).square().sum().backward()
    theirs[batch(9)].square().sum().backward()
    assert not ours.grad.exists
    torch.testing.assert_close(ours.grad.to_dense(), theirs.grad)


def test_a_grad_scaler_unscales_and_finds_infinities():
    ours, theirs = twins()
    for bad, weight in ((False, ours), (False, theirs), (True, ours)):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.zeros(()))  # creates its tensors
        if bad:
            weight.grad.mul_(math.inf)
        optimizer = torch.optim.SGD([weight], lr=0.0)
        scaler.unscale_(optimizer)
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        assert bool(found[torch.device("cpu")]) is bad
        if weight is theirs:
            assert torch.equal(ours.grad.to_dense(), theirs.grad)
    assert not ours.grad.exists


def test_zero_grad_empties_it(is_sparse):
    for set_to_none in (True, False):
        ours, _ = twins(is_sparse=is_sparse)
        torch.optim.SGD([ours]).zero_grad(set_to_none=set_to_none)
        if set_to_none:
            assert ours.grad is None
        else:
            assert ours.grad.nbytes == 0
            assert not ours.grad.to_dense().any()


def test_any_other_reader_gets_the_plain_gradient_with_one_warning():
    ours, theirs = twins()
    with pytest.warns(UserWarning, match=r"aten\.abs.*8,000 bytes"):
        assert torch.equal(ours.grad.abs(), theirs.grad.abs())
    assert torch.equal(ours.grad.sum(), theirs.grad.sum())  # no second warning
    assert torch.equal(ours.grad[3:5], theirs.grad[3:5])


def test_a_view_of_what_was_read_is_a_view_of_the_gradient():
    ours, _ = twins()
    with pytest.warns(UserWarning, match=r"aten\.view"):
        ours.grad.view(-1)[:] = 3.0
    ours.grad.mul_(2.0)
    assert torch.equal(ours.grad.to_dense(), torch.full((ROWS, DIM), 6.0))


def test_a_gradient_that_was_read_still_moves_touched_rows_alone():
    ours, _ = twins(is_sparse=True)
    with pytest.warns(UserWarning, match=r"aten\.abs"):
        ours.grad.abs()
    ours.grad.mul_(2.0)
    assert torch.equal(ours.grad.touched, batch(0).unique())


@pytest.mark.parametrize("modify", [lambda it: it.clamp_(0), lambda it: it.add_(1.0)])
def test_an_unknown_in_place_operation_is_refused(modify):
    ours, theirs = twins()
    with pytest.raises(NotImplementedError, match="not possible in place"):
        modify(ours.grad)
    assert torch.equal(ours.grad.to_dense(), theirs.grad)


def test_an_optimizer_of_torch_takes_the_plain_gradient():
    ours, theirs = twins()
    with pytest.warns(UserWarning, match="8,000 bytes"):
        torch.optim.AdamW([ours]).step()
    torch.optim.AdamW([theirs]).step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, torch.clone, lambda it: pickle.loads(pickle.dumps(it))],
    ids=["copy", "deepcopy", "clone", "pickle"],
)
def test_a_copy_is_the_same_gradient(copied, is_sparse):
    ours, theirs = twins(batches=2, is_sparse=is_sparse)
    ours.grad.mul_(0.5)
    copy_of_it = copied(ours.grad)
    assert isinstance(copy_of_it, so.DeferredGradient)
    assert copy_of_it.is_row_sparse is is_sparse
    torch.testing.assert_close(copy_of_it.to_dense(), theirs.grad * 0.5)


@pytest.mark.parametrize("copied", [copy.deepcopy, torch.clone])
def test_a_copy_changes_independently(copied):
    ours, theirs = twins()
    for is_read in (False, True):
        if is_read:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ours.grad.abs()
        copied(ours.grad).mul_(0.0)
        assert torch.equal(ours.grad.to_dense(), theirs.grad)


def test_a_detached_gradient_is_the_same_one():
    ours, theirs = twins()
    ours.grad.detach().mul_(2.0)
    assert torch.equal(ours.grad.to_dense(), theirs.grad * 2)


def test_changed_ids_are_refused():
    ids = batch(0)
    ours = table()
    LookUp.apply(ours, ids, False).sum().backward()
    ids.add_(1)
    for read in (lambda it: it.rows(0, 3), lambda it: it.to_dense(), torch.abs, copy.deepcopy):
        with pytest.raises(RuntimeError, match=r"the ids behind .* was modified in place"):
            read(ours.grad)


def test_hooks_may_look_at_it_and_return_another():
    seen = []
    ours, theirs = table(), table()
    for weight in (ours, theirs):
        weight.register_hook(lambda gradient: gradient * 0.5)
        weight.register_post_accumulate_grad_hook(lambda it: seen.append(it.grad.shape))
    LookUp.apply(ours, batch(0), False).square().sum().backward()
    theirs[batch(0)].square().sum().backward()
    assert not ours.grad.exists
    assert seen == [ours.shape, ours.shape]
    torch.testing.assert_close(ours.grad.to_dense(), theirs.grad)


def test_bags_with_weights_means_and_padding():
    weight = table()
    ids, offsets = torch.tensor([3, 5, 3, 7, 7, 7, 9]), torch.tensor([0, 0, 3, 5])
    factors = torch.linspace(-1.0, 2.0, len(ids))
    for mode, given in (("sum", factors), ("sum", None), ("mean", None)):
        theirs = nn.EmbeddingBag.from_pretrained(
            weight.detach(), freeze=False, mode=mode, padding_idx=5
        )
        out = theirs(ids, offsets, per_sample_weights=given)
        upstream = torch.randn(len(offsets), 3 * DIM, generator=torch.Generator().manual_seed(1))
        columns = upstream[:, DIM : 2 * DIM]  # of the gradient of several tables' outputs
        out.backward(columns)
        part = Lookups(
            weight,
            ids,
            columns,
            offsets=offsets,
            lookup_weights=given,
            mode=mode,
            padding_idx=5,
        )
        gradient = so.DeferredGradient(weight, [part])
        torch.testing.assert_close(gradient.to_dense(), theirs.weight.grad)
        assert gradient.is_within(float(part.bound()) * 1.001)
        assert theirs.weight.grad.abs().max() <= part.bound() * 1.001


def test_rows_that_exist_are_a_part():
    weight = table()
    values = torch.ones(ROWS, DIM)
    gradient = so.DeferredGradient(weight, [PlainRows(weight, values)])
    assert torch.equal(gradient.to_dense(), values)
    assert gradient.plain is values


def test_it_is_refused_to_read_rows_that_do_not_exist():
    ours, _ = twins()
    with pytest.raises(ValueError, match="rows must be within 0 and 500"):
        ours.grad.rows(0, ROWS + 1)
