"""What the device refuses, what it counts, and what the host learns of it."""

import gc
import math
from unittest import mock

import pytest
import torch
from gpu_steps import copy_of, needs_execution, stepping_by_gpu_kernels
from gradients import sparse, unchecked
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import sketchoptim as so
from sketchoptim.moments import Average, Moments, Table, create, open_moment
from sketchoptim.ops import FusedRule, gpu
from sketchoptim.ops._gpu_launches import Launch
from sketchoptim.storage import PRESETS

pytestmark = needs_execution

SHAPE = (40, 6)
RULE = FusedRule(step_size=0.1, second=Average(0.9, 1 - 0.9), eps=1e-8)


class Bound:
    """A parameter with lean moments, and the kernels that step it."""

    def __init__(self, preset: str = "lean-0.1") -> None:
        self.parameter = torch.ones(SHAPE)
        storage = PRESETS[preset].second
        assert storage is not None
        table = Table(self.parameter.shape, torch.float32, torch.device("cpu"))
        self.tensors = create(storage, "second", table)
        moments = Moments(None, open_moment(storage, "second", self.tensors))
        self.kernels = gpu.GpuKernels(self.parameter, moments)

    def step_(
        self, gradient: Tensor, *, is_checked: bool = True, rule: FusedRule = RULE
    ) -> gpu.GpuStep:
        step = self.kernels.prepare(gradient, rule, is_checked=is_checked, rounding_key=None)
        assert step is not None
        step.run_()
        return step

    def snapshot(self) -> list[Tensor]:
        return [self.parameter.clone(), *(self.tensors[name].clone() for name in self.tensors)]


def good() -> Tensor:
    return sparse(torch.tensor([3, 1, 3]), torch.ones(3, 6), SHAPE)


def with_number(number: float) -> Tensor:
    values = torch.ones(3, 6)
    values[1, 2] = number
    return sparse(torch.tensor([3, 1, 3]), values, SHAPE)


def assert_unchanged(before: list[Tensor], after: list[Tensor]) -> None:
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 2.0**41])
@pytest.mark.parametrize("preset", ["lean-0.1", "row-wise", "paper-v-only", "8-bit"])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(preset, number):
    bound = Bound(preset)
    bound.step_(good())
    bound.kernels.settle_()
    before = bound.snapshot()
    bound.step_(with_number(number))
    assert bound.kernels.has_refused()
    settled = bound.kernels.settle_()
    assert (settled.extra_steps, settled.refused_values, settled.refused_ids) == (-1, 1, 0)
    assert_unchanged(before, bound.snapshot())


@pytest.mark.parametrize("ids", [[3, 40], [-1, 3], [2**40, 1]])
@pytest.mark.parametrize("preset", ["lean-0.1", "paper-v-only", "8-bit"])
def test_an_id_outside_the_table_changes_nothing_and_is_counted(preset, ids):
    bound = Bound(preset)
    before = bound.snapshot()
    bound.step_(unchecked(ids, bound.parameter), is_checked=False)
    settled = bound.kernels.settle_()
    assert (settled.extra_steps, settled.refused_values, settled.refused_ids) == (-1, 0, 1)
    assert_unchanged(before, bound.snapshot())


def test_steps_after_a_refused_one_go_on_as_if_it_had_not_been():
    bound, expected = Bound(), Bound()
    for gradient in (good(), with_number(math.nan), good(), good()):
        bound.step_(gradient)
    for _ in range(3):
        expected.step_(good())
    bound.kernels.settle_()
    expected.kernels.settle_()
    assert_unchanged(expected.snapshot(), bound.snapshot())


def test_a_gradient_that_is_not_checked_may_be_anything():
    bound = Bound("row-wise")
    bound.step_(with_number(math.nan), is_checked=False)
    assert not bound.kernels.has_refused()
    assert bound.parameter[1].isnan().all()


def test_a_launch_that_is_repeated_counts_its_steps_on_the_device():
    """As a CUDA graph does: the host prepares once, and the device takes the same step again."""
    adam = so.Adam([torch.nn.Parameter(torch.ones(1))], lr=0.1, betas=(0.9, 0.99))
    replayed, stepped = Bound(), Bound()
    group, lean = adam.param_groups[0], PRESETS["lean-0.1"]
    rules = [adam.rule(group, it, memory=lean, is_sparse=True) for it in (1, 2, 3)]
    for rule in rules:
        stepped.step_(good(), rule=rule)
    captured: list[Launch] = []
    run = Launch.run_

    def recorded(launch: Launch) -> None:
        captured.append(copy_of(launch))
        run(launch)

    with mock.patch.object(Launch, "run_", recorded):
        replayed.step_(good(), rule=rules[0])
    for _ in range(2):
        for launch in captured:
            launch.run_()
    assert replayed.kernels.settle_().extra_steps == 2
    assert_unchanged(stepped.snapshot(), replayed.snapshot())


def test_a_step_whose_count_would_be_set_back_in_each_replay_is_not_captured():
    """The first step copies the host's count to the device, and a graph would copy it again."""
    adam = so.Adam([torch.nn.Parameter(torch.ones(1))], lr=0.1, betas=(0.9, 0.99))
    group, lean = adam.param_groups[0], PRESETS["lean-0.1"]
    rules = [adam.rule(group, it, memory=lean, is_sparse=True) for it in (1, 2, 9)]
    bound = Bound()
    before = bound.snapshot()
    capturing = mock.patch.object(gpu, "is_capturing", return_value=True)
    with capturing, pytest.raises(RuntimeError, match="captured in a CUDA graph only after a step"):
        bound.step_(good(), rule=rules[0])
    assert_unchanged(before, bound.snapshot())
    bound.step_(good(), rule=rules[0])
    with capturing:
        bound.step_(good(), rule=rules[1])
        with pytest.raises(RuntimeError, match="Take a step before the capture"):
            bound.step_(good(), rule=rules[2])
    assert bound.kernels.settle_().extra_steps == 0


