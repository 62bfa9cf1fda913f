"""Contract 7: what `state_dict` holds and what loading restores."""

import copy
import pickle
from typing import Any

import pytest
import tiny_runs
import torch
from saved_runs import SAVED_AFTER, milestone, reloaded, storages_of
from tiny_runs import PLANS, PRESET_PLANS, Plan, Run, batches, differences
from torch import Tensor

import sketchoptim as so
from sketchoptim import moments
from sketchoptim.moments import Part, Table


def plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(plain(key) and plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(plain(item) for item in value)
    return type(value) in (int, float, bool, str, type(None), Tensor)


@tiny_runs.each({**PRESET_PLANS, "folded": PLANS["Adam, linear, cleaned and folded"]})
def test_a_state_dict_holds_plain_tensors_numbers_and_strings(plan):
    _, optimizer = pickle.loads(milestone(plan).pickled)
    assert plain(optimizer.state_dict())


def test_names_of_parameters_are_kept():
    model = tiny_runs.TinyModel()
    optimizer = so.Adam(model.named_parameters())
    (saved,) = reloaded(optimizer.state_dict())
    expected = ["table.weight", "late.weight", "head.weight", "head.bias"]
    assert saved["param_groups"][0]["param_names"] == expected
    named, nameless = so.Adam(model.named_parameters()), so.Adam(model.parameters())
    for other in (named, nameless):
        other.load_state_dict(saved)
        assert set(other.param_groups[0]["params"]) == set(model.parameters())
    assert named.param_groups[0]["param_names"] == expected


def test_a_checkpoint_without_names_leaves_those_that_there_are():
    model = tiny_runs.TinyModel()
    named, nameless = so.Adam(model.named_parameters()), so.Adam(model.parameters())
    named.load_state_dict(nameless.state_dict())
    assert named.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]


def test_the_count_of_skipped_steps_is_saved():
    plan = Plan(so.Adam, "lean-0.1", {"nonfinite": "skip"})
    run = Run.start(plan).train(batches(2))
    run.backward(batches(1)[0])
    run.model.table.weight.grad._values().fill_(float("nan"))
    run.optimizer.step()
    (saved,) = reloaded(run.optimizer.state_dict())
    resumed = Run.start(plan)
    resumed.optimizer.load_state_dict(saved)
    assert resumed.optimizer.state[resumed.model.table.weight]["skipped"] == 1


# -- loading ---------------------------------------------------------------------------------------


def test_a_checkpoint_from_before_an_option_was_added_is_loaded():
    run = Run.start(PRESET_PLANS["lean-0.1"]).train(batches(2))
    (saved,) = reloaded(run.optimizer.state_dict())
    for group in saved["param_groups"]:
        del group["memory"]["clip"], group["memory"]["second"]["fold_when"]
    before = run.bits()
    run.optimizer.load_state_dict(saved)
    assert differences(run.bits(), before) == []


def of_version_0_1() -> tuple[Run, dict[str, Any]]:
    """A run under the default of version 0.1, and its checkpoint as that version wrote it."""
    run = Run.start(PRESET_PLANS["lean-0.1"]).train(batches(SAVED_AFTER))
    (saved,) = reloaded(run.optimizer.state_dict())
    for group in saved["param_groups"]:
        group["compress_dense"] = group.pop("compress") == "all"
        if group["memory"]["second"] is not None:
            del group["memory"]["second"]["columns"], group["memory"]["second"]["array_below"]
    for digested in (saved, *saved["state"].values()):
        del digested["digest"]
    return run, saved


def test_a_checkpoint_of_the_first_default_is_loaded_into_the_preset_of_its_name():
    run, saved = of_version_0_1()
    resumed = Run.start(PRESET_PLANS["lean-0.1"])
    resumed.model.load_state_dict(run.model.state_dict())
    resumed.optimizer.load_state_dict(saved)
    more = batches(3, seed=2)
    assert differences(resumed.train(more).bits(), run.train(more).bits()) == []


def test_a_checkpoint_of_the_first_default_is_refused_by_todays_and_names_the_preset():
    _, saved = of_version_0_1()
    run = Run.start(PRESET_PLANS["lean"]).train(batches(2))
    before = run.bits()
    remedy = r"second.columns is True here and False in.*memory, memory=\"lean-0.1\", to load it"
    with pytest.raises(ValueError, match=remedy):
        run.optimizer.load_state_dict(saved)
    assert differences(run.bits(), before) == []


@tiny_runs.each(PRESET_PLANS)
def test_loaded_state_shares_no_memory_with_the_dict_or_another_optimizer(plan):
    source = Run.start(plan).train(batches(SAVED_AFTER))
    saved = source.optimizer.state_dict()
    first, second = Run.start(plan), Run.start(plan)
    first.optimizer.load_state_dict(saved)
    second.optimizer.load_state_dict(saved)
    owners = [storages_of(saved), *(storages_of(dict(r.optimizer.state)) for r in (first, second))]
    assert sum(map(len, owners)) == len(set().union(*owners))


@tiny_runs.each(PRESET_PLANS)
def test_training_on_leaves_the_loaded_dict_as_it_was(plan):
    saved = Run.start(plan).train(batches(SAVED_AFTER)).optimizer.state_dict()
    saved = copy.deepcopy(saved)
    untouched = pickle.dumps(reloaded(saved)[0]["param_groups"])
    tables = copy.deepcopy(saved["state"])
    run = Run.start(plan)
    run.optimizer.load_state_dict(saved)
    run.train(batches(3))
    assert pickle.dumps(reloaded(saved)[0]["param_groups"]) == untouched
    assert all(differences(tables[key], saved["state"][key]) == [] for key in tables)


