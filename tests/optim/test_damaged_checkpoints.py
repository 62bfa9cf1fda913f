"""Contract 7: a damaged checkpoint is refused by the names of parameter and key, and loads nothing.

Other plans, shapes and dtypes are in `test_refused_checkpoints.py`.
"""

import copy
import functools
import math
from typing import Any

import pytest
import torch
from tiny_runs import MEMORIES, Plan, Run, batches, differences
from torch import Tensor

import sketchoptim as so

NAN, INF = math.nan, math.inf
MEMORY_NAMES = [
    "lean",
    "row-wise",
    "paper-mv",
    "rank-one",
    "exact",
    "conservative by row, bfloat16",
]
# Numbers of parameters in the checkpoint: a table, and a dense weight in a group with a memory.
TABLE, WEIGHT = 0, 2


@functools.cache
def saved_once(memory: str) -> dict[str, Any]:
    return Run.start(Plan(so.Adam, MEMORIES[memory])).train(batches(3)).optimizer.state_dict()


def saved(memory: str) -> dict[str, Any]:
    """The checkpoint of three steps, the caller's own."""
    return copy.deepcopy(saved_once(memory))


def keys_of(memory: str, *prefixes: str, is_scale: bool | None = None) -> list[str]:
    """The keys of a table's moments that hold numbers, with their scales, without or alone."""
    return [
        key
        for key, value in saved_once(memory)["state"][TABLE].items()
        if key.startswith(prefixes)
        and value.is_floating_point()
        and is_scale in (None, key.endswith("_scale"))
    ]


def refuse(memory: str, checkpoint: Any, *names: str) -> None:
    """A run of two steps does not load the checkpoint, says the names, and is as it was."""
    run = Run.start(Plan(so.Adam, MEMORIES[memory])).train(batches(2))
    before = run.bits()
    with pytest.raises((ValueError, TypeError)) as raised:
        run.optimizer.load_state_dict(checkpoint)
    assert differences(run.bits(), before) == []
    assert [name for name in names if name not in str(raised.value)] == []


def with_element(tensor: Tensor, value: float) -> Tensor:
    damaged = tensor.clone()
    damaged.view(-1)[-1] = value
    return damaged


@pytest.mark.parametrize("number", [TABLE, WEIGHT], ids=["table", "dense weight"])
@pytest.mark.parametrize("value", [NAN, INF, -1.0])
@pytest.mark.parametrize("memory", MEMORY_NAMES)
def test_a_second_moment_that_no_run_leaves_is_refused(memory, value, number):
    keys = keys_of(memory, "second_", is_scale=False)
    assert keys
    for key in keys:
        checkpoint = saved(memory)
        state = checkpoint["state"][number]
        state[key] = with_element(state[key], value)
        refuse(memory, checkpoint, f"parameter {number}", key)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("memory", ["paper-mv", "exact"])
def test_a_first_moment_that_is_not_finite_is_refused(memory, value):
    (key,) = keys_of(memory, "first_", is_scale=False)
    checkpoint = saved(memory)
    state = checkpoint["state"][TABLE]
    state[key] = with_element(state[key], value)
    refuse(memory, checkpoint, "parameter 0", key)


@pytest.mark.parametrize("value", [NAN, INF, 0.0, -1.0])
@pytest.mark.parametrize("memory", ["lean", "paper-mv", "rank-one"])
def test_a_scale_that_is_not_above_zero_and_finite_is_refused(memory, value):
    keys = keys_of(memory, "first_", "second_", is_scale=True)
    assert keys
    for key in keys:
        checkpoint = saved(memory)
        checkpoint["state"][TABLE][key].fill_(value)
        refuse(memory, checkpoint, "parameter 0", key)


def test_the_exact_moments_of_a_parameter_without_memory_are_checked_too():
    checkpoint = saved("lean")
    state = checkpoint["state"][3]  # the bias
    state["second_values"] = with_element(state["second_values"], -1.0)
    refuse("lean", checkpoint, "parameter 3", "second_values")


