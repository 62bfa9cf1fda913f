"""What an optimizer keeps from step to step never outlives what it was made from."""

import copy
import gc
import weakref

import pytest
import torch
from gradients import sparse
from torch import Tensor

import sketchoptim as so

# By row, by element, exact, and by the reference.
MEMORIES = ["lean-0.1", "paper-mv", "exact", "rank-one"]
every_memory = pytest.mark.parametrize("memory", MEMORIES)
IDS = torch.tensor([5, 2, 5, 0])


def values(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, generator=generator).to(dtype)


def stepped(parameter: Tensor, optimizer: torch.optim.Optimizer, *seeds: int) -> None:
    for seed in seeds:
        parameter.grad = sparse(IDS, values(seed, parameter.dtype), tuple(parameter.shape))
        optimizer.step()


def fresh(memory: str) -> tuple[Tensor, so.Adam]:
    parameter = torch.nn.Parameter(torch.ones(60, 3))
    return parameter, so.Adam([parameter], lr=0.1, memory=memory)


def expected(memory: str, *seeds: int) -> Tensor:
    parameter, optimizer = fresh(memory)
    stepped(parameter, optimizer, *seeds)
    return parameter.detach()


@every_memory
def test_weights_that_move_to_other_memory_are_found_there(memory):
    parameter, optimizer = fresh(memory)
    stepped(parameter, optimizer, 1)
    left = parameter.data
    parameter.data = left.clone()
    before = left.clone()
    stepped(parameter, optimizer, 2)
    assert torch.equal(parameter, expected(memory, 1, 2))
    assert torch.equal(left, before)


@every_memory
def test_state_that_moves_to_other_memory_is_found_there(memory):
    parameter, optimizer = fresh(memory)
    stepped(parameter, optimizer, 1)
    for kept in optimizer.state[parameter].values():
        if isinstance(kept, Tensor):
            kept.share_memory_()
    stepped(parameter, optimizer, 2)
    assert torch.equal(parameter, expected(memory, 1, 2))
    assert optimizer.state[parameter]["step"] == 2


@every_memory
def test_a_state_that_is_loaded_takes_the_place_of_the_old_one(memory):
    parameter, optimizer = fresh(memory)
    stepped(parameter, optimizer, 1)
    weights, saved = parameter.detach().clone(), copy.deepcopy(optimizer.state_dict())
    stepped(parameter, optimizer, 7, 8)
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        parameter.copy_(weights)
    stepped(parameter, optimizer, 2)
    assert torch.equal(parameter, expected(memory, 1, 2))


@every_memory
def test_a_copy_and_its_original_go_their_own_ways(memory):
    parameter, optimizer = fresh(memory)
    stepped(parameter, optimizer, 1)
    twin_parameter, twin = copy.deepcopy((parameter, optimizer))
    stepped(parameter, optimizer, 2)
    stepped(twin_parameter, twin, 3)
    assert torch.equal(parameter, expected(memory, 1, 2))
    assert torch.equal(twin_parameter, expected(memory, 1, 3))


@every_memory
def test_sparse_and_dense_gradients_may_take_turns(memory):
    parameter, optimizer = fresh(memory)
    other_parameter, other = fresh(memory)
    stepped(parameter, optimizer, 1)
    stepped(other_parameter, other, 1)
    dense = torch.zeros(60, 3)
    dense[7] = 1.0
    for it, by in ((parameter, optimizer), (other_parameter, other)):
        it.grad = dense.clone()
        by.step()
        stepped(it, by, 2)
    assert optimizer.state[parameter]["step"] == 3
    assert torch.equal(parameter, other_parameter)
    assert not torch.equal(parameter[7], torch.ones(3))


@every_memory
def test_no_gradient_is_kept_after_its_step(memory):
    def values_alive() -> int:
        gc.collect()
        return sum(type(it) is Tensor and it.shape == (4, 3) for it in gc.get_objects())

    parameter, optimizer = fresh(memory)
    before = values_alive()
    stepped(parameter, optimizer, 1, 2)
    kept = weakref.ref(parameter.grad)
    parameter.grad = None
    assert values_alive() == before
    assert kept() is None


def test_weights_that_are_transposed_where_they_are_are_found_there():
    weights = []
    for is_copied in (False, True):
        parameter = torch.nn.Parameter(torch.zeros(6, 6))
        optimizer = so.SGD([parameter], lr=1.0, momentum=0.0, memory="exact")
        parameter.grad = sparse(torch.tensor([1]), torch.ones(1, 6), (6, 6))
        optimizer.step()
        transposed = parameter.data.t()
        parameter.data = transposed.clone() if is_copied else transposed
        optimizer.step()
        weights.append(parameter.detach())
    assert torch.equal(*weights)


def test_state_that_is_thrown_away_is_free_after_the_next_step():
    dropped, optimizer = fresh("lean-0.1")
    kept = torch.nn.Parameter(torch.ones(60, 3))
    optimizer.add_param_group({"params": [kept]})
    stepped(dropped, optimizer, 1)
    stepped(kept, optimizer, 1)
    table, weight = weakref.ref(optimizer.state[dropped]["second_counters"]), weakref.ref(dropped)
    del optimizer.state[dropped]
    optimizer.param_groups.pop(0)
    del dropped
    stepped(kept, optimizer, 2)
    gc.collect()
    assert table() is None
    assert weight() is None


def test_the_profiler_sees_steps_under_the_name_that_torch_gives_them():
    parameter, optimizer = fresh("lean-0.1")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        stepped(parameter, optimizer, 1, 2)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["Optimizer.step#Adam.step"] == 2
