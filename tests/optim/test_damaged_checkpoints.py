"""Contract 7: a damaged checkpoint is refused by the names of parameter and key, and loads nothing.

Other plans, shapes and dtypes are in `test_refused_checkpoints.py`.
"""

import copy
import functools
import io
import math
import random
from typing import Any

import pytest
import torch
from tiny_runs import MEMORIES, Plan, Run, batches, differences
from torch import Tensor

import sketchoptim as so

NAN, INF = math.nan, math.inf
COMPRESSED = ["lean-0.1", "row-wise", "paper-mv", "rank-one", "conservative by row, bfloat16"]
MEMORY_NAMES = [*COMPRESSED, "exact"]
# Numbers of parameters in the checkpoint: a table, and a dense weight in a group with a memory.
TABLE, WEIGHT = 0, 2


@functools.cache
def saved_once(memory: str) -> dict[str, Any]:
    return Run.start(Plan(so.Adam, MEMORIES[memory])).train(batches(3)).optimizer.state_dict()


def saved(memory: str) -> dict[str, Any]:
    """The checkpoint of three steps, the caller's own, to be edited: it has no digests."""
    return without_digests(copy.deepcopy(saved_once(memory)))


def without_digests(checkpoint: dict[str, Any]) -> dict[str, Any]:
    for state in checkpoint["state"].values():
        del state["digest"]
    return checkpoint


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


# -- found by the digests --------------------------------------------------------------------------


def flipped(tensor: Tensor) -> Tensor:
    """A copy with one bit flipped, the lowest of the last number."""
    damaged = tensor.clone()
    damaged.reshape(-1).view(torch.uint8)[-tensor.itemsize] ^= 1
    return damaged


@pytest.mark.parametrize("number", [TABLE, WEIGHT], ids=["table", "dense weight"])
@pytest.mark.parametrize("memory", MEMORY_NAMES)
def test_one_flipped_bit_in_any_tensor_is_refused(memory, number):
    for key, value in saved_once(memory)["state"][number].items():
        if isinstance(value, Tensor):
            checkpoint = copy.deepcopy(saved_once(memory))
            checkpoint["state"][number][key] = flipped(value)
            refuse(memory, checkpoint, f"parameter {number}", key)


def test_entries_that_changed_places_are_refused():
    checkpoint = copy.deepcopy(saved_once("exact"))
    state = checkpoint["state"][TABLE]
    state["first_values"], state["second_values"] = state["second_values"], state["first_values"]
    refuse("exact", checkpoint, "parameter 0", "is damaged")


@pytest.mark.parametrize("value", [None, "x", torch.zeros(2), torch.zeros((), dtype=torch.int64)])
def test_a_digest_that_is_none_is_refused(value):
    checkpoint = copy.deepcopy(saved_once("lean-0.1"))
    checkpoint["state"][TABLE]["digest"] = value
    refuse("lean-0.1", checkpoint, "parameter 0", "digest")


