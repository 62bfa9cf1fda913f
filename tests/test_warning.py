"""Warnings name the line of the program that called into the library."""

import inspect
import linecache
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from backends import needs_native
from moment_runs import by_element
from torch.optim.lr_scheduler import StepLR

import sketchoptim as so

CROWDED = so.Memory(first=by_element(width=1), second=by_element(width=1))


def plain(optimizer: so.Adam) -> None:
    optimizer.step()


def with_hook(optimizer: so.Adam) -> None:
    optimizer.register_step_post_hook(lambda *_: None)
    optimizer.step()


def with_scheduler(optimizer: so.Adam) -> None:
    StepLR(optimizer, 1)
    optimizer.step()


def with_closure(optimizer: so.Adam) -> None:
    optimizer.step(lambda: 1.0)


def with_profiler(optimizer: so.Adam) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        optimizer.step()


def with_scaler(optimizer: so.Adam) -> None:
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)


CALLS = [plain, with_hook, with_scheduler, with_closure, with_profiler, with_scaler]


def place_of(
    message: str, call: Callable[[so.Adam], None], memory: str | so.Memory
) -> tuple[str, str]:
    """File and line of the one warning of that text in a step on float64, which has no kernel."""
    parameter = torch.nn.Parameter(torch.zeros(200, 2, dtype=torch.float64))
    optimizer = so.Adam([{"params": [parameter], "memory": memory}])
    parameter.grad = torch.ones_like(parameter)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(optimizer)
    (found,) = (it for it in caught if message in str(it.message))
    return found.filename, linecache.getline(found.filename, found.lineno).strip()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("message", "memory"),
    [
        ("active rows a bucket", CROWDED),
        pytest.param("is stepped by the reference kernels", "lean-0.1", marks=needs_native),
    ],
)
def test_what_a_step_warns_of_is_told_at_the_line_that_called_it(message, memory, call):
    file, line = place_of(message, call, memory)
    assert file == __file__
    assert line in inspect.getsource(call)


@pytest.mark.parametrize("call", CALLS)
def test_absent_kernels_are_told_at_the_line_that_called_step(call, without_kernels):
    file, line = place_of("runs on its reference kernels", call, "lean-0.1")
    assert file == __file__
    assert line in inspect.getsource(call)


def test_every_warning_of_the_library_is_told_in_this_way():
    root = Path(so.__file__).parent
    found = {path.name for path in root.rglob("*.py") if "warnings.warn(" in path.read_text()}
    assert found == {"_warning.py"}
