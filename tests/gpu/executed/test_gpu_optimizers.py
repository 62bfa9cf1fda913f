"""Optimizers over the GPU's kernels, interpreted: policies, checkpoints and copies."""

import copy
import math
import sys
from unittest import mock

import pytest
import torch
from gpu_steps import needs_execution, stepping_by_gpu_kernels, stepping_by_reference
from gradients import sparse, unchecked
from torch import Tensor

import sketchoptim as so
from sketchoptim import moments
from sketchoptim.moments import Moments
from sketchoptim.ops import _dispatch

pytestmark = needs_execution

SHAPE = (60, 6)
BAD = "must be finite and within .* got NaN, inf or more in 1 earlier steps"


class Run:
    """A table and its optimizer, stepped along given gradients."""

    def __init__(self, **options: object) -> None:
        self.table = torch.nn.Parameter(torch.ones(SHAPE))
        group = {"params": [self.table], "memory": "row-wise"}
        self.optimizer = so.Adam([group], lr=0.1, **options)

    def step_(self, seed: int, *, number: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(-8, 9, (9, 6), generator=generator) / 8
        values[4, 2] += number
        ids = torch.randint(60, (9,), generator=generator)
        self.table.grad = sparse(ids, values, SHAPE)
        self.optimizer.step()

    def bits(self) -> list[Tensor]:
        state = self.optimizer.state_dict()["state"][0]
        return [self.table.detach(), *(it for it in state.values() if isinstance(it, Tensor))]


def assert_same(one: Run, other: Run) -> None:
    assert all(map(torch.equal, one.bits(), other.bits()))


def test_bias_corrections_by_the_device_are_those_of_the_host():
    with stepping_by_gpu_kernels() as taken:
        run = Run()
        for seed in range(6):
            run.step_(seed)
        found = run.bits()
    assert taken.kernels == 6
    with stepping_by_reference():
        run = Run()
        for seed in range(6):
            run.step_(seed)
        expected = run.bits()
    assert all(map(torch.equal, found, expected))


def test_a_refused_step_raises_at_the_next_step():
    with stepping_by_gpu_kernels():
        run = Run()
        run.step_(0)
        before = run.table.detach().clone()
        run.step_(1, number=math.nan)
        assert torch.equal(run.table, before)
        with pytest.raises(ValueError, match=BAD):
            run.step_(2)
        assert torch.equal(run.table, before)


def test_a_refused_step_raises_when_the_state_is_saved_and_is_not_counted():
    with stepping_by_gpu_kernels():
        run = Run()
        run.step_(0)
        run.step_(1, number=math.inf)
        with pytest.raises(ValueError, match=BAD):
            run.optimizer.state_dict()
        assert run.optimizer.state_dict()["state"][0]["step"] == 1


def test_skipped_steps_are_counted_and_leave_no_trace():
    with stepping_by_gpu_kernels():
        run, expected = Run(nonfinite="skip"), Run(nonfinite="skip")
        for seed, number in ((0, 0.0), (7, math.nan), (1, 0.0), (8, math.inf), (2, 0.0)):
            run.step_(seed, number=number)
        for seed in range(3):
            expected.step_(seed)
        assert_same(run, expected)
        assert run.optimizer.state[run.table]["skipped"] == 2


def test_an_id_outside_the_table_raises_under_every_policy():
    with stepping_by_gpu_kernels():
        run = Run(nonfinite="skip")
        run.step_(0)
        run.table.grad = unchecked([3, 60], run.table)
        run.optimizer.step()
        with pytest.raises(ValueError, match="row ids between 0 and 59, ascending if"):
            run.step_(1)


def test_a_resumed_run_and_a_copied_one_have_the_same_bits():
    with stepping_by_gpu_kernels():
        run, resumed = Run(), Run()
        for seed in range(3):
            run.step_(seed)
        with torch.no_grad():
            resumed.table.copy_(run.table)
        resumed.optimizer.load_state_dict(run.optimizer.state_dict())
        copied = copy.deepcopy(run)
        for each in (run, resumed, copied):
            each.step_(3)
        assert_same(run, resumed)
        assert_same(run, copied)


def test_a_rule_that_a_subclass_gives_is_taken_as_it_is():
    class Halved(so.Adam):
        def rule(self, group, step, *, memory, is_sparse):
            whole = super().rule(group, step, memory=memory, is_sparse=is_sparse)
            return whole._replace(step_size=whole.step_size / 2)

    outcomes = []
    for stepping in (stepping_by_gpu_kernels, stepping_by_reference):
        with stepping():
            run = Run()
            run.optimizer = Halved([{"params": [run.table], "memory": "row-wise"}], lr=0.1)
            run.step_(0)
            run.step_(1)
            outcomes.append(run.bits())
    assert all(map(torch.equal, *outcomes))


def opened() -> tuple[Tensor, Moments]:
    table = moments.Table(torch.Size(SHAPE), torch.float32, torch.device("cpu"))
    storage = so.storage.PRESETS["lean-0.1"].second
    tensors = moments.create(storage, "second", table)
    return torch.ones(SHAPE), Moments(None, moments.open_moment(storage, "second", tensors))


def test_without_triton_the_reference_steps_and_says_why():
    parameter, kept = opened()
    without = {name: None for name in sys.modules if name.partition(".")[0] == "triton"}
    mine = {name: sys.modules[name] for name in sys.modules if "ops._triton" in name}
    with mock.patch.dict(sys.modules, without):
        for name in (*mine, "sketchoptim.ops.gpu", "sketchoptim.ops._gpu_launches"):
            sys.modules.pop(name, None)
        with mock.patch.object(sys.modules["sketchoptim.ops"], "gpu", create=True):
            del sys.modules["sketchoptim.ops"].gpu
            kernels, reason = _dispatch._gpu_kernels(parameter, kept, 0)
    assert kernels is None
    assert reason is not None
    assert "triton is not installed" in reason


def test_a_module_that_is_missing_but_for_triton_is_an_error():
    ops = sys.modules["sketchoptim.ops"]
    with (
        mock.patch.dict(sys.modules, {"sketchoptim.ops.gpu": None}),
        mock.patch.object(ops, "gpu", create=True),
    ):
        del ops.gpu
        with pytest.raises(ModuleNotFoundError, match=r"sketchoptim\.ops\.gpu"):
            _dispatch.gpu_module()
