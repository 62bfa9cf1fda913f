"""What the kernels leave to the reference, and the memory that they refuse to touch."""

import copy
import json
import warnings
from collections.abc import Callable

import pytest
import torch
from backends import LEVELS, needs_native, stepping_by
from gradients import sparse
from step_cases import Case, run
from torch import Tensor

import sketchoptim as so
from sketchoptim import moments
from sketchoptim._rows import CHUNK_ELEMENTS
from sketchoptim.moments import Average, Moments, Table
from sketchoptim.ops import Rule, cpu, rule_to_tensor, stepper
from sketchoptim.storage import PRESETS, Memory, Sketched, Storage

pytestmark = needs_native

SHAPE = (60, 4)


def contiguous() -> Tensor:
    return torch.zeros(SHAPE)


def one_row(values: Tensor) -> Tensor:
    """A gradient of row 3 with these values, which it keeps as they are."""
    return torch.sparse_coo_tensor(torch.tensor([[3]]), values, SHAPE, check_invariants=False)


def rows_of(first: Tensor) -> Tensor:
    return one_row(first[:1])


# -- left to the reference -----------------------------------------------------------------------

EXPANDED = torch.zeros(1, 1).expand(1, 4)


class Elsewhere(Tensor):
    """A tensor without memory of its own, as a distributed one is."""

    @staticmethod
    def __new__(cls) -> "Elsewhere":
        return Tensor._make_wrapper_subclass(cls, SHAPE)

    @classmethod
    def __torch_dispatch__(cls, operator, types, arguments=(), options=None):
        raise NotImplementedError


# (parameter, gradient, storage of the second moment): what no kernel has been written for.
UNWRITTEN = {
    "another device": (contiguous().to("meta"), contiguous().to("meta"), so.RowWise()),
    "rank one": (contiguous(), contiguous(), so.RankOne()),
    "top singular": (contiguous(), contiguous(), so.TopSingular()),
}

# (parameter, gradient, what is said of it): what keeps a kernel that there is from its work.
OBSTACLES = {
    "float64": (contiguous().double(), one_row(torch.zeros(1, 4).double()), "for torch.float64"),
    "a transposed parameter": (torch.zeros(4, 60).t(), rows_of(contiguous()), "it has the strides"),
    "every other column": (torch.zeros(60, 8)[:, ::2], rows_of(contiguous()), "it has the strides"),
    "a parameter without memory": (Elsewhere(), contiguous(), "it is a Elsewhere"),
    "ids beyond 32 bits": (torch.zeros(2**32 + 1, 0), torch.zeros(2**32 + 1, 0), "4294967296 rows"),
    "a transposed gradient": (contiguous(), torch.zeros(4, 60).t(), "its gradient has the strides"),
    "a gradient without memory": (contiguous(), Elsewhere(), "its gradient is a Elsewhere"),
    "a lazily negated gradient": (
        contiguous(),
        torch._neg_view(contiguous()),
        "its gradient is negated lazily",
    ),
}


def has_kernel(parameter: Tensor, gradient: Tensor, second: Storage) -> bool:
    table = Table(parameter.shape, parameter.dtype, parameter.device, 0)
    moment = moments.open_moment(second, "second", moments.create(second, table))
    found = stepper(parameter, gradient, Moments(None, moment))
    return isinstance(found, cpu.NativeStepper)


@pytest.mark.parametrize(("parameter", "gradient", "second"), UNWRITTEN.values(), ids=UNWRITTEN)
def test_what_has_no_kernel_is_left_to_the_reference(parameter, gradient, second):
    assert not has_kernel(parameter, gradient, second)


@pytest.mark.parametrize(("parameter", "gradient", "obstacle"), OBSTACLES.values(), ids=OBSTACLES)
def test_what_a_kernel_cannot_read_is_left_to_the_reference_with_a_warning(
    parameter, gradient, obstacle
):
    with pytest.warns(UserWarning, match=f"reference kernels, .* slower: .*{obstacle}.*; use "):
        assert not has_kernel(parameter, gradient, so.Exact())


@pytest.mark.parametrize(
    ("second", "obstacle"),
    [
        (Sketched(depth=33), "depth of 33"),
        (Sketched(granularity="element", conservative=True), "conservative by element"),
    ],
)
def test_a_sketch_without_a_kernel_is_left_to_the_reference_with_a_warning(second, obstacle):
    with pytest.warns(UserWarning, match=f"reference kernels, .* slower: .*{obstacle}.*; use "):
        assert not has_kernel(contiguous(), contiguous(), second)


def test_the_same_has_a_kernel_otherwise():
    for depth in (1, 32):
        assert has_kernel(contiguous(), contiguous(), Sketched(depth=depth))
    rows = torch.zeros(CHUNK_ELEMENTS + 1, 1)  # more than whose squares are kept
    assert has_kernel(rows, rows, Sketched())
    for gradient in (contiguous(), rows_of(contiguous()), one_row(EXPANDED)):
        assert has_kernel(contiguous(), gradient, so.Exact())


