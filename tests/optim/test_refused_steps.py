"""Contract 8: a step refuses what does not fit, says what it is, and has changed nothing."""

import copy

import pytest
import tiny_runs
import torch
from gradients import unchecked
from refusals import refuse_step, trained, trained_with
from tiny_runs import MEMORIES, OPTIMIZERS, PRESET_PLANS, Run, batches, differences
from torch import Tensor, nn

import sketchoptim as so

# -- memories --------------------------------------------------------------------------------------

OTHER_MEMORIES = {
    "row-wise": so.Memory(second=so.RowWise()),
    "rank one": so.Memory(second=so.RankOne()),
    "top singular": so.Memory(second=so.TopSingular()),
    "exact": so.Memory(second=so.Exact()),
    "by element": MEMORIES["linear by element, float32"],
    "of another depth": so.Memory(second=so.Sketched(depth=2)),
    "of another dtype": so.Memory(second=so.Sketched(dtype=torch.bfloat16)),
    "of another width": so.Memory(second=so.Sketched(ratio=1 / 2, conservative=True)),
    "that decays otherwise": so.Memory(second=so.Sketched(decay="bucket")),
}


@pytest.mark.parametrize("memory", OTHER_MEMORIES.values(), ids=OTHER_MEMORIES.keys())
def test_a_step_refuses_a_memory_that_the_state_was_not_made_for(memory):
    run = trained_with("lean-0.1")
    run.backward(batches(1)[0])
    group = run.optimizer.param_groups[1]
    kept = group["memory"]
    group["memory"] = memory
    try:
        refuse_step(run, ValueError, "memory of a group must be kept as in earlier steps, .* got")
    finally:
        group["memory"] = kept


@pytest.mark.parametrize("name", ["row-wise", "exact", "by element", "of another width"])
def test_a_copied_optimizer_refuses_a_memory_that_the_state_was_not_made_for(name):
    """It has forgotten the memory of earlier steps, but knows it from the state."""
    model, optimizer = copy.deepcopy(
        (trained_with("lean-0.1").model, trained_with("lean-0.1").optimizer)
    )
    run = Run(model, optimizer)
    run.backward(batches(1)[0])
    optimizer.param_groups[0]["memory"] = OTHER_MEMORIES[name]
    refuse_step(run, ValueError, "the second moment of the parameter .* must be kept in .*, but it")


def test_a_step_refuses_a_state_without_one_of_its_moments():
    run = trained()
    state = run.optimizer.state[run.model.head.bias]
    run.backward(batches(1)[0])
    del state["second_values"]
    refuse_step(
        run, ValueError, r"second moment of .* must be kept in Exact\(\), but it has nothing"
    )


def test_a_step_refuses_the_name_of_a_preset_put_into_a_group():
    run = trained_with("lean-0.1")
    run.backward(batches(1)[0])
    group = run.optimizer.param_groups[2]
    kept = group["memory"]
    group["memory"] = "exact"
    try:
        refuse_step(run, TypeError, "memory of a group must be a Memory, got 'exact'")
    finally:
        group["memory"] = kept


# -- gradients -------------------------------------------------------------------------------------

BAD_IDS = {
    "too large": [0, 5, tiny_runs.ROWS],
    "far too large": [2**40],
    "negative": [3, -1],
    "both": [-5, tiny_runs.ROWS + 5],
}


@pytest.mark.parametrize("ids", BAD_IDS.values(), ids=BAD_IDS.keys())
@pytest.mark.parametrize("memory", ["lean-0.1", "exact", "paper-mv", "rank-one"])
def test_a_step_refuses_row_ids_outside_the_table(memory, ids):
    run = trained_with(memory)
    run.backward(batches(1)[0])
    run.model.late.weight.grad = unchecked([1], run.model.late.weight)
    run.model.table.weight.grad = unchecked(ids, run.model.table.weight)
    pattern = rf"shape \[60, 6\] must have row ids between 0 and 59, got {min(ids)} to {max(ids)}"
    refuse_step(run, ValueError, pattern)


def test_ids_are_checked_in_a_gradient_that_calls_itself_coalesced():
    run = trained()
    weight = run.model.table.weight
    weight.grad = unchecked([1, tiny_runs.ROWS], weight)._coalesced_(True)
    refuse_step(run, ValueError, "row ids between 0 and 59, got 1 to 60")


def swapped(parameter: Tensor, data: Tensor) -> None:
    """Puts other data into a parameter that keeps its gradient."""
    parameter.data = data


MISFITS = {
    "gradient of another dtype": (
        lambda p: swapped(p, p.data.double()),
        TypeError,
        r"gradient of the parameter of shape \[60, 6\] must be torch.float64, got torch.float32",
    ),
    "sparse in both dimensions": (
        lambda p: setattr(p, "grad", torch.ones(60, 6).to_sparse()),
        ValueError,
        r"must be sparse in rows alone \(sparse_dim 1\), got 2; make it with to_sparse\(1\)",
    ),
}


@pytest.mark.parametrize("where", ["table", "late"])
@pytest.mark.parametrize(("spoil", "error", "pattern"), MISFITS.values(), ids=MISFITS.keys())
def test_a_step_refuses_a_gradient_that_does_not_fit(spoil, error, pattern, where):
    """Wherever it is, the parameters before it and behind it stay as they are."""
    run = trained()
    if where == "late":  # the same table, but behind the other
        run.optimizer.param_groups[0]["params"].reverse()
    run.backward(batches(1)[0])
    spoil(run.model.table.weight)
    refuse_step(run, error, pattern)


