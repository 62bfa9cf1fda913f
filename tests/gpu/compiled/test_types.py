"""What the front end of the compiler takes: branches whose types agree, for any number of entries.

The interpreter has no types: it runs what a GPU's compiler refuses.
"""

import random
from dataclasses import replace
from unittest import mock

import pytest
import torch
from gpu_steps import IS_INTERPRETED

if IS_INTERPRETED:
    pytest.skip("the interpreter's process cannot compile", allow_module_level=True)

import gpu_cases
import step_cases
from gpu_compile import check_types, launches_of
from gpu_steps import stepping_by_gpu_kernels

from sketchoptim.ops._gpu_launches import Launch

FAMILIES = (gpu_cases.order_free, gpu_cases.in_order, gpu_cases.coded, gpu_cases.with_columns)
# Around the length of a piece, which decides whether there are partial sums.
ENTRIES = (0, 1, 32, 33)
each_memory = pytest.mark.parametrize(
    ("optimizer", "memory"), gpu_cases.MEMORIES.values(), ids=gpu_cases.MEMORIES
)


@pytest.mark.parametrize("entries", ENTRIES)
@each_memory
def test_steps_of_few_entries_compile(optimizer, memory, entries):
    half = torch.bfloat16
    for launch in launches_of(memory, optimizer=optimizer, dtype=half, entries=entries):
        check_types(launch)


@pytest.mark.parametrize("seed", range(60))
def test_random_steps_compile(seed):
    draw = random.Random(9000 + seed)
    case = FAMILIES[seed % 4](draw)
    dims = (1, 2, 15, 16, 33, 64, 300, 1500)
    shape = (draw.choice([1, 2, 40, 200]), draw.choice(dims))
    case = replace(case, shape=shape, entries=draw.choice([*ENTRIES, 60]))
    with stepping_by_gpu_kernels(is_run=False), mock.patch.object(Launch, "run_", check_types):
        step_cases.run(case)
