"""The number of steps taken: a tensor in the state as in torch.optim, but one that never sticks."""

import copy

import pytest
import torch
from tiny_runs import PRESET_PLANS, Run, batches, differences


def test_the_tensor_in_the_state_is_what_counts():
    run = Run.start(PRESET_PLANS["lean-0.1"]).train(batches(2))
    step = run.optimizer.state[run.model.table.weight]["step"]
    assert (step.dtype, step.shape, step.item()) == (torch.float64, (), 2)
    step.fill_(7)  # as a warm start might
    run.train(batches(1))
    assert step.item() == 8


OTHER_STEPS = {
    "float32, as in torch.optim": torch.Tensor.float,
    "float16": torch.Tensor.half,
    "int64": torch.Tensor.long,
    "with a dimension": lambda step: step[None],
    "a number": torch.Tensor.item,
    "a whole number": int,
}


@pytest.mark.parametrize("changed", OTHER_STEPS.values(), ids=OTHER_STEPS)
def test_a_checkpoint_with_steps_of_another_kind_continues_the_same(changed):
    plan = PRESET_PLANS["lean-0.1"]
    straight, resumed = Run.start(plan).train(batches(3)), Run.start(plan).train(batches(3))
    saved = copy.deepcopy(resumed.optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] = changed(state["step"])
    resumed.optimizer.load_state_dict(saved)
    assert differences(resumed.train(batches(2)).bits(), straight.train(batches(2)).bits()) == []


@pytest.mark.parametrize("to", [torch.float32, "meta"], ids=str)
def test_a_step_of_another_kind_that_was_put_in_by_hand_is_refused(to):
    run = Run.start(PRESET_PLANS["lean-0.1"]).train(batches(2))
    state = run.optimizer.state[run.model.table.weight]
    kept = state["step"]
    before = run.bits()
    state["step"] = kept.to(to)
    with pytest.raises(TypeError, match=r"step of the parameter .* must be torch.float64 on the"):
        run.train(batches(1))
    state["step"] = kept
    assert differences(run.bits(), before) == []