def test_a_momentum_that_is_missing_is_refused():
    """SGD may begin it late, so nothing else shows that it is missing."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = so.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(3)
    optimizer.step()
    checkpoint = optimizer.state_dict()
    del checkpoint["state"][0]["first_values"]
    with pytest.raises(ValueError, match=r"parameter 0 .* is damaged: digest is not for the entr"):
        optimizer.load_state_dict(checkpoint)


@pytest.mark.parametrize("memory", ["lean-0.1", "exact"])
def test_a_file_with_a_flipped_bit_never_loads_other_state(memory):
    plan = Plan(so.Adam, MEMORIES[memory])
    file = io.BytesIO()
    torch.save(saved_once(memory), file)
    content, generator = file.getvalue(), random.Random(0)
    original = Run.start(plan).train(batches(3)).bits()
    loaded = 0
    for _ in range(150):
        damaged = bytearray(content)
        damaged[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        run = Run.start(plan)
        try:
            run.optimizer.load_state_dict(torch.load(io.BytesIO(damaged)))
        except Exception:  # torch.load raises what it likes
            continue
        found = run.bits()
        assert [key for key in differences(found, original) if ":" in key] == []
        loaded += 1
    assert 0 < loaded < 150  # such as bits between the records of the archive


@pytest.mark.parametrize("memory", ["lean-0.1", "exact"])
@pytest.mark.parametrize(
    ("option", "value"), [("lr", 0.5), ("betas", (0.9, 0.9990000000000001)), ("foreach", True)]
)
def test_an_option_that_changed_is_named_in_a_warning(option, value, memory):
    """No error: rates are edited on purpose."""
    checkpoint = copy.deepcopy(saved_once(memory))
    checkpoint["param_groups"][0][option] = value
    run = Run.start(Plan(so.Adam, MEMORIES[memory]))
    with pytest.warns(UserWarning, match=rf"saved with: {option} of group 0 is now"):
        run.optimizer.load_state_dict(checkpoint)
    assert run.optimizer.param_groups[0][option] == value


def test_a_digest_of_options_that_is_none_is_named_in_a_warning():
    checkpoint = copy.deepcopy(saved_once("lean-0.1"))
    checkpoint["digest"] = [None]
    with pytest.warns(UserWarning, match="saved with: digest"):
        Run.start(Plan(so.Adam, MEMORIES["lean-0.1"])).optimizer.load_state_dict(checkpoint)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_does_not_load(share):
    file = io.BytesIO()
    torch.save(saved_once("lean-0.1"), file)
    content = file.getvalue()
    with pytest.raises((RuntimeError, ValueError)):
        torch.load(io.BytesIO(content[: int(share * len(content))]))


def test_a_state_that_was_changed_on_purpose_loads_without_its_digest():
    checkpoint = copy.deepcopy(saved_once("exact"))
    state = checkpoint["state"][TABLE]
    state["first_values"].zero_()
    refuse("exact", checkpoint, "first_values", "remove 'digest'")
    del state["digest"]
    run = Run.start(Plan(so.Adam, "exact"))
    run.optimizer.load_state_dict(checkpoint)
    assert not run.optimizer.state[run.model.table.weight]["first_values"].any()


# -- found without them ----------------------------------------------------------------------------


def with_element(tensor: Tensor, value: float) -> Tensor:
    damaged = tensor.clone()
    damaged.view(-1)[-1] = value
    return damaged


@pytest.mark.parametrize("number", [TABLE, WEIGHT], ids=["table", "dense weight"])
@pytest.mark.parametrize("value", [NAN, INF, -1.0])
@pytest.mark.parametrize("memory", COMPRESSED)
def test_a_second_moment_that_no_run_leaves_is_refused(memory, value, number):
    keys = keys_of(memory, "second_", is_scale=False)
    assert keys
    for key in keys:
        checkpoint = saved(memory)
        state = checkpoint["state"][number]
        state[key] = with_element(state[key], value)
        refuse(memory, checkpoint, f"parameter {number}", key)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_first_moment_that_is_not_finite_is_refused(value):
    (key,) = keys_of("paper-mv", "first_", is_scale=False)
    checkpoint = saved("paper-mv")
    state = checkpoint["state"][TABLE]
    state[key] = with_element(state[key], value)
    refuse("paper-mv", checkpoint, "parameter 0", key)


@pytest.mark.parametrize("value", [NAN, INF, 0.0, -1.0])
@pytest.mark.parametrize("memory", ["lean-0.1", "paper-mv", "rank-one"])
def test_a_scale_that_is_not_above_zero_and_finite_is_refused(memory, value):
    keys = keys_of(memory, "first_", "second_", is_scale=True)
    assert keys
    for key in keys:
        checkpoint = saved(memory)
        checkpoint["state"][TABLE][key].fill_(value)
        refuse(memory, checkpoint, "parameter 0", key)


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


@pytest.mark.parametrize("memory", ["lean-0.1", "exact"])
@pytest.mark.parametrize("step", BAD_STEPS.values(), ids=BAD_STEPS)
def test_a_step_that_is_no_count_is_refused(step, memory):
    checkpoint = saved(memory)
    checkpoint["state"][TABLE]["step"] = step
    refuse(memory, checkpoint, "parameter 0", "step")


@pytest.mark.parametrize("memory", MEMORY_NAMES)
def test_a_missing_key_of_a_state_is_named(memory):
    for key in saved(memory)["state"][TABLE]:
        checkpoint = saved(memory)
        del checkpoint["state"][TABLE][key]
        refuse(memory, checkpoint, "parameter 0", key)


@pytest.mark.parametrize("memory", ["lean-0.1", "row-wise", "rank-one", "exact"])
@pytest.mark.parametrize("key", ["second_novel", "third_values", "momentum_buffer", 7])
def test_a_foreign_key_of_a_state_is_named(memory, key):
    checkpoint = saved(memory)
    checkpoint["state"][TABLE][key] = torch.zeros(())
    refuse(memory, checkpoint, "parameter 0", str(key))


def test_a_moment_that_the_memory_does_not_keep_is_named():
    checkpoint = saved("lean-0.1")
    checkpoint["state"][TABLE]["first_values"] = torch.zeros(60, 6)
    refuse("lean-0.1", checkpoint, "parameter 0", "first_values")


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
    checkpoint = saved("lean-0.1")
    checkpoint["state"][TABLE] = state
    refuse("lean-0.1", checkpoint, "parameter 0", "dict")


@pytest.mark.parametrize("checkpoint", NO_DICTS.values(), ids=NO_DICTS)
def test_a_checkpoint_that_is_no_dict_is_refused(checkpoint):
    refuse("lean-0.1", checkpoint, "dict")


def test_the_state_of_a_parameter_that_no_group_has_is_refused():
    checkpoint = saved("lean-0.1")
    checkpoint["state"][99] = checkpoint["state"][TABLE]
    refuse("lean-0.1", checkpoint, "99")


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


# -- what exact state may hold ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype", "gradient", "steps"),
    [
        ("Adagrad", torch.float16, 20.0, 200),
        ("Adam", torch.float16, 9000.0, 2),
        ("Adam", torch.float32, 1e21, 2),
        ("Adam", torch.float32, NAN, 1),
    ],
)
def test_exact_state_that_overflowed_as_torchs_does_loads(kind, dtype, gradient, steps):
    ours, theirs = (torch.nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))
    optimizer = getattr(so, kind)([ours], lr=0.01)
    twin = getattr(torch.optim, kind)([theirs], lr=0.01)
    for _ in range(steps):
        ours.grad, theirs.grad = (torch.full_like(ours, gradient) for _ in range(2))
        optimizer.step()
        twin.step()
    saved = copy.deepcopy(optimizer.state_dict())
    second = saved["state"][0]["second_values"]
    assert not second.isfinite().any()
    expected = twin.state[theirs]["sum" if kind == "Adagrad" else "exp_avg_sq"]
    assert torch.equal(second.isnan(), expected.isnan())
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[ours]["second_values"].isinf(), expected.isinf())