BAD_STEPS = {
    "a word": "3",
    "nothing": None,
    "a flag": True,
    "a list": [3],
    "negative": -1,
    "a negative tensor": torch.tensor(-1.0),
    "NaN": torch.tensor(NAN),
    "infinite": INF,
    "no whole number": 2.5,
    "a tensor of no whole number": torch.tensor(2.5),
    "two numbers": torch.ones(2),
}


@pytest.mark.parametrize("memory", ["lean", "exact"])
@pytest.mark.parametrize("step", BAD_STEPS.values(), ids=BAD_STEPS)
def test_a_step_that_is_no_count_is_refused(step, memory):
    checkpoint = saved(memory)
    checkpoint["state"][TABLE]["step"] = step
    refuse(memory, checkpoint, "parameter 0", "step")


@pytest.mark.parametrize("memory", MEMORY_NAMES)
def test_a_missing_key_of_a_state_is_named(memory):
    for key in saved_once(memory)["state"][TABLE]:
        checkpoint = saved(memory)
        del checkpoint["state"][TABLE][key]
        refuse(memory, checkpoint, "parameter 0", key)


@pytest.mark.parametrize("memory", ["lean", "row-wise", "rank-one", "exact"])
@pytest.mark.parametrize("key", ["second_novel", "third_values", "momentum_buffer", 7])
def test_a_foreign_key_of_a_state_is_named(memory, key):
    checkpoint = saved(memory)
    checkpoint["state"][TABLE][key] = torch.zeros(())
    refuse(memory, checkpoint, "parameter 0", str(key))


def test_a_moment_that_the_memory_does_not_keep_is_named():
    checkpoint = saved("lean")
    checkpoint["state"][TABLE]["first_values"] = torch.zeros(60, 6)
    refuse("lean", checkpoint, "parameter 0", "first_values")


NO_DICTS = {
    "None": None,
    "an empty list": [],
    "a list": [1],
    "a word": "state",
    "a tensor": torch.ones(3),
    "a number": 3,
}


@pytest.mark.parametrize("state", NO_DICTS.values(), ids=NO_DICTS)
def test_a_state_that_is_no_dict_is_refused(state):
    checkpoint = saved("lean")
    checkpoint["state"][TABLE] = state
    refuse("lean", checkpoint, "parameter 0", "dict")


@pytest.mark.parametrize("checkpoint", NO_DICTS.values(), ids=NO_DICTS)
def test_a_checkpoint_that_is_no_dict_is_refused(checkpoint):
    refuse("lean", checkpoint, "dict")


def test_the_state_of_a_parameter_that_no_group_has_is_refused():
    checkpoint = saved("lean")
    checkpoint["state"][99] = checkpoint["state"][TABLE]
    refuse("lean", checkpoint, "99")


@pytest.mark.parametrize("value", [None, [1], torch.ones(3).long(), torch.zeros(60, 6).to_sparse()])
def test_a_moment_that_is_no_tensor_of_its_shape_is_refused(value):
    checkpoint = saved("exact")
    checkpoint["state"][TABLE]["second_values"] = value
    refuse("exact", checkpoint, "parameter 0", "second_values")


@pytest.mark.parametrize("memory", MEMORY_NAMES)
def test_what_a_run_did_leave_is_loaded(memory):
    """So that the tests above refuse what they damaged, and nothing else."""
    other = Run.start(Plan(so.Adam, MEMORIES[memory]))
    other.optimizer.load_state_dict(saved(memory))
    assert other.optimizer.state[other.model.table.weight]["step"] == 3


@pytest.mark.parametrize(
    ("groups", "names"),
    [(None, ["param_groups"]), ({}, ["param_groups"]), ([None], ["group"]), ([{}], ["params"])],
)
def test_groups_that_are_none_are_refused(groups, names):
    optimizer = so.Adam([torch.nn.Parameter(torch.zeros(3, 2))])
    with pytest.raises((ValueError, TypeError)) as raised:
        optimizer.load_state_dict({"state": {}, "param_groups": groups})
    assert [name for name in names if name not in str(raised.value)] == []
