"""Plans and checkpoints that were damaged: one `ValueError` that says where, and the remedy."""

import copy
import functools
import json
import math
from typing import Any

import pytest
import tiny_runs
import torch
from tiny_runs import Run, batches

import sketchoptim as so
from sketchoptim.diagnostics._inspection import inspect_checkpoint

NAN = math.nan


# -- plans -----------------------------------------------------------------------------------------


@functools.cache
def plan_text() -> str:
    return so.plan([("words", (3000, 4)), ("bias", (8,))], "3KB").to_json()


def refuse_plan(plain: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"a plan is what Plan.to_json\(\) writes") as raised:
        so.planning.Plan.from_json(json.dumps(plain))
    assert message in str(raised.value)


def test_a_missing_key_of_a_planned_parameter_is_named_with_its_place():
    for key in json.loads(plan_text())["parameters"][1]:
        plain = json.loads(plan_text())
        del plain["parameters"][1][key]
        refuse_plan(plain, f"plan.parameters[1].{key} is missing")


def test_a_foreign_key_is_named():
    plain = json.loads(plan_text())
    refuse_plan({**plain, "version": 3}, "plan.version is not known; allowed are ")
    plain["parameters"][0]["colour"] = "red"
    refuse_plan(plain, "plan.parameters[0].colour is not known; allowed are name, ")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("name", None, "name must be a string, got None"),
        ("shape", 3, "shape must be a list, got 3"),
        ("shape", [3.5], "shape must be a whole number, got 3.5"),
        ("exact_bytes", True, "exact_bytes must be a whole number, got True"),
        ("moment_bytes", [1], "moment_bytes must be a table, got [1]"),
        ("moment_bytes", {"first": "1"}, "moment_bytes.first must be a whole number, got '1'"),
        ("exponent", "1", "exponent must be a number, got '1'"),
        ("error", 0.1, "error must be a table, got 0.1"),
        ("error", {"relative": "0", "median": 0.0}, "error.relative must be a number, got '0'"),
        ("memory", "lean-0.1", "memory: memory must be a dict"),
        ("memory", {"second": {"kind": "Guess"}}, "memory: second.kind must be one of"),
    ],
)
def test_a_value_of_a_planned_parameter_of_another_type_is_named(key, value, message):
    plain = json.loads(plan_text())
    plain["parameters"][0][key] = value
    refuse_plan(plain, f"plan.parameters[0].{message}")


def test_text_that_is_no_json_is_refused():
    with pytest.raises(ValueError, match=r"plan must be JSON, .* a plan is what Plan.to_json"):
        so.planning.Plan.from_json(plan_text()[:-20])


# -- checkpoints -----------------------------------------------------------------------------------


@functools.cache
def digested_once() -> dict[str, Any]:
    run = Run.start(tiny_runs.PRESET_PLANS["lean-0.1"]).train(batches(3))
    return run.optimizer.state_dict()


@functools.cache
def saved_once() -> dict[str, Any]:
    """A checkpoint to be edited: it has no digests."""
    checkpoint = copy.deepcopy(digested_once())
    for state in checkpoint["state"].values():
        del state["digest"]
    return checkpoint


def refuse_checkpoint(folder, checkpoint: Any, message: str) -> None:
    path = folder / "checkpoint.pt"
    torch.save(checkpoint, path)
    with pytest.raises(ValueError, match="the checkpoint is damaged") as raised:
        inspect_checkpoint(path)
    assert message in str(raised.value)