def test_a_first_step_refuses_a_gradient_of_another_shape():
    run = Run.start(PRESET_PLANS["lean-0.1"])
    run.backward(batches(1)[0])
    swapped(run.model.late.weight, torch.ones(70, 6))
    pattern = r"gradient of the parameter of shape \[70, 6\] must have that shape, got \[30, 6\]"
    refuse_step(run, ValueError, pattern)
    assert not run.optimizer.state


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_refuses_a_gradient_on_another_device():
    run = trained()
    run.backward(batches(1)[0])
    run.model.table.weight.data = run.model.table.weight.data.cuda()
    with pytest.raises(ValueError, match="must be on cuda:0, got cpu"):
        run.optimizer.step()


def test_a_closure_that_raises_changes_nothing():
    run = trained()

    def closure() -> float:
        run.backward(batches(1)[0])
        raise RuntimeError("no data")

    before = run.bits()
    with pytest.raises(RuntimeError, match="no data"):
        run.optimizer.step(closure)
    assert differences(run.bits(), before) == []


# -- parameters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("shape", [(70, 6), (60, 8), (60, 3, 2)], ids=str)
@pytest.mark.parametrize("memory", ["lean-0.1", "exact", "rank-one"])
def test_a_step_refuses_a_parameter_that_was_resized(memory, shape, is_sparse):
    first, second = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(60, 6))
    optimizer = so.Adam([{"params": [first, second], "memory": memory}])

    def backward() -> None:
        for parameter in (first, second):
            rows = torch.ones(2, *parameter.shape[1:])
            gradient = unchecked([0, 3], parameter, values=rows)
            parameter.grad = gradient if is_sparse else torch.ones_like(parameter)

    backward()
    optimizer.step()
    second.grad = None
    second.data = torch.ones(shape)
    backward()
    before = tiny_runs.bits(optimizer, [("first", first), ("second", second)])
    with pytest.raises(ValueError, match=r"for shape .*, got \[60, 6\]; build the opt"):
        optimizer.step()
    after = tiny_runs.bits(optimizer, [("first", first), ("second", second)])
    assert differences(before, after) == []


@pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_refuses_exact_moments_of_another_dtype(kind, is_sparse):
    parameter = nn.Parameter(torch.ones(5, 2))
    options = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = OPTIMIZERS[kind]([parameter], lr=0.1, memory="exact", **options)

    def backward() -> None:
        parameter.grad = torch.ones_like(parameter)
        if is_sparse:
            parameter.grad = parameter.grad.to_sparse(1)

    backward()
    optimizer.step()
    parameter.grad = None
    parameter.data = parameter.data.bfloat16()
    backward()
    before = tiny_runs.bits(optimizer, [("p", parameter)])
    pattern = r"must be kept in Exact\(\), but its .*_values is torch.float32, not torch.bfloat16; "
    with pytest.raises(ValueError, match=pattern):
        optimizer.step()
    assert differences(tiny_runs.bits(optimizer, [("p", parameter)]), before) == []


UNFIT = {
    "complex64": (
        lambda ones: ones.to(torch.complex64),
        r"real .*, got torch.complex64 of shape \[3, 2\]; keep .* as torch.view_as_real",
    ),
    "complex128": (lambda ones: ones.to(torch.complex128), "real floating point, got torch.comp"),
    "sparse": (lambda ones: ones.to_sparse(1), "dense tensors, got torch.sparse_coo .*; only"),
    "sparse CSR": (lambda ones: ones.to_sparse_csr(), "dense tensors, got torch.sparse_csr"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize(("convert", "pattern"), UNFIT.values(), ids=UNFIT.keys())
def test_a_step_refuses_parameters_it_cannot_move(convert, pattern):
    good, bad = nn.Parameter(torch.ones(3, 2)), nn.Parameter(convert(torch.ones(3, 2)))
    optimizer = so.Adam([good, bad])
    good.grad, bad.grad = torch.ones(3, 2), convert(torch.ones(3, 2))
    with pytest.raises(TypeError, match=f"parameters must be {pattern}"):
        optimizer.step()
    assert torch.equal(good, torch.ones(3, 2))
    assert not optimizer.state


# -- which parameter it was ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_named", "note"), [(True, "It is item.weight."), (False, "It is parameter 1.")]
)
def test_a_refused_step_says_which_parameter_it_was(is_named, note):
    model = nn.ModuleDict({name: nn.Embedding(9, 2, sparse=True) for name in ("user", "item")})
    optimizer = so.Adam(model.named_parameters() if is_named else model.parameters())
    model["item"](torch.tensor([1])).sum().backward()
    model["item"].weight.grad *= torch.nan
    with pytest.raises(ValueError, match="must be finite") as caught:
        optimizer.step()
    assert note in caught.value.__notes__[0]


def test_a_weight_that_is_not_finite_is_named_where_it_decays_into_the_gradient():
    table = nn.Embedding(9, 2, sparse=True)
    optimizer = so.Adam(table.parameters(), weight_decay=0.1)
    table(torch.tensor([1])).sum().backward()
    table.weight.data[1] = torch.inf
    with pytest.raises(ValueError, match="the weights that decay into it, must be finite"):
        optimizer.step()