def test_the_reference_is_warned_of_once_a_parameter():
    parameter = torch.nn.Parameter(contiguous().double())
    optimizer = so.Adam([parameter])
    parameter.grad = one_row(torch.ones(1, 4).double())
    with pytest.warns(UserWarning, match="stepped by the reference"):
        optimizer.step()
    with warnings.catch_warnings(action="error"):
        optimizer.step()


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_an_error_comes_before_anything_changes():
    parameter, optimizer = stepped("lean")
    before = copy.deepcopy((parameter, optimizer.state[parameter]))
    parameter.grad = torch.ones(SHAPE[::-1]).t()
    with pytest.raises(UserWarning, match="strides"):
        optimizer.step()
    torch.testing.assert_close((parameter, optimizer.state[parameter]), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "case",
    [
        Case("Adam", PRESETS["lean"], dtype=torch.float64),
        Case("Adam", PRESETS["rank-one"]),
        Case("Adam", Memory(None, so.TopSingular())),
        Case("Adam", Memory(None, Sketched(granularity="element", conservative=True))),
        Case("Adam", Memory(None, Sketched(depth=33, width=8))),
    ],
    ids=lambda case: f"{case.dtype} {case.memory.second}"[:60],
)
def test_the_reference_takes_the_steps_without_a_kernel(case):
    with stepping_by(LEVELS[-1]) as taken:
        run(case)
    assert (taken.native, taken.reference) == (0, case.steps)


# -- memory that is not what a kernel would take it for --------------------------------------------


def stepped(preset: str) -> tuple[torch.nn.Parameter, so.Adam]:
    parameter = torch.nn.Parameter(torch.ones(SHAPE))
    optimizer = so.Adam([{"params": [parameter], "memory": preset}])
    parameter.grad = sparse(torch.tensor([3, 0]), torch.ones(2, 4), SHAPE)
    with stepping_by(LEVELS[-1]):
        optimizer.step()
    return parameter, optimizer


def transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


CHANGES: dict[str, tuple[str, str, Callable[[Tensor], Tensor]]] = {
    "a transposed moment": ("exact", "first_values", transposed),
    "rows in half precision": ("row-wise", "second_rows", Tensor.bfloat16),
    "too few rows": ("row-wise", "second_rows", lambda rows: rows[:4]),
    "a wider table": ("lean", "second_counters", Tensor.double),
    "a transposed table": ("paper-v-only", "second_counters", transposed),
    "a table by row": ("paper-v-only", "second_counters", lambda table: table[..., :1].clone()),
    "narrower words": ("lean", "second_words", Tensor.int),
    "too few words": ("lean", "second_words", lambda words: words[:2]),
}


@pytest.mark.parametrize(("preset", "part", "change"), CHANGES.values(), ids=CHANGES)
def test_a_moment_of_another_layout_is_refused_before_anything_moves(preset, part, change):
    parameter, optimizer = stepped(preset)
    state, before = optimizer.state[parameter], parameter.detach().clone()
    state[part] = change(state[part])
    kept = {k: v.clone() for k, v in state.items() if isinstance(v, Tensor) and k != "step"}
    refusal = "contiguous elements of torch|second moment of the parameter .* must be kept in"
    with stepping_by(LEVELS[-1]), pytest.raises(ValueError, match=refusal):
        optimizer.step()
    assert torch.equal(parameter.detach(), before)
    for name, tensor in kept.items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("preset", ["exact", "paper-mv"])
def test_a_checkpoint_of_another_layout_is_laid_out_again(preset):
    parameter, optimizer = stepped(preset)
    saved = copy.deepcopy(optimizer.state_dict())
    for name, tensor in saved["state"][0].items():
        if name.endswith(("_values", "_counters")):
            saved["state"][0][name] = transposed(tensor)
    again = torch.nn.Parameter(parameter.detach().clone())
    loaded = so.Adam([{"params": [again], "memory": preset}])
    loaded.load_state_dict(saved)
    again.grad = parameter.grad
    with stepping_by(LEVELS[-1]) as taken:
        loaded.step()
        optimizer.step()
    assert taken.native == 2
    assert torch.equal(again, parameter)


@pytest.mark.parametrize(
    ("preset", "part", "dtype"),
    [
        ("row-wise", "second_rows", torch.bfloat16),
        ("lean", "second_counters", torch.bfloat16),
        ("lean", "second_words", torch.int32),
    ],
)
def test_a_checkpoint_that_was_cast_is_refused(preset, part, dtype):
    _, optimizer = stepped(preset)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0][part] = saved["state"][0][part].to(dtype)
    name = part.removeprefix("second_")
    refusal = f"second moment of parameter 0 of the checkpoint .* its {name} is {dtype}"
    with pytest.raises(ValueError, match=refusal):
        optimizer.load_state_dict(saved)


OPERANDS = {
    "values in half precision": {"values": torch.ones(2, 4, dtype=torch.bfloat16)},
    "values in double precision": {"values": torch.ones(2, 4, dtype=torch.float64)},
    "too few rows of state": {"second": [torch.zeros(3)]},
    "state in half precision": {"second": [torch.zeros(60, dtype=torch.bfloat16)]},
}


@pytest.mark.parametrize("changed", OPERANDS.values(), ids=OPERANDS)
def test_the_operator_refuses_tensors_that_do_not_fit(changed):
    memory = PRESETS["row-wise"]
    assert memory.second is not None
    parameter = torch.zeros(SHAPE)
    table = Table(parameter.shape, parameter.dtype, parameter.device, 0)
    operands = {
        "parameter": parameter,
        "ids": torch.tensor([1, 2]),
        "values": torch.ones(2, 4),
        "first": [],
        "second": list(moments.create(memory.second, table).values()),
        "rule": rule_to_tensor(Rule(step_size=0.1, second=Average(0.9, 0.1), eps=1e-8)),
        "memory": json.dumps(memory.to_dict()),
        **changed,
    }
    with pytest.raises(ValueError, match="contiguous elements of torch"):
        torch.ops.sketchoptim.step_(**operands)
    assert not parameter.any()
