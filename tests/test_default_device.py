"""torch.set_default_device: tensors that are on the CPU are worked on there, whatever it says.

The device is meta, which has no numbers: a tensor that is made without naming its own device is
found at once. It stands in for a GPU.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sketchoptim as so
from sketchoptim import _hashing, diagnostics
from sketchoptim.moments._sketched import _FOLD_CHECK_STEPS
from sketchoptim.nn import MACH, LSHSoftmax, UnigramSampler
from sketchoptim.ops._top_classes import top_classes

CPU = torch.device("cpu")
ROWS, DIM = 200, 4
FOLDING = so.Memory(second=so.Sketched(width=64, fold_when=1e9))
EVERY_KIND = [
    (so.CountSketch, {}),
    (so.CountMinSketch, {}),
    (so.CountMinSketch, {"conservative": True}),
]


def drawn(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0), device=CPU)


def sketched() -> list[Any]:
    ids, values = torch.arange(30, device=CPU), drawn(30, 2)
    found = []
    for kind, options in EVERY_KIND:
        for dtype in (torch.float32, torch.bfloat16):
            one, other = (
                kind(3, 16, 2, device=CPU, dtype=dtype, **options).add_(ids, values)
                for _ in range(2)
            )
            found.append(one.scale_(1e-9).merge_(other).fold_().query(ids).tolist())
    return found


def estimated() -> Any:
    sketch = so.CountMinSketch(3, 64, 1, device=CPU)
    sketch.add_(torch.arange(ROWS, device=CPU), drawn(ROWS, 1))
    return diagnostics.estimate_error(sketch, ROWS)


def trained(
    kind: type[torch.optim.Optimizer] = so.Adam, **options: Any
) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    table = nn.Parameter(drawn(ROWS, DIM))
    optimizer = kind([table], **options)
    ids = torch.arange(20, device=CPU).unsqueeze(0)
    table.grad = torch.sparse_coo_tensor(
        ids, drawn(20, DIM), table.shape, check_invariants=True, device=CPU
    )
    optimizer.step()
    return table, optimizer


def stepped(**options: Any) -> Any:
    table, optimizer = trained(**options)
    optimizer.load_state_dict(optimizer.state_dict())
    so.clip_grad_norm_([table], 1.0)
    optimizer.state[table]["step"].fill_(_FOLD_CHECK_STEPS - 1)
    optimizer.step()
    table.grad = drawn(ROWS, DIM)
    optimizer.step()
    return table.tolist()


def converted() -> Any:
    table, optimizer = trained(torch.optim.SparseAdam)
    back = so.to_torch(so.from_torch(optimizer), torch.optim.SparseAdam)
    return back.state[table]["exp_avg_sq"].tolist()


def searched() -> Any:
    found = top_classes(drawn(3, 2, 16), _hashing.seeded(0, 0, 3), 100, 5, "median")
    return [part.tolist() for part in found]


def sampled() -> Any:
    sampler = UnigramSampler(drawn(50) + 0.1)
    return sampler.draw(20, generator=torch.Generator().manual_seed(0), device=CPU).tolist()


def hashed_softmax() -> Any:
    weight = nn.Parameter(drawn(50, 8))
    layer = LSHSoftmax(8, 50, bits=3, tables=4, budget=20, weight=weight)
    generator = torch.Generator().manual_seed(0)
    layer(drawn(6, 8), torch.arange(6, device=CPU), generator=generator).backward()
    assert weight.grad is not None
    return layer.top_k(drawn(6, 8), 3).tolist(), weight.grad.to_dense().tolist()


def mached() -> Any:
    layer = MACH(lambda: nn.Linear(8, 6), 6, 100, 10).to_empty(device=CPU)
    for parameter in layer.parameters():
        nn.init.ones_(parameter)
    return layer.top_k(drawn(3, 8), 5).ids.tolist()


CALLS: dict[str, Callable[[], Any]] = {
    "sketches": sketched,
    "estimate_error": estimated,
    "lean-0.1": stepped,
    "paper-mv": lambda: stepped(memory="paper-mv"),
    "rank-one": lambda: stepped(memory="rank-one"),
    "exact": lambda: stepped(memory="exact"),
    "8-bit": lambda: stepped(memory="8-bit"),
    "fold_when": lambda: stepped(memory=FOLDING),
    "Adagrad": lambda: stepped(kind=so.Adagrad, initial_accumulator_value=0.1),
    "from_torch, to_torch": converted,
    "diagnose": lambda: so.diagnose(trained()[1]),
    "memory_report": lambda: so.memory_report(trained()[1]),
    "top_classes": searched,
    "UnigramSampler": sampled,
    "LSHSoftmax": hashed_softmax,
    "MACH": mached,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_default_device_changes_nothing_for_tensors_on_the_cpu(call: Callable[[], Any]) -> None:
    expected = call()
    with torch.device("meta"):
        assert call() == expected
