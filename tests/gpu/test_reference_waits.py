"""The reference on a device without triton: how often a step waits for the device."""

from unittest import mock

import pytest
import torch
from gradients import sparse
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sketchoptim as so
from sketchoptim import _rows
from sketchoptim.ops import reference_only

WAITING = ("_local_scalar_dense", "unique", "nonzero", "equal", "bincount")


class Waits(TorchDispatchMode):
    """Counts operations that wait for tensors which would be on the device."""

    def __init__(self, host: list[Tensor]) -> None:
        super().__init__()
        self.host = {tensor.data_ptr() for tensor in host}
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        is_of_host = isinstance(args[0], Tensor) and (
            not args[0].is_sparse and args[0].data_ptr() in self.host
        )
        if not is_of_host and any(waiting in name for waiting in WAITING):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("preset", ["lean-0.1", "row-wise", "exact"])
@pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
def test_a_step_of_the_reference_waits_at_most_four_times(preset, is_sparse):
    shape = (2000, 64)
    table = torch.nn.Parameter(torch.ones(shape))
    memory = so.Memory(
        so.storage.PRESETS[preset].first, so.storage.PRESETS[preset].second, clip=9.0
    )
    optimizer = so.Adam([{"params": [table], "memory": memory}])
    table.grad = torch.ones(shape)
    if is_sparse:
        table.grad = sparse(torch.arange(3000) % 999, torch.ones(3000, 64), shape)
    chunks = mock.patch.object(_rows, "CHUNK_ELEMENTS", _rows.DEVICE_CHUNK_ELEMENTS)
    lists: list[Tensor] = []
    tolist = Tensor.tolist

    def counted(tensor: Tensor) -> object:
        lists.append(tensor)
        return tolist(tensor)

    with reference_only(), chunks:
        optimizer.step()
        state = optimizer.state[table].values()
        host = [it for it in state if isinstance(it, Tensor) and not it.dim()]
        with Waits(host) as waits, mock.patch.object(Tensor, "tolist", counted):
            optimizer.step()
    assert len(waits.names) + len(lists) <= 4, waits.names
