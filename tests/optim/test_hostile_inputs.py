"""Contract 8 under hostile input: a step happens as a whole or raises and changes nothing."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gradients import sparse
from tiny_runs import bits, differences
from torch import Tensor, nn
from torch_twins import check_same_bits, step_both

import sketchoptim as so

NAN, INF = math.nan, math.inf
SUPPORT = Path(__file__).parents[1] / "support"
IDS = torch.tensor([1, 4, 4, 7])


def run_program(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SUPPORT / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def refuse_step(optimizer: so.optim.base.Optimizer, error: type[Exception], pattern: str) -> None:
    """The step raises, and every plain parameter, moment and count has the bits that it had."""
    named = [
        (f"{number}.{place}", parameter)
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
        if type(parameter.data) is Tensor
    ]
    before = bits(optimizer, named)
    with pytest.raises(error, match=pattern):
        optimizer.step()
    assert differences(bits(optimizer, named), before) == []


# -- gradients of SGD that are not finite ----------------------------------------------------------


def sgd(layout: str, **options: Any) -> tuple[nn.Parameter, so.SGD]:
    """A table under SGD, which keeps nothing of it, with a gradient and two steps done."""
    table = nn.Parameter(random(10, 3))
    # A dense gradient belongs to a compressed parameter where the group names a memory.
    group = {"params": [table]} if layout == "sparse" else {"params": [table], "memory": "lean-0.1"}
    optimizer = so.SGD([group], lr=0.1, **options)
    for step in range(3):
        rows = random(4, 3, seed=step)
        table.grad = sparse(IDS, rows, (10, 3)) if layout == "sparse" else random(10, 3, seed=step)
        if step < 2:
            optimizer.step()
    return table, optimizer


def spoil(gradient: Tensor, value: float) -> None:
    (gradient._values() if gradient.is_sparse else gradient)[2, 1] = value


@pytest.mark.parametrize("momentum", [0.0, 0.9], ids=["no momentum", "dropped momentum"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("layout", ["sparse", "dense"])
def test_sgd_without_state_refuses_a_gradient_that_is_not_finite(layout, value, momentum):
    table, optimizer = sgd(layout, momentum=momentum)
    spoil(table.grad, value)
    refuse_step(optimizer, ValueError, 'must be finite .* nonfinite="skip" skips and counts')


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("layout", ["sparse", "dense"])
def test_sgd_without_state_skips_a_gradient_that_is_not_finite_and_counts_it(layout, value):
    table, optimizer = sgd(layout, nonfinite="skip")
    good = table.grad.clone()
    before = table.detach().clone()
    for count in (1, 2):
        spoil(table.grad, value)
        optimizer.step()
        assert torch.equal(table, before)
        assert optimizer.state[table]["skipped"] == count
        assert optimizer.state[table]["step"] == 2
    table.grad = good
    optimizer.step()
    assert torch.equal(table, before - 0.1 * good.to_dense())


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("layout", ["sparse", "dense"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_exact_sgd_does_with_such_a_gradient_what_torch_does(layout, value, momentum):
    ours, theirs = nn.Parameter(random(10, 3)), nn.Parameter(random(10, 3))
    pair = (
        ([ours], so.SGD([ours], lr=0.1, momentum=momentum, memory="exact")),
        ([theirs], torch.optim.SGD([theirs], lr=0.1, momentum=momentum)),
    )
    for is_bad in (False, True):
        rows = sparse(IDS, random(4, 3), (10, 3))
        gradient = rows if layout == "sparse" else random(10, 3, seed=1)
        if is_bad:
            spoil(gradient, value)
        step_both(*pair, [gradient])
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert not ours.isfinite().all()


# -- memory that was freed -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def freed() -> list[dict[str, Any]]:
    """What came of steps on freed tensors, one after the other."""
    result = run_program("freed_storages.py")
    done = [json.loads(line) for line in result.stdout.splitlines()]
    last = done[-1]["case"] if done else "none"
    assert result.returncode == 0, f"the process ended with {result.returncode} after {last}"
    return done


@pytest.mark.parametrize(
    "victim", ["parameter", "step", "first_", "second_", "dense", "values of", "indices of"]
)
def test_a_step_on_freed_memory_raises_and_changes_nothing(victim, freed):
    found = [case for case in freed if case["case"].startswith(victim)]
    assert found
    assert [case for case in found if case["error"] != "ValueError" or case["changed"]] == []


# -- parameters that torch cannot write to, behind others ------------------------------------------


def expanded() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1, 4).expand(3, 4))


def of_inference() -> nn.Parameter:
    with torch.inference_mode():
        return nn.Parameter(torch.zeros(3, 4))


UNWRITABLE = {
    "expanded": (expanded, "shares memory|expanded"),
    "inference": (of_inference, "inference"),
}
LATER_GROUPS = {
    "exact, dense": ({}, False),
    "lean, dense": ({"memory": "lean-0.1"}, False),
    "lean, sparse": ({}, True),
    "exact, sparse": ({"memory": "exact"}, True),
}


def behind_others(
    parameter: nn.Parameter, kind: type[so.optim.base.Optimizer] = so.Adam, **options: Any
) -> so.optim.base.Optimizer:
    """An optimizer of a lean table, an exact weight and, in the last group, the parameter."""
    table, weight = nn.Parameter(random(20, 4)), nn.Parameter(random(5, 4))
    groups = [{"params": [table]}, {"params": [weight]}, {"params": [parameter], **options}]
    optimizer = kind(groups, lr=0.1)
    kept, parameter.grad = parameter.grad, None
    for seed in range(2):
        table.grad = sparse(IDS, random(4, 4, seed=seed), (20, 4))
        weight.grad = random(5, 4, seed=seed)
        if seed == 0:
            optimizer.step()
    parameter.grad = kept
    return optimizer


@pytest.mark.parametrize("kind", [so.Adam, so.SGD])
@pytest.mark.parametrize(("options", "is_sparse"), LATER_GROUPS.values(), ids=LATER_GROUPS)
@pytest.mark.parametrize(("make", "pattern"), UNWRITABLE.values(), ids=UNWRITABLE)
def test_a_parameter_that_cannot_be_written_to_stops_the_whole_step(
    make, pattern, options, is_sparse, kind
):
    parameter = make()
    gradient = torch.ones(3, 4)
    parameter.grad = gradient.to_sparse(1) if is_sparse else gradient
    optimizer = behind_others(parameter, kind, **options)
    refuse_step(optimizer, ValueError, rf"shape \[3, 4\].*({pattern})")


def test_an_expanded_gradient_is_only_read_and_does_no_harm():
    ours, theirs = nn.Parameter(random(3, 4)), nn.Parameter(random(3, 4))
    pair = ([ours], so.Adam([ours])), ([theirs], torch.optim.Adam([theirs]))
    for parameters, optimizer in pair:
        parameters[0].grad = torch.ones(1, 4).expand(3, 4)
        optimizer.step()
    check_same_bits(*pair)


@pytest.mark.parametrize(
    "memory", ["paper-mv", "paper-v", "paper-v-only", so.Memory(second=so.TopSingular())]
)
def test_a_memory_that_depends_on_the_order_of_rows_is_refused_for_divided_ones(mesh, memory):
    from torch.distributed.tensor import Shard, distribute_tensor

    parameter = nn.Parameter(distribute_tensor(torch.ones(3, 4), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.ones(3, 4), mesh, [Shard(0)])
    optimizer = behind_others(parameter, memory=memory)
    refuse_step(optimizer, ValueError, r"shape \[3, 4\] is divided by rows.*(counters|columns)")
    assert torch.equal(parameter.to_local(), torch.ones(3, 4))
    assert not optimizer.state.get(parameter)


@pytest.mark.parametrize("memory", [None, "exact", "lean-0.1"])
@pytest.mark.parametrize("layout", ["by columns", "strided", "partial"])
def test_a_dtensor_that_is_not_divided_by_rows_stops_the_whole_step(mesh, layout, memory):
    from torch.distributed.tensor import DTensor, Partial, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    placement = {
        "by columns": Shard(1),
        "strided": _StridedShard(0, split_factor=1),  # as FSDP2 beside tensor parallelism has it
        "partial": Partial(),
    }[layout]
    parameter, gradient = (DTensor.from_local(torch.ones(3, 4), mesh, [placement]) for _ in "pg")
    parameter = nn.Parameter(parameter)
    parameter.grad = gradient
    optimizer = behind_others(parameter, **({} if memory is None else {"memory": memory}))
    refuse_step(optimizer, ValueError, r"shape \[3, 4\].*Shard\(0\).*got the placements")
    assert torch.equal(parameter.to_local(), torch.ones(3, 4))


def test_a_gradient_that_is_laid_out_otherwise_stops_the_whole_step(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    parameter = nn.Parameter(distribute_tensor(torch.ones(3, 4), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.ones(3, 4), mesh, [Replicate()])
    refuse_step(behind_others(parameter), TypeError, r"laid out as .*Shard.*got .*Replicate")


def test_a_gradient_that_is_a_dtensor_of_a_plain_parameter_is_refused(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    parameter = nn.Parameter(torch.ones(3, 4))
    parameter.grad = distribute_tensor(torch.ones(3, 4), mesh, [Shard(0)])
    refuse_step(behind_others(parameter), TypeError, r"gradient .*shape \[3, 4\].*DTensor")


# -- layouts and empty tables ----------------------------------------------------------------------


def steps_of_sgd(optimizer: torch.optim.Optimizer, gradients: list[Tensor]) -> Tensor:
    """The parameter after steps on the gradients as they are, with the strides that they have."""
    (parameter,) = optimizer.param_groups[0]["params"]
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach()


def test_sgd_goes_on_from_a_transposed_dense_gradient_with_sparse_ones():
    """Which have all rows: of others torch.optim moves those too that have no gradient."""
    options = {"lr": 0.1, "momentum": 0.9}
    transposed, order = random(4, 6, seed=1).T, torch.tensor([3, 0, 5, 1, 4, 2, 2])
    rows = [sparse(order, random(7, 4, seed=seed), (6, 4)) for seed in (2, 3)]
    gradients = [transposed, *rows, transposed]
    ours = so.SGD([nn.Parameter(random(6, 4))], memory="exact", **options)
    theirs = torch.optim.SGD([nn.Parameter(random(6, 4))], **options)
    torch.testing.assert_close(steps_of_sgd(ours, gradients), steps_of_sgd(theirs, gradients))


def test_the_strides_of_a_dense_gradient_do_not_change_what_sparse_ones_do_after_it():
    transposed = random(4, 6, seed=1).T
    rows = [sparse(IDS[:3], random(3, 4, seed=seed), (6, 4)) for seed in (2, 3)]
    found = []
    for dense in (transposed, transposed.contiguous()):
        optimizer = so.SGD([nn.Parameter(random(6, 4))], lr=0.1, momentum=0.9, memory="exact")
        found.append(steps_of_sgd(optimizer, [dense, *rows]))
    assert torch.equal(*found)


TORCH_OPTIMIZERS = {
    "SparseAdam": torch.optim.SparseAdam,
    "Adam": torch.optim.Adam,
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "SGD": lambda params: torch.optim.SGD(params, momentum=0.9),
}


def empty_gradient(is_sparse: bool) -> Tensor:
    return sparse(IDS, torch.zeros(4, 0), (10, 0)) if is_sparse else torch.zeros(10, 0)


@pytest.mark.parametrize("memory", ["lean-0.1", "row-wise", "paper-mv", "rank-one", "exact"])
@pytest.mark.parametrize("make", TORCH_OPTIMIZERS.values(), ids=TORCH_OPTIMIZERS)
def test_a_table_without_columns_is_converted_and_steps_on(
    make: Callable[..., torch.optim.Optimizer], memory: str
):
    table = nn.Parameter(torch.zeros(10, 0))
    theirs = make([table])
    is_sparse = isinstance(theirs, torch.optim.SparseAdam)
    table.grad = empty_gradient(is_sparse)
    theirs.step()
    ours = so.from_torch(theirs, memory, tables=[table])
    before = int(ours.state[table]["step"])
    ours.step()
    assert ours.state[table]["step"] == before + 1
    kept = [it for it in ours.state[table].values() if isinstance(it, Tensor)]
    assert all(tensor.isfinite().all() for tensor in kept)


@pytest.mark.parametrize("norm_type", [INF, 2.0])
@pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
def test_the_norm_of_gradients_without_elements_is_zero(is_sparse, norm_type):
    table = nn.Parameter(torch.zeros(10, 0))
    table.grad = empty_gradient(is_sparse)
    assert so.clip_grad_norm_([table], 1.0, norm_type).item() == 0.0


@pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
def test_a_gradient_without_elements_does_not_change_the_largest_of_others(is_sparse):
    table, weight = nn.Parameter(torch.zeros(10, 0)), nn.Parameter(torch.zeros(2))
    table.grad, weight.grad = empty_gradient(is_sparse), torch.tensor([3.0, -4.0])
    assert so.clip_grad_norm_([table, weight], 2.0, INF).item() == 4.0
    torch.testing.assert_close(weight.grad, torch.tensor([1.5, -2.0]))


# -- after 2^24 steps, where float32 stops counting by ones ----------------------------------------

MANY = 2**24


def after_many_steps(
    memory: str | so.Memory, *, is_sparse: bool = True
) -> tuple[nn.Parameter, so.Adam]:
    table = nn.Parameter(random(40, 4))
    optimizer = so.Adam([{"params": [table], "memory": memory}], lr=0.01)
    table.grad = sparse(IDS, random(4, 4), (40, 4)) if is_sparse else random(40, 4)
    optimizer.step()
    optimizer.state[table]["step"].fill_(MANY)
    return table, optimizer


def counters(optimizer: so.Adam, table: nn.Parameter) -> Tensor:
    """The array of the sketch of the second moment, the one tensor of three dimensions."""
    (found,) = [
        it for it in optimizer.state[table].values() if isinstance(it, Tensor) and it.dim() == 3
    ]
    return found


@pytest.mark.parametrize("memory", ["lean-0.1", "row-wise", "rank-one", "exact"])
@pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
def test_steps_are_counted_beyond_those_that_float32_counts(memory, is_sparse):
    table, optimizer = after_many_steps(memory, is_sparse=is_sparse)
    for count in (1, 2, 3):
        optimizer.step()
        assert int(optimizer.state[table]["step"]) == MANY + count


def test_a_checkpoint_keeps_such_a_count():
    table, optimizer = after_many_steps("lean-0.1")
    optimizer.step()
    other = so.Adam([{"params": [table], "memory": "lean-0.1"}])
    other.load_state_dict(optimizer.state_dict())
    assert int(other.state[table]["step"]) == MANY + 1


def test_cleaning_goes_on_after_so_many_steps():
    sketch = so.Sketched(width=8, clean_every=2, clean_by=0.0)
    table, optimizer = after_many_steps(so.Memory(second=sketch))
    emptied = []
    for _ in range(4):
        optimizer.step()
        emptied.append(not counters(optimizer, table).any())
    assert emptied == [False, True, False, True]


def test_folding_goes_on_after_so_many_steps():
    sketch = so.Sketched(width=8, fold_at=(MANY + 1, MANY + 3), conservative=True)
    table, optimizer = after_many_steps(so.Memory(second=sketch))
    widths = []
    for _ in range(4):
        optimizer.step()
        widths.append(counters(optimizer, table).shape[1])
    assert widths == [4, 4, 2, 2]


# -- a step count that was spoiled -----------------------------------------------------------------


@pytest.mark.parametrize("count", [NAN, INF, -1.0])
@pytest.mark.parametrize("spoiled", [0, 1], ids=["lean", "exact"])
def test_a_step_count_that_is_none_is_refused_by_name(spoiled, count):
    table, bias = nn.Parameter(random(10, 3)), nn.Parameter(random(3))
    groups = [{"params": [("table", table)], "memory": "lean"}, {"params": [("bias", bias)]}]
    optimizer = so.Adam(groups)
    for parameter in (table, bias):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.state[(table, bias)[spoiled]]["step"].fill_(count)
    pattern = f"step in its state must be .*; load a checkpoint\nIt is {('table', 'bias')[spoiled]}"
    refuse_step(optimizer, ValueError, pattern)


# -- a lack of memory ------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of the address space")
def test_a_step_that_lacks_memory_is_done_or_not_begun():
    result = run_program("starved_steps.py")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "refused then done 13\n"
