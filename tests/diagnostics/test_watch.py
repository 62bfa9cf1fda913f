"""Diagnosing while training."""

import pytest
import torch
from tiny_runs import PRESET_PLANS, Run, batches, differences
from torch.utils.tensorboard import SummaryWriter

import sketchoptim as so
from sketchoptim.diagnostics import watch


class Lines(list):
    """A log that keeps what it is told."""

    def __call__(self, name, value, step):
        self.append((name, value, step))


def watched(plan="lean-0.1", *, steps=6, every=2):
    run, lines = Run.start(PRESET_PLANS[plan]), Lines()
    handle = watch(run.optimizer, lines, every=every)
    run.train(batches(steps))
    return run, lines, handle


@pytest.mark.parametrize("plan", PRESET_PLANS)
def test_watching_changes_no_bit(plan):
    run, _, _ = watched(plan)
    alone = Run.start(PRESET_PLANS[plan]).train(batches(6))
    assert differences(run.bits(), alone.bits()) == []


def test_the_log_is_told_every_so_many_steps():
    _, lines, _ = watched(steps=7, every=3)
    assert {step for *_, step in lines} == {3, 6}


def test_the_log_is_told_what_diagnose_sees():
    run, lines, _ = watched(steps=6, every=6)
    expected = {
        f"{found.parameter}/{found.quantity}/{name}": value
        for found in so.diagnose(run.optimizer).findings
        for name, value in found.scalars().items()
    }
    assert {name: value for name, value, _ in lines} == expected


def test_heaviest_rows_are_compared_with_the_diagnosis_before():
    _, lines, _ = watched(steps=4, every=2)
    steps = [step for name, _, step in lines if name == "parameter 0/second/top_kept"]
    assert steps == [4]


def test_a_removed_watch_says_no_more():
    run, lines, handle = watched(steps=2)
    handle.remove()
    count = len(lines)
    run.train(batches(4))
    assert len(lines) == count


def test_steps_count_on_from_those_taken_before():
    run, lines = Run.start(PRESET_PLANS["lean-0.1"]).train(batches(3)), Lines()
    watch(run.optimizer, lines, every=2)
    run.train(batches(2))
    assert {step for *_, step in lines} == {4}


def test_reading_the_state_of_an_untouched_parameter_is_no_step():
    run, lines = Run.start(PRESET_PLANS["lean-0.1"]), Lines()
    assert not run.optimizer.state[run.optimizer.param_groups[0]["params"][0]]
    watch(run.optimizer, lines, every=1)
    run.train(batches(1))
    assert {step for *_, step in lines} == {1}


def test_numbers_go_to_tensorboard(tmp_path):
    run = Run.start(PRESET_PLANS["lean-0.1"])
    with SummaryWriter(tmp_path) as writer:
        watch(run.optimizer, writer, every=1)
        run.train(batches(2))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    scalars = events.Scalars("parameter 0/second/relative_error")
    assert [scalar.step for scalar in scalars] == [1, 2]


def test_other_optimizers_logs_and_intervals_are_refused():
    optimizer = Run.start(PRESET_PLANS["lean-0.1"]).optimizer
    with pytest.raises(TypeError, match="optimizer must be one of sketchoptim's, got SGD"):
        watch(torch.optim.SGD([torch.ones(1)]), Lines())
    with pytest.raises(TypeError, match="log must be callable or have add_scalar, got None"):
        watch(optimizer, None)
    with pytest.raises(ValueError, match="every must be >= 1, got 0"):
        watch(optimizer, Lines(), every=0)
