"""Steps of several parameters in one call."""

from typing import Any

import pytest
import torch
from backends import LEVELS, bits, needs_native, stepping_by
from gradients import sparse
from torch import Tensor

import sketchoptim as so

pytestmark = [needs_native, pytest.mark.filterwarnings("ignore:.*active rows a bucket")]

MEMORIES = ("lean-0.1", "paper-mv", "row-wise", so.Memory(so.Exact(), so.Exact(), clip=2.0))


def tables() -> list[Any]:
    """Names, values and memories of tables of many sizes, one of them larger than all others."""
    generator = torch.Generator().manual_seed(0)
    return [
        (
            f"{number} {dtype}",
            torch.randn(3 + 40 * number, 5 + 13 * number, generator=generator).to(dtype),
            memory,
        )
        for number, memory in enumerate((*MEMORIES, "lean-0.1"))
        for dtype in (torch.float32, torch.bfloat16)
    ]


def gradient(table: Tensor, step: int) -> Tensor:
    """Dense, or sparse with or without repeated ids, by turns; finite."""
    generator = torch.Generator().manual_seed(step)
    rows, dim = table.shape
    if step == 2:
        return torch.randn(rows, dim, generator=generator).to(table.dtype)
    ids = torch.randint(0, rows, (rows // 2 + 2,), generator=generator)
    values = torch.randn(ids.numel(), dim, generator=generator).to(table.dtype)
    return sparse(ids, values, table.shape)


def stepped(chosen: list[Any]) -> dict[str, list[Tensor]]:
    """The bits of weights and state after some steps of one optimizer, by name."""
    parameters = {name: torch.nn.Parameter(values.clone()) for name, values, _ in chosen}
    groups = [
        {
            "params": [(name, parameters[name])],
            "memory": memory,
            "weight_decay": 0.1 * (len(name) % 2),
        }
        for name, _, memory in chosen
    ]
    optimizer = so.AdamW(groups, lr=0.1)
    for step in range(4):
        for parameter in parameters.values():
            parameter.grad = gradient(parameter.detach(), step)
        optimizer.step()
    return {
        name: [
            bits(it)
            for it in (parameter, *optimizer.state[parameter].values())
            if isinstance(it, Tensor)
        ]
        for name, parameter in parameters.items()
    }


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("threads", [1, 3])
def test_tables_have_the_bits_that_each_has_alone(level, threads):
    with stepping_by(level, threads=threads) as taken:
        together = stepped(tables())
    assert taken.native == 4 * len(tables())
    for table in tables():
        with stepping_by(level):
            alone = stepped([table])
        for one, other in zip(alone[table[0]], together[table[0]], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("beta", [0.0, 0.001, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_scale_is_moved_into_the_counters_as_by_the_reference(level, beta, dtype):
    storage = so.Sketched(width=64, conservative=True, dtype=dtype)

    def run(by: str | None) -> dict[str, Tensor]:
        parameter = torch.nn.Parameter(torch.ones(40, 4))
        optimizer = so.Adam([parameter], betas=(0.9, beta), memory=so.Memory(second=storage))
        with stepping_by(by):
            for step in range(30):
                parameter.grad = gradient(parameter.detach(), step if step != 2 else 7)
                optimizer.step()
        return optimizer.state[parameter]

    native, reference = run(level), run(None)
    assert native["second_scale"] > 2.0**-24
    assert torch.equal(native["second_scale"], reference["second_scale"])
    torch.testing.assert_close(native["second_counters"], reference["second_counters"])
