"""What torch.optim fixes for its own optimizers holds for ours: signatures, and refused input."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import sketchoptim as so

NAMES = ["Adam", "AdamW", "RMSprop", "Adagrad", "SGD"]
OURS_ALONE = {"memory", "compress", "nonfinite", "rounding"}
# Arguments of torch.optim.Adam that torch.optim.AdamW does not have.
OF_ADAM = {"AdamW": {"decoupled_weight_decay"}}

# Inputs of torch's tests that need an option which ours does not have, with that option.
SKIPPED: dict[str, dict[str, list[str]]] = {name: {} for name in NAMES}

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
    assert alone == OURS_ALONE | OF_ADAM.get(name, set())
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
