"""Checks an installed wheel: the native kernels load and train, next to torch's OpenMP runtime.

SKETCHOPTIM_REQUIRE_NATIVE=1 python smoke.py
"""

import re
import shutil
import sys
from pathlib import Path

import torch
from torch import nn

import sketchoptim as so
from sketchoptim.ops import _native


def train(*, is_sparse: bool) -> tuple[float, float]:
    """The loss before and after a few steps of a table with sparse or with dense gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5000, 64, sparse=is_sparse), nn.Linear(64, 8))
    groups = model.parameters() if is_sparse else so.param_groups(model)
    optimizer = so.AdamW(groups, lr=0.01)
    ids, targets = torch.randint(5000, (512,)), torch.randint(8, (512,))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    (table, *_) = so.memory_report(optimizer).parameters
    assert table.state_bytes < 5000, f"{table.state_bytes} bytes of state, not half a byte a row"
    return losses[0], losses[-1]


def main() -> None:
    """Ends with an error if anything is not as a user needs it."""
    compilers = [name for name in ("cc", "c++", "gcc", "g++", "clang++") if shutil.which(name)]
    assert not compilers, f"this environment is to have no compiler, but it has {compilers}"
    library = _native.library()
    assert library is not None
    assert Path(library._name).parent == Path(so.__file__).parent / "ops", library._name
    torch.set_num_threads(2)
    for is_sparse in (True, False):
        first, last = train(is_sparse=is_sparse)
        assert last < first / 2, f"the loss went from {first:.3f} to {last:.3f}"
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").split()
    runtimes = {name for name in maps if re.search(r"/lib(g|i)?omp[^/]*$", name)}
    assert len(runtimes) == 1, f"one OpenMP runtime is to be loaded, not {sorted(runtimes)}"
    print(f"sketchoptim {so.__version__} on Python {sys.version.split()[0]}: {library._name}")


if __name__ == "__main__":
    main()
