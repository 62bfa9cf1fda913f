"""A recorded trace of a step: how many launches it makes, and that it waits for nothing."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from gpu_steps import stepping_by_gpu_kernels
from gradients import sparse
from torch.utils._python_dispatch import TorchDispatchMode

import sketchoptim as so
from experiments.studies.gpu_model import Case, models, sort_operations
from sketchoptim.ops._gpu_launches import Launch
from sketchoptim.storage import PRESETS

# Operations that read numbers of a device, or whose result has a shape that depends on them.
WAITING = ("_local_scalar_dense", "nonzero", "unique", "equal", "is_nonzero", "item", "bincount")
# Views and allocations launch nothing.
FREE = ("empty", "new_empty", "select", "slice", "view", "detach", "alias", "_indices", "_values")
FREE += ("sparse_dim", "is_coalesced")


class Trace(TorchDispatchMode):
    """The operations of torch on tensors that would be on the device."""

    def __init__(self, host: list[torch.Tensor]) -> None:
        super().__init__()
        self.host = {tensor.data_ptr() for tensor in host}
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        given = [arg for arg in args if isinstance(arg, torch.Tensor) and not arg.is_sparse]
        is_of_host = bool(given) and all(arg.data_ptr() in self.host for arg in given)
        if not is_of_host and not name.startswith(FREE):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def recorded(trace: Trace) -> Callable[[Launch], None]:
    return lambda launch: trace.names.append(launch.kernel.__name__)


def traced_step(memory: so.Memory) -> list[str]:
    """What the second step of a table launches: operations of torch and kernels, in order."""
    parameter = torch.nn.Parameter(torch.zeros(1000, 32))
    optimizer = so.Adam([{"params": [parameter], "memory": memory}])
    ids = torch.arange(100) % 37
    with stepping_by_gpu_kernels(is_run=False):
        for number in (1, 2):
            parameter.grad = sparse(ids, torch.ones(100, 32), (1000, 32))
            state = optimizer.state[parameter].values() if number == 2 else []
            # Numbers of the state that are kept on the CPU whatever the parameter's device.
            host = [it for it in state if isinstance(it, torch.Tensor) and not it.dim()]
            with Trace(host) as trace, mock.patch.object(Launch, "run_", recorded(trace)):
                optimizer.step()
    return trace.names


def test_a_lean_step_is_one_sort_and_five_kernels():
    names = traced_step(PRESETS["lean-0.1"])
    assert names == ["collect_keys", "sort", "begin", "inspect", "move_rows", "finish"]
    assert len(names) - 1 + sort_operations(32) == models(Case())["lean"].operations


ORDINARY = ("lean-0.1", "row-wise", "exact", "8-bit", "paper-mv", "paper-v")


def by_element(decay):
    return so.Sketched(width=64, granularity="element", decay=decay)


@pytest.mark.parametrize(
    "memory",
    [
        *(PRESETS[name] for name in ORDINARY),
        so.Memory(None, so.Sketched(width=64, conservative=True, columns=True)),
        so.Memory(by_element("linear"), by_element("linear")),
        so.Memory(by_element("linear"), by_element("linear"), form="ratio"),
        so.Memory(None, so.Sketched(width=64, decay="paper")),
        so.Memory(None, so.Sketched(width=64, conservative=True, dtype=torch.bfloat16)),
    ],
    ids=[*ORDINARY, "columns", "linear", "ratio", "paper by row", "lean in bfloat16"],
)
def test_a_step_makes_at_most_seven_launches_and_waits_for_none(memory):
    names = traced_step(memory)
    assert len(names) <= 7
    assert not [name for name in names for waiting in WAITING if waiting in name]
