"""How far a step goes through the library's Python, which is most of what a small step costs."""

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from backends import needs_native
from gradients import sparse

import sketchoptim as so

SOURCE = Path(so.__file__).parent
# Comprehensions and lambdas are part of the function that they stand in.
NESTED = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>"}


def functions_called(optimizer: torch.optim.Optimizer) -> set[CodeType]:
    """The functions of the library that one step runs through."""
    found: set[CodeType] = set()

    def look(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        is_ours = Path(code.co_filename).is_relative_to(SOURCE)
        if event == "call" and is_ours and code.co_name not in NESTED:
            found.add(code)

    sys.setprofile(look)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return found


def lean_table(*, is_coalesced: bool) -> tuple[torch.nn.Parameter, so.Adam]:
    """A table under the default memory after some steps, with a gradient for the next."""
    table = torch.nn.Parameter(torch.ones(1000, 8))
    optimizer = so.Adam([table])
    ids = torch.tensor([3, 5, 8] if is_coalesced else [5, 3, 5])
    table.grad = sparse(ids, torch.ones(3, 8), table.shape, is_coalesced=is_coalesced)
    for _ in range(3):
        optimizer.step()
    return table, optimizer


@needs_native
@pytest.mark.parametrize("is_coalesced", [True, False], ids=["coalesced", "uncoalesced"])
def test_an_eager_sparse_lean_step_is_at_most_30_functions(is_coalesced):
    table, optimizer = lean_table(is_coalesced=is_coalesced)
    called = functions_called(optimizer)
    assert optimizer.state[table]["step"] == 4
    names = sorted(f"{Path(it.co_filename).name}: {it.co_qualname}" for it in called)
    assert "base.py: Optimizer._step_" in names  # so that the path was seen at all
    assert len(names) <= 30, "\n".join(names)
