"""What torch.optim fixes for its own optimizers holds for ours: signatures, and refused input."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sketchoptim as so

NAMES = ["Adam", "AdamW", "RMSprop", "Adagrad", "SGD"]
OURS_ALONE = {"memory", "nonfinite", "rounding"}

# Inputs of torch's tests that need an option which ours does not have, with that option.
SKIPPED = {
    "Adam": {
        "lr as Tensor doesn't work with foreach & not capturable": ["foreach"],
        r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True": [
            "foreach"
        ],
    },
    "RMSprop": {"momentum should be between 0 and 1": ["momentum"]},
    "Adagrad": {},
    "SGD": {},
}
SKIPPED["AdamW"] = SKIPPED["Adam"]

PROGRAM = Path(__file__).parents[1] / "support" / "torch_error_inputs.py"


def parameters_of(kind: type[torch.optim.Optimizer]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(kind).parameters)


def positional(parameters: dict[str, inspect.Parameter]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, it in parameters.items() if it.kind in kinds]


@pytest.mark.parametrize("name", NAMES)
def test_positional_arguments_are_the_first_ones_of_torch_optim(name):
    ours = positional(parameters_of(getattr(so, name)))
    theirs = positional(parameters_of(getattr(torch.optim, name)))
    assert ours == theirs[: len(ours)]


@pytest.mark.parametrize("name", NAMES)
def test_what_torch_optim_takes_by_position_is_not_by_keyword_here(name):
    """Unless an option before it is one that ours lacks, as RMSprop's momentum."""
    ours, theirs = parameters_of(getattr(so, name)), parameters_of(getattr(torch.optim, name))
    lacking = [option for option in positional(theirs) if option not in ours]
    before = positional(theirs)[: positional(theirs).index(lacking[0])] if lacking else []
    assert set(before) <= set(positional(ours))


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_those_of_torch_optim(name):
    ours, theirs = parameters_of(getattr(so, name)), parameters_of(getattr(torch.optim, name))
    shared = ours.keys() & theirs.keys()
    assert {option: ours[option].default for option in shared} == {
        option: theirs[option].default for option in shared
    }


@pytest.mark.parametrize("name", NAMES)
def test_what_is_ours_alone_is_by_keyword(name):
    ours, theirs = parameters_of(getattr(so, name)), parameters_of(getattr(torch.optim, name))
    alone = ours.keys() - theirs.keys()
    assert alone == OURS_ALONE
    assert alone.isdisjoint(positional(ours))


@pytest.fixture(scope="module")
def error_inputs() -> list[dict[str, Any]]:
    """Every error input of torch's tests, and what it came to here."""
    result = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("name", NAMES)
def test_error_inputs_of_torch_raise_the_same_exceptions(name, error_inputs):
    tried = [row for row in error_inputs if row["optimizer"] == name and not row["lacking"]]
    assert len(tried) >= 6
    assert [row for row in tried if row["ours"] != row["theirs"]] == []


@pytest.mark.parametrize("name", NAMES)
def test_error_inputs_are_left_out_for_options_that_ours_lacks_alone(name, error_inputs):
    left_out = {
        row["input"]: row["lacking"]
        for row in error_inputs
        if row["optimizer"] == name and row["lacking"]
    }
    assert left_out == SKIPPED[name]


BAD_RATES = {
    "an int too large for a float": 10**400,
    "a tensor of two numbers": torch.ones(2),
    "a tensor of none": torch.ones(0),
}


@pytest.mark.parametrize("lr", BAD_RATES.values(), ids=BAD_RATES)
@pytest.mark.parametrize("name", NAMES)
def test_a_learning_rate_that_is_no_number_is_refused(name, lr):
    with pytest.raises(ValueError, match=r"^lr must be "):
        getattr(so, name)([nn.Parameter(torch.ones(3, 2))], lr=lr)


@pytest.mark.parametrize("lr", BAD_RATES.values(), ids=BAD_RATES)
def test_a_learning_rate_that_is_no_number_is_refused_in_a_group_and_in_a_step(lr):
    parameter, other = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))
    optimizer = so.Adam([parameter])
    with pytest.raises(ValueError, match=r"^lr must be "):
        optimizer.add_param_group({"params": [other], "lr": lr})
    assert len(optimizer.param_groups) == 1
    parameter.grad = torch.ones(3, 2)
    optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(ValueError, match=r"^lr must be "):
        optimizer.step()
    assert torch.equal(parameter, torch.ones(3, 2))
    assert not optimizer.state
