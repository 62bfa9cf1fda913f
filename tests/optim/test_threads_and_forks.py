"""What threads and forked processes meet: whole steps."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import sketchoptim as so

SUPPORT = Path(__file__).parents[1] / "support"


def output_of(name: str, *arguments: str) -> str:
    command = [sys.executable, str(SUPPORT / name), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("kind", "memory"), [("Adam", "lean-0.1"), ("Adam", "exact"), ("SGD", "lean-0.1")], ids=str
)
def test_steps_from_several_threads_are_taken_one_after_the_other(kind, memory):
    found = json.loads(output_of("threaded_steps.py", kind, memory))
    assert found == {"errors": [], "steps": 200, "is_same": True}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_fork_waits_for_the_step_of_another_thread():
    assert output_of("forked_steps.py") == "10 of 10\n"


class Paused(so.Adam):
    """Stops between the steps of its tables and those of its exact parameters."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.is_halfway, self.goes_on = threading.Event(), threading.Event()

    def torch_step_(self, group, bindings):
        self.is_halfway.set()
        assert self.goes_on.wait(60)
        super().torch_step_(group, bindings)


@pytest.mark.parametrize("call", ["state_dict", "load_state_dict"])
def test_state_is_saved_and_loaded_between_steps_of_other_threads(call):
    table, bias = nn.Parameter(torch.ones(3000, 8)), nn.Parameter(torch.ones(8))
    optimizer = Paused([{"params": [table], "memory": "lean-0.1"}, {"params": [bias]}])
    for parameter in (table, bias):
        parameter.grad = torch.ones_like(parameter)
    saved = so.Adam([{"params": [table], "memory": "lean-0.1"}, {"params": [bias]}]).state_dict()
    counts = []

    def use() -> None:
        getattr(optimizer, call)(*[saved] * (call == "load_state_dict"))
        counts.extend(int(state["step"]) for state in optimizer.state.values())

    stepping, using = threading.Thread(target=optimizer.step), threading.Thread(target=use)
    stepping.start()
    assert optimizer.is_halfway.wait(60)
    using.start()
    using.join(0.2)
    assert using.is_alive()
    optimizer.goes_on.set()
    stepping.join()
    using.join()
    assert counts == ([1, 1] if call == "state_dict" else [])
