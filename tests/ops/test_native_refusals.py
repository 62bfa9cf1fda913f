"""What the kernels leave to the reference, and the memory that they refuse to touch."""

import copy
import re
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
from sketchoptim.ops import FusedRule, Kernels, Rule, find_kernels, reference_only
from sketchoptim.storage import PRESETS, Memory, Quantized, Sketched, Storage

pytestmark = needs_native

SHAPE = (60, 4)


def contiguous() -> Tensor:
    return torch.zeros(SHAPE)


# -- left to the reference -----------------------------------------------------------------------


class Elsewhere(Tensor):
    """A tensor without memory of its own, as a distributed one is."""

    @staticmethod
    def __new__(cls) -> "Elsewhere":
        return Tensor._make_wrapper_subclass(cls, SHAPE)

    @classmethod
    def __torch_dispatch__(cls, operator, types, arguments=(), options=None):
        raise NotImplementedError


def kernels_for(parameter: Tensor, second: Storage) -> tuple[Kernels | None, str | None]:
    table = Table(parameter.shape, parameter.dtype, parameter.device)
    tensors = moments.create(second, "second", table)
    return find_kernels(parameter, Moments(None, moments.open_moment(second, "second", tensors)))


# (parameter, storage of the second moment, why there are no kernels)
UNSUPPORTED = {
    "another device": (contiguous().to("meta"), so.RowWise(), "for the device meta yet"),
    "float64": (contiguous().double(), so.Exact(), "for torch.float64; use one of torch.float32, "),
    "transposed": (
        torch.zeros(4, 60).t(),
        so.Exact(),
        r"it has the strides .*; use contiguous\(\)",
    ),
    "every other column": (torch.zeros(60, 8)[:, ::2], so.Exact(), "it has the strides"),
    "without memory": (Elsewhere(), so.RowWise(), "it is a Elsewhere; use a plain tensor"),
    "ids beyond 32 bits": (torch.zeros(2**32 + 1, 0), so.Exact(), "4294967296 rows; use several"),
    "rank one": (contiguous(), so.RankOne(), "no kernel for RankOne storage"),
    "top singular": (contiguous(), so.TopSingular(), "no kernel for TopSingular storage"),
    "8-bit": (contiguous(), Quantized(), "no kernel for Quantized storage"),
    "a deep sketch": (contiguous(), Sketched(depth=33), "depth of 33; use at most 32"),
    "conservative by element": (
        contiguous(),
        Sketched(granularity="element", conservative=True),
        'conservative by element; use granularity="row"',
    ),
}


@pytest.mark.parametrize(("parameter", "second", "expected"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_has_no_kernel_is_left_to_the_reference_with_a_reason(parameter, second, expected):
    kernels, reason = kernels_for(parameter, second)
    assert kernels is None
    assert re.search(expected, reason or "")


def row_of(values: Tensor) -> Tensor:
    """A gradient of row 3 with these values, which it keeps as they are."""
    return torch.sparse_coo_tensor(torch.tensor([[3]]), values, SHAPE, check_invariants=False)


FUSED = FusedRule(step_size=0.1, second=Average(0.9, 0.1), eps=1e-8)

# (gradient, rule, why there is no kernel for this step)
UNREADABLE = {
    "transposed": (
        torch.zeros(4, 60).t(),
        FUSED,
        "its gradient has the strides .*; use contiguous",
    ),
    "without memory": (Elsewhere(), FUSED, "its gradient is a Elsewhere; use a plain tensor"),
    "lazily negated": (torch._neg_view(contiguous()), FUSED, "its gradient is negated lazily; use"),
    "a rule of one's own": (contiguous(), Rule(lambda rows, *_: rows), "support only FusedRule"),
}


@pytest.mark.parametrize(("gradient", "rule", "expected"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_step_that_kernels_cannot_take_is_left_to_the_reference_with_a_reason(
    gradient, rule, expected
):
    kernels, reason = kernels_for(contiguous(), so.Exact())
    assert kernels is not None
    assert reason is None
    assert kernels.prepare(gradient, rule, is_checked=True, rounding_key=None) is None
    assert re.search(expected, kernels.unsupported_reason(gradient, rule))


def test_the_same_has_a_kernel_otherwise():
    for depth in (1, 32):
        assert kernels_for(contiguous(), Sketched(depth=depth))[0] is not None
    rows = torch.zeros(CHUNK_ELEMENTS + 1, 1)  # more rows than whose squares are kept
    expanded = row_of(torch.zeros(1, 1).expand(1, 4))
    for parameter, gradient in (
        (rows, rows),
        (contiguous(), contiguous()),
        (contiguous(), row_of(torch.zeros(1, 4))),
        (contiguous(), expanded),
    ):
        kernels, _ = kernels_for(parameter, Sketched())
        assert kernels.prepare(gradient, FUSED, is_checked=True, rounding_key=None) is not None


def test_where_the_reference_was_asked_for_there_is_no_reason_to_warn_of():
    with reference_only():
        assert kernels_for(contiguous(), so.Exact()) == (None, None)


# -- warnings ------------------------------------------------------------------------------------


def wide_table() -> torch.nn.Parameter:
    """A table in float64, for which there are no kernels, with a gradient."""
    table = torch.nn.Parameter(contiguous().double())
    table.grad = row_of(torch.ones(1, 4).double())
    return table


def test_the_reference_is_warned_of_once_a_parameter():
    tables = [wide_table(), wide_table()]
    optimizer = so.Adam(tables)
    message = (
        r"^the parameter of shape \[60, 4\] is stepped by the reference kernels, which are many "
        "times slower: there is no kernel for torch.float64; use one of "
    )
    with pytest.warns(UserWarning, match=message) as caught:
        optimizer.step()
    assert len(caught) == 2
    with warnings.catch_warnings(action="error"):
        optimizer.step()


def test_a_gradient_that_kernels_cannot_read_is_warned_of_when_it_comes():
    parameter, optimizer = stepped("lean-0.1")
    parameter.grad = torch.ones(SHAPE[::-1]).t()
    with pytest.warns(UserWarning, match="reference kernels, .* its gradient has the strides"):
        optimizer.step()


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_an_error_comes_after_a_whole_step():
    tables = [wide_table(), wide_table()]
    optimizer = so.Adam(tables)
    with pytest.raises(UserWarning, match="stepped by the reference kernels"):
        optimizer.step()
    for table in tables:
        assert table[3].all()
        assert optimizer.state[table]["step"] == 1


@pytest.mark.parametrize(
    "case",
    [
        Case("Adam", PRESETS["lean-0.1"], dtype=torch.float64),
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
    "wider counters": ("lean-0.1", "second_counters", Tensor.double),
    "transposed counters": ("paper-v-only", "second_counters", transposed),
    "counters by row": ("paper-v-only", "second_counters", lambda it: it[..., :1].clone()),
    "narrower words": ("lean-0.1", "second_words", Tensor.int),
    "too few words": ("lean-0.1", "second_words", lambda words: words[:2]),
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
