"""An installation for the CPU knows nothing of the GPU's kernels."""

import subprocess
import sys

STEP = """
import sys
import torch
import sketchoptim as so

table = torch.nn.Embedding(100, 8, sparse=True)
optimizer = so.Adam(table.parameters())
table(torch.tensor([1, 2, 1])).sum().backward()
optimizer.step()
optimizer.state_dict()
print(*sys.modules)
"""


def test_a_step_on_the_cpu_imports_neither_triton_nor_the_kernels_in_it():
    printed = subprocess.run(
        [sys.executable, "-c", STEP], capture_output=True, text=True, check=True
    ).stdout
    names = set(printed.split())
    assert "sketchoptim.ops.cpu" in names
    assert not {name for name in names if name.partition(".")[0] == "triton"}
    assert not {
        name for name in names if name.startswith(("sketchoptim.ops.gpu", "sketchoptim.ops._gpu"))
    }
