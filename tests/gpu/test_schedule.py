"""The numbers of a step as a device computes them from its own count."""

import pytest
import torch

import sketchoptim as so
from sketchoptim.storage import PRESETS

OPTIMIZERS = {
    "Adam": so.Adam,
    "AdamW": so.AdamW,
    "RMSprop": so.RMSprop,
    "Adagrad": lambda params: so.Adagrad(params, lr_decay=0.5),
    "SGD": lambda params: so.SGD(params, momentum=0.9),
}


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("preset", ["lean", "paper-mv"])
@pytest.mark.parametrize("step", [1, 2, 1000])
def test_a_schedule_gives_the_numbers_of_the_rule(build, is_sparse, preset, step):
    optimizer = build([torch.nn.Parameter(torch.ones(3, 2))])
    memory = so.Memory(PRESETS[preset].first, PRESETS[preset].second, clip=0.5)
    rule = optimizer.rule(optimizer.param_groups[0], step, memory=memory, is_sparse=is_sparse)
    size, root, clip = rule.schedule.numbers()
    assert (size, root) == (rule.step_size, rule.second_root)
    assert clip in (None, rule.clip)
