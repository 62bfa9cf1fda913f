"""Contract 7: a run that was saved, or copied, goes on bit for bit."""

import copy
import io
import pickle
from typing import Any

import pytest
import tiny_runs
import torch
from saved_runs import SAVED_AFTER, STEPS, milestone, reloaded, storages_of
from tiny_runs import PLANS, PRESET_PLANS, Plan, Run, batches, differences
from torch import Tensor

import sketchoptim as so


def check_resumed(plan: Plan, dtype: torch.dtype) -> None:
    """A run that was saved to a file and loaded again has the bits of one that went through."""
    run = milestone(plan, dtype)
    weights, state = torch.load(io.BytesIO(run.checkpoint))
    resumed = Run.start(plan, dtype=dtype, seed=99)
    resumed.model.load_state_dict(weights)
    resumed.optimizer.load_state_dict(state)
    assert differences(resumed.bits(), run.bits_on_the_way) == []
    resumed.train(batches(STEPS)[SAVED_AFTER:])
    assert differences(resumed.bits(), run.final_bits) == []


@tiny_runs.each(PLANS)
def test_training_resumed_from_a_file_continues_bit_for_bit(plan):
    check_resumed(plan, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("memory", PRESET_PLANS)
def test_training_in_half_precision_continues_bit_for_bit(memory, dtype):
    # float16 cannot hold the default eps, with torch.optim neither.
    check_resumed(Plan(so.Adam, memory, {"eps": 1e-4}), dtype)


def test_a_run_differs_from_one_that_was_not_resumed():
    """The comparison above can fail: dropping the loaded state is seen."""
    ids = batches(STEPS)
    plan = PLANS["Adam, lean-0.1"]
    whole = Run.start(plan).train(ids)
    forgetful = Run.start(plan).train(ids[:SAVED_AFTER])
    forgetful.optimizer = plan.build(forgetful.model)
    forgetful.train(ids[SAVED_AFTER:])
    assert "table.weight" in differences(forgetful.bits(), whole.bits())


@pytest.mark.parametrize("moment", ["before the save", "after it"])
def test_folding_and_cleaning_happen_on_both_sides_of_the_checkpoint(moment):
    """The plans that fold do so where the resumed runs above need them to."""
    plan = PLANS["Adam, linear, cleaned and folded"]
    steps = SAVED_AFTER if moment == "before the save" else STEPS
    width = Run.start(plan).train(batches(steps)).bits()["table.weight: second_counters"].shape[1]
    assert width == (4 if moment == "before the save" else 2)


def test_a_scheduler_resumes_with_the_optimizer():
    plan, ids = PRESET_PLANS["lean-0.1"], batches(STEPS)

    def start(seed: int) -> tuple[Run, Any]:
        run = Run.start(plan, seed=seed)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            run.optimizer, max_lr=0.1, total_steps=STEPS + 1
        )
        return run, schedule

    def train(run: Run, schedule: Any, some: list[Tensor]) -> None:
        for batch in some:
            run.train([batch])
            schedule.step()

    whole, schedule = start(0)
    train(whole, schedule, ids)
    part, schedule = start(0)
    train(part, schedule, ids[:SAVED_AFTER])
    saved = reloaded(part.model.state_dict(), part.optimizer.state_dict(), schedule.state_dict())
    resumed, schedule = start(99)
    for thing, state in zip((resumed.model, resumed.optimizer, schedule), saved, strict=True):
        thing.load_state_dict(state)
    train(resumed, schedule, ids[SAVED_AFTER:])
    assert differences(resumed.bits(), whole.bits()) == []


@tiny_runs.each(PRESET_PLANS)
def test_state_that_was_saved_in_another_layout_continues_the_same(plan):
    """Kernels read memory, not strides."""
    run = Run.start(plan).train(batches(2))
    saved = copy.deepcopy(run.optimizer.state_dict())
    for state in saved["state"].values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 1:
                state[key] = value.transpose(0, -1).contiguous().transpose(0, -1)
    resumed = Run.start(plan)
    resumed.model.load_state_dict(run.model.state_dict())
    resumed.optimizer.load_state_dict(saved)
    assert differences(resumed.train(batches(2)).bits(), run.train(batches(2)).bits()) == []


@tiny_runs.each(PRESET_PLANS)
def test_a_table_without_a_gradient_before_the_save_starts_the_same_after_it(plan):
    run = Run.start(plan).train(batches(2), uses_late=False)
    weights, state = reloaded(run.model.state_dict(), run.optimizer.state_dict())
    resumed = Run.start(plan, seed=99)
    resumed.model.load_state_dict(weights)
    resumed.optimizer.load_state_dict(state)
    assert not resumed.optimizer.state.get(resumed.model.late.weight)
    assert differences(resumed.train(batches(2)).bits(), run.train(batches(2)).bits()) == []


def test_a_checkpoint_made_before_the_first_step_loads():
    plan = PRESET_PLANS["lean-0.1"]
    fresh = Run.start(plan)
    (saved,) = reloaded(fresh.optimizer.state_dict())
    run = Run.start(plan)
    run.optimizer.load_state_dict(saved)
    assert differences(run.train(batches(3)).bits(), fresh.train(batches(3)).bits()) == []


# -- copies ----------------------------------------------------------------------------------------

COPIES = {"copied": copy.deepcopy, "pickled": lambda it: pickle.loads(pickle.dumps(it))}
each_copy = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)


@each_copy
@tiny_runs.each(PRESET_PLANS)
def test_a_copied_run_continues_like_the_original(plan, copied):
    run = milestone(plan)
    original = pickle.loads(run.pickled)
    twin = Run(*copied(original))
    assert not storages_of(dict(twin.optimizer.state)) & storages_of(dict(original[1].state))
    assert differences(twin.bits(), run.bits_on_the_way) == []
    twin.train(batches(STEPS)[SAVED_AFTER:])
    assert differences(twin.bits(), run.final_bits) == []


@each_copy
def test_a_copied_optimizer_loads_checkpoints(copied):
    run = Run.start(PRESET_PLANS["lean-0.1"]).train(batches(2))
    saved = copy.deepcopy(run.optimizer.state_dict())
    twin = Run(*copied((run.model, run.optimizer))).train(batches(2))
    twin.optimizer.load_state_dict(saved)
    assert twin.optimizer.state[twin.model.table.weight]["step"] == 2