STATES = {
    "a word for a step": ("step", "3", "step of parameter 0 must be a number, got '3'"),
    "a flag for a step": ("step", True, "step of parameter 0 must be a number, got True"),
    "NaN steps": ("step", torch.tensor(NAN), "step of parameter 0 must be finite and >= 0"),
    "steps below zero": ("step", -1, "step of parameter 0 must be finite and >= 0, got -1"),
    "half a step": ("step", 2.5, "step of parameter 0 must be a whole number, got 2.5"),
    "two steps": ("step", torch.ones(2), "step of parameter 0 must be one number"),
    "no step": ("step", None, "parameter 0 must have the key 'step'"),
    "no shape": ("shape", None, "parameter 0 must have the key 'shape'"),
    "a list for a shape": ("shape", [60, 6], "shape of parameter 0 must be a tensor"),
    "a shape of floats": ("shape", torch.ones(2), "shape of parameter 0 must be whole numbers"),
    "a negative shape": ("shape", torch.tensor([60, -6]), "shape of parameter 0 must be whole"),
    "a shape of two dims": ("shape", torch.ones(2, 2).long(), "shape of parameter 0 must be"),
    "no compression": ("is_compressed", None, "parameter 0 must have the key 'is_compressed'"),
    "a word for it": ("is_compressed", "no", "is_compressed of parameter 0 must be True or False"),
}


@pytest.mark.parametrize(("key", "value", "message"), STATES.values(), ids=STATES)
def test_a_tampered_state_is_refused_by_name(key, value, message, tmp_path):
    checkpoint = copy.deepcopy(saved_once())
    if value is None:
        del checkpoint["state"][0][key]
    else:
        checkpoint["state"][0][key] = value
    refuse_checkpoint(tmp_path, checkpoint, message)


@pytest.mark.parametrize("state", [[1], "state", torch.ones(3), 3], ids=str)
def test_a_state_that_is_no_dict_is_refused(state, tmp_path):
    checkpoint = copy.deepcopy(saved_once())
    checkpoint["state"][0] = state
    refuse_checkpoint(tmp_path, checkpoint, "the state of parameter 0 must be a dict")
    refuse_checkpoint(tmp_path, {**checkpoint, "state": state}, "state must be a dict")


@pytest.mark.parametrize("value", [None, "x", [1.0], torch.ones(2, 2)], ids=str)
def test_a_moment_that_is_no_tensor_of_its_shape_is_refused(value, tmp_path):
    checkpoint = copy.deepcopy(saved_once())
    state = checkpoint["state"][0]
    (key,) = [key for key, it in state.items() if isinstance(it, torch.Tensor) and it.dim() == 3]
    state[key] = value
    refuse_checkpoint(tmp_path, checkpoint, "the second moment of parameter 0")


@pytest.mark.parametrize("value", [NAN, math.inf, -1.0])
def test_a_number_that_no_second_moment_has_is_named(value, tmp_path):
    checkpoint = copy.deepcopy(saved_once())
    checkpoint["state"][0]["second_counters"][0, 0] = value
    message = "the second moment of parameter 0 is damaged: its second_counters must be finite"
    refuse_checkpoint(tmp_path, checkpoint, message)


def test_a_number_that_changed_after_saving_is_named(tmp_path):
    checkpoint = copy.deepcopy(digested_once())
    checkpoint["state"][0]["second_counters"][0, 0] += 1
    refuse_checkpoint(tmp_path, checkpoint, "second_counters of parameter 0 is damaged: its check")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("params", None, "group 0 must have the key 'params'"),
        ("params", 3, "params of group 0 must be a list, got 3"),
        ("param_names", ["table"], "param_names of group 0 must be as many as its params"),
        ("memory", "lean-0.1", "group 0: memory must be a dict"),
        ("memory", {"second": {"kind": "Guess"}}, "group 0: second.kind must be one of"),
    ],
)
def test_a_tampered_group_is_refused_by_name(key, value, message, tmp_path):
    checkpoint = copy.deepcopy(saved_once())
    if value is None:
        del checkpoint["param_groups"][0][key]
    else:
        checkpoint["param_groups"][0][key] = value
    refuse_checkpoint(tmp_path, checkpoint, message)


def test_a_first_group_that_is_no_dict_is_no_optimizer(tmp_path):
    path = tmp_path / "checkpoint.pt"
    torch.save({"state": {}, "param_groups": [3]}, path)
    with pytest.raises(ValueError, match=r"checkpoint.pt must hold the state_dict\(\)"):
        inspect_checkpoint(path)