def test_loaded_options_are_not_those_of_the_dict():
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    saved = so.Adam([parameter], betas=[0.8, 0.9]).state_dict()
    optimizer = so.Adam([parameter])
    optimizer.load_state_dict(saved)
    saved["param_groups"][0]["betas"][0] = 0.5
    assert optimizer.param_groups[0]["betas"] == [0.8, 0.9]


def test_one_dict_can_be_loaded_again_and_again():
    plan = PRESET_PLANS["lean-0.1"]
    source = Run.start(plan).train(batches(SAVED_AFTER))
    saved = copy.deepcopy(source.optimizer.state_dict())
    run = Run.start(plan)
    for _ in range(3):
        run.model.load_state_dict(source.model.state_dict())
        run.optimizer.load_state_dict(saved)
        assert differences(run.bits(), source.bits()) == []
        run.train(batches(2))


def test_loading_replaces_all_state_that_there_was():
    plan = PRESET_PLANS["lean-0.1"]
    saved = Run.start(plan).train(batches(2), uses_late=False).optimizer.state_dict()
    run = Run.start(plan).train(batches(5))
    assert run.optimizer.state[run.model.late.weight]
    run.optimizer.load_state_dict(saved)
    assert not run.optimizer.state.get(run.model.late.weight)
    assert run.optimizer.state[run.model.table.weight]["step"] == 2


# -- another dtype, another device -----------------------------------------------------------------


def declared(plan: Plan, parameter: Tensor) -> dict[str, Part]:
    """What the storages of a compressed parameter declare, by their keys in its state."""
    memory = so.Memory.of(plan.memory)
    table = Table(parameter.shape, parameter.dtype, parameter.device)
    return {
        f"{name}_{part.name}": part
        for name, storage in (("first", memory.first), ("second", memory.second))
        if storage is not None
        for part in moments.declare(storage, name, table)
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@tiny_runs.each(PRESET_PLANS)
def test_only_parts_that_say_so_follow_the_dtype_of_the_parameter(plan, dtype):
    saved = Run.start(plan).train(batches(SAVED_AFTER)).optimizer.state_dict()
    resumed = Run.start(plan, dtype=dtype)
    resumed.optimizer.load_state_dict(saved)
    weight = resumed.model.table.weight
    parts = declared(plan, weight)
    assert parts
    for key, part in parts.items():
        assert resumed.optimizer.state[weight][key].dtype == (part.dtype or dtype), key
    resumed.train(batches(1))


@tiny_runs.each(PRESET_PLANS)
def test_state_goes_to_the_device_of_the_parameter(plan):
    """The meta device stands for any other: what has to be there is there, and no more."""
    saved = Run.start(plan).train(batches(SAVED_AFTER)).optimizer.state_dict()
    run = Run.start(plan, device="meta")
    run.optimizer.load_state_dict(saved)
    state = run.optimizer.state[run.model.table.weight]
    assert state["step"].device.type == state["shape"].device.type == "cpu"
    for key, part in declared(plan, run.model.table.weight).items():
        assert state[key].device.type == ("cpu" if part.is_on_host else "meta"), key
        assert state[key].shape == saved["state"][0][key].shape, key


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@tiny_runs.each(PRESET_PLANS)
def test_a_checkpoint_moves_between_cpu_and_cuda(plan):
    part = Run.start(plan).train(batches(SAVED_AFTER))
    there = Run.start(plan, device="cuda")
    there.model.load_state_dict(part.model.state_dict())
    there.optimizer.load_state_dict(part.optimizer.state_dict())
    there.train(ids.cuda() for ids in batches(2))
    back = Run.start(plan)
    back.model.load_state_dict(there.model.state_dict())
    back.optimizer.load_state_dict(there.optimizer.state_dict())
    back.train(batches(1))
    part.train(batches(2)).train(batches(1))
    torch.testing.assert_close(back.model.table.weight, part.model.table.weight)


# -- hooks -----------------------------------------------------------------------------------------


def test_hooks_on_saving_see_what_is_saved_and_can_change_it():
    run = Run.start(PRESET_PLANS["paper-mv"]).train(batches(2))
    seen: list[Any] = []

    def post(optimizer, state):
        seen.append(plain(state))
        return {**state, "epoch": 3}

    run.optimizer.register_state_dict_pre_hook(lambda optimizer: seen.append(optimizer))
    run.optimizer.register_state_dict_post_hook(post)
    assert run.optimizer.state_dict()["epoch"] == 3
    assert seen == [run.optimizer, True]
    assert run.optimizer.state_dict()["epoch"] == 3
    assert seen == [run.optimizer, True] * 2


def test_hooks_on_loading_see_the_dict_and_then_the_restored_state():
    plan = PRESET_PLANS["lean-0.1"]
    saved = Run.start(plan).train(batches(2)).optimizer.state_dict()
    run = Run.start(plan, dtype=torch.bfloat16)
    seen: list[Any] = []
    weight = run.model.table.weight

    def post(optimizer):
        seen.append(optimizer.state[weight]["second_counters"].dtype)
        seen.append(optimizer.param_groups[0]["memory"] == so.storage.PRESETS["lean-0.1"])

    run.optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(plain(state)))
    run.optimizer.register_load_state_dict_post_hook(post)
    run.optimizer.load_state_dict(saved)
    assert seen == [True, torch.float32, True]


def test_a_hook_on_loading_may_replace_the_dict():
    """As for a checkpoint of an older version, which a hook brings up to date."""
    plan = PRESET_PLANS["lean-0.1"]
    saved = Run.start(plan).train(batches(2)).optimizer.state_dict()
    run = Run.start(plan)
    run.optimizer.register_load_state_dict_pre_hook(lambda _, old: old["optimizer"])
    run.optimizer.load_state_dict({"optimizer": saved})
    assert run.optimizer.state[run.model.table.weight]["step"] == 2