def test_the_memory_that_a_device_reports_to_is_not_given_out_again():
    """A launch may write its report after the kernels that own it are gone."""
    addresses = [Bound().kernels.report.data_ptr() for _ in range(600)]
    assert len(set(addresses)) == 600


@pytest.mark.parametrize("is_dense", [True, False], ids=["dense", "sparse"])
def test_many_rows_that_move_in_order_get_one_warning(is_dense):
    bound = Bound("paper-v-only")
    gradient = good()
    with mock.patch.object(gpu, "MOST_IN_ORDER", 2):
        with pytest.warns(UserWarning, match="one after the other, because decay="):
            bound.step_(gradient.to_dense() if is_dense else gradient)
        bound.step_(good())
    few = Bound("paper-v-only")
    few.step_(good())


def test_a_scale_that_the_host_changed_reaches_the_device():
    bound = Bound()
    bound.step_(good())
    bound.tensors["scale"].fill_(0.5)
    bound.step_(good())
    bound.kernels.settle_()
    assert bound.tensors["scale"].item() == pytest.approx(0.45)


def test_the_order_of_entries_does_not_matter():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(40, (90,), generator=generator)
    values = torch.randint(-8, 9, (90, 6), generator=generator) / 8
    order = torch.randperm(90, generator=generator)
    one, other = Bound(), Bound()
    one.step_(sparse(ids, values, SHAPE))
    other.step_(sparse(ids[order], values[order], SHAPE))
    assert_unchanged(one.snapshot(), other.snapshot())


def test_a_row_has_the_same_bits_whatever_rows_come_with_it():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(100, 6, generator=generator)
    alone, together = Bound("row-wise"), Bound("row-wise")
    hot = torch.full((100,), 7)
    alone.step_(sparse(hot, values, SHAPE))
    others = torch.arange(7).repeat(5)
    everything = torch.cat([values, torch.ones(35, 6)])
    together.step_(sparse(torch.cat([hot, others]), everything, SHAPE))
    assert torch.equal(alone.parameter[7], together.parameter[7])


@pytest.mark.parametrize(
    ("dtype", "memory", "reason"),
    [
        (torch.float64, PRESETS["lean-0.1"], "no kernel for torch.float64"),
        (torch.float32, PRESETS["rank-one"], "no kernel for RankOne storage"),
        (
            torch.float32,
            so.Memory(None, so.Sketched(width=4, granularity="element", conservative=True)),
            "conservative by element",
        ),
        (
            torch.float32,
            so.Memory(so.Quantized(block=64), so.Quantized(block=128)),
            "blocks of different sizes",
        ),
        (torch.float32, so.Memory(None, so.Quantized(block=2048)), "more than 1024 numbers"),
        (
            torch.float32,
            so.Memory(so.Quantized(), so.RowWise()),
            "share blocks of codes",
        ),
    ],
)
def test_what_has_no_kernel_is_stepped_by_the_reference_with_a_reason(dtype, memory, reason):
    parameter = torch.nn.Parameter(torch.ones(1000, 6, dtype=dtype))
    optimizer = so.Adam([{"params": [parameter], "memory": memory}])
    parameter.grad = sparse(torch.tensor([1]), torch.ones(1, 6, dtype=dtype), (1000, 6))
    with stepping_by_gpu_kernels() as taken, pytest.warns(UserWarning, match=reason):
        optimizer.step()
    assert taken.kernels == 0


def test_coalesced_ids_are_neither_sorted_nor_summed_and_move_the_same_rows():
    ids, values = torch.tensor([1, 3, 7, 39]), torch.randn(4, 6)
    sorted_, unsorted = Bound("row-wise"), Bound("row-wise")
    with mock.patch.object(Tensor, "sort", side_effect=AssertionError):
        sorted_.step_(sparse(ids, values, SHAPE, is_coalesced=True))
    unsorted.step_(sparse(ids, values, SHAPE))
    assert_unchanged(unsorted.snapshot(), sorted_.snapshot())


@pytest.mark.parametrize("ids", [[3, 1], [2, 2, 5]])
def test_ids_that_are_wrongly_marked_as_coalesced_are_refused(ids):
    bound = Bound()
    before = bound.snapshot()
    gradient = unchecked(ids, bound.parameter)
    bound.step_(gradient._coalesced_(True))
    assert bound.kernels.settle_().refused_ids == 1
    assert_unchanged(before, bound.snapshot())


@pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
def test_a_strided_gradient_is_made_contiguous(is_sparse):
    values = torch.randn(6, 4).T if is_sparse else torch.randn(6, 40).T
    strided, contiguous = Bound("row-wise"), Bound("row-wise")
    for bound, rows in ((strided, values), (contiguous, values.contiguous())):
        bound.step_(sparse(torch.tensor([3, 1, 3, 9]), rows, SHAPE) if is_sparse else rows)
    assert_unchanged(contiguous.snapshot(), strided.snapshot())


def test_a_plan_holds_no_tensor_of_a_step_that_is_over():
    bound = Bound()
    gradient = good()
    values = StorageWeakRef(gradient._values().untyped_storage())
    bound.step_(gradient)
    del gradient
    gc.collect()  # the interpreter leaves cycles
    assert values.expired()
