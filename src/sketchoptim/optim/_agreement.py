"""Whether processes that share parameters will do the same with them.

Compared before the first step, and before the first one after a change of parameters or
`load_state_dict`. Which processes share parameters is known of two kinds: those over whose mesh
DTensors are laid out, and those of a `DistributedDataParallel` module that has the parameters.
"""

import gc
import itertools
import json
import zlib
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _torch_private, ops
from .._group_options import compresses_dense
from .._names import keyed_parameters
from .._validation import is_dtensor
from ..deferred import is_row_sparse
from ._algorithm import EXACT, Algorithm, Group
from ._digests import checksum
from ._shards import local

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# What a process will do with a parameter, in values that JSON keeps.
Account = dict[str, Any]

# Replicas that take their first steps further apart are compared by the last of them alone.
_WAIT = timedelta(seconds=10)


def check_meshes(optimizer: Algorithm) -> None:
    """Raises in every process of a mesh if they differ in what they will do; all take part."""
    if not _are_several():
        return
    accounts = _accounts(optimizer)
    for group, parameters in _by_mesh_group(accounts):
        _compare_together(group, parameters[0], [accounts[it] for it in parameters])


def check_replicas(optimizer: Algorithm) -> None:
    """Raises if this process differs from another one with replicas of the same parameters."""
    if not _are_several():
        return
    accounts = _accounts(optimizer)
    plain = {it: account for it, account in accounts.items() if not is_dtensor(it)}
    for module in _replicas(plain):
        _compare_replicas(module, plain)


def _are_several() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _accounts(optimizer: Algorithm) -> dict[Tensor, Account]:
    return {
        parameter: _account(optimizer, key, parameter, group)
        for key, parameter, group in keyed_parameters(optimizer)
    }


def _account(optimizer: Algorithm, key: str | int, parameter: Tensor, group: Group) -> Account:
    gradient, state = parameter.grad, optimizer.state.get(parameter) or {}
    is_sparse = gradient is not None and is_row_sparse(gradient)
    is_compressed = state.get("is_compressed", is_sparse or compresses_dense(group, parameter))
    memory = group["memory"] if is_compressed else EXACT
    options = {name: group.get(name) for name in sorted(optimizer.option_names() - {"memory"})}
    account = {
        "shape": list(parameter.shape),
        "dtype": str(parameter.dtype),
        "optimizer": type(optimizer).__name__,
        "memory": memory.to_dict(),
        "step": float(state.get("step", 0)),
        **{name: it.tolist() if isinstance(it, Tensor) else it for name, it in options.items()},
    }
    if not memory.is_exact:  # nothing else depends on the name
        account["name"] = key
        words = [it for it in state if isinstance(state[it], Tensor) and it.endswith("_words")]
        account["hash words"] = {it: checksum(it, state) for it in words}
    if is_sparse or not optimizer.steps_by_torch(group, memory):
        account["kernels"] = ops.describe_backend(parameter.device)
    plain: Account = json.loads(json.dumps(account, default=lambda it: type(it).__name__))
    return plain


# -- processes of a mesh: all of them step together ----------------------------------------------


def _by_mesh_group(parameters: Iterable[Tensor]) -> "list[tuple[ProcessGroup, list[Tensor]]]":
    """The groups over which parameters are divided or replicated, in the same order everywhere."""
    found: dict[str, tuple[ProcessGroup, list[Tensor]]] = {}
    for parameter in parameters:
        if is_dtensor(parameter):
            for group in parameter.device_mesh.get_all_groups():
                if group.size() > 1:
                    found.setdefault(group.group_name, (group, []))[1].append(parameter)
    return [found[name] for name in sorted(found)]


def _compare_together(group: "ProcessGroup", like: Tensor, accounts: list[Account]) -> None:
    import torch.distributed as dist

    digest = zlib.crc32(json.dumps(accounts).encode())
    extremes = torch.tensor([digest, -digest], dtype=torch.int64, device=local(like).device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
    high, low = extremes.tolist()
    if high == -low:
        return
    everywhere: list[Any] = [None] * group.size()
    dist.all_gather_object(everywhere, accounts, group)
    for rank, others in enumerate(everywhere):
        _check_same(dict(enumerate(everywhere[0])), dict(enumerate(others)), 0, rank)
        if len(everywhere[0]) != len(others):
            raise _disagreement(
                f"there are {len(everywhere[0])} on rank 0 and {len(others)} on rank {rank}"
            )


# -- replicas of DistributedDataParallel: some may not step ----------------------------------------


def _replicas(parameters: dict[Tensor, Account]) -> list[torch.nn.Module]:
    """The modules under DistributedDataParallel that have some of the parameters.

    torch leaves no mark on a parameter, and frameworks wrap a model after its optimizer was built.
    """
    if not parameters:
        return []
    kind = torch.nn.parallel.DistributedDataParallel
    wrapped = [it for it in gc.get_objects() if issubclass(type(it), kind)]
    return [it for it in wrapped if any(own in parameters for own in it.parameters())]


def _compare_replicas(module: Any, accounts: dict[Tensor, Account]) -> None:
    """Compares with the processes whose accounts are there, or come soon.

    By the store of the process group and not by a collective: with ZeroRedundancyOptimizer each
    process steps other parameters of the module, and one without any would not take part.
    """
    group = module.process_group
    store = _torch_private.store_of(group)
    if store is None or group.size() == 1:
        return
    # DistributedDataParallel has checked that the parameters have the same order everywhere.
    own = {
        str(number): accounts[parameter]
        for number, parameter in enumerate(module.parameters())
        if parameter in accounts
    }
    shapes = [(name, list(it.shape)) for name, it in module.named_parameters()]
    place = f"sketchoptim/{zlib.crc32(repr(shapes).encode()):08x}"
    rank = group.rank()
    turn = store.add(f"{place}/{rank}", 1)
    keys = [f"{place}/{turn}/{other}" for other in range(group.size())]
    store.set(keys[rank], json.dumps(own))
    try:
        store.wait(keys, _WAIT)
    except RuntimeError:  # some have no parameters, or have raised
        keys = [key if store.check([key]) else "" for key in keys]
    found = {other: json.loads(store.get(key)) for other, key in enumerate(keys) if key}
    for (left, mine), (right, others) in itertools.combinations(sorted(found.items()), 2):
        _check_same(mine, others, left, right)


def _check_same(one: dict[Any, Account], other: dict[Any, Account], left: int, right: int) -> None:
    """Raises unless two processes have the same accounts of the parameters that both have."""
    for number in one:
        for key in {**one[number], **other.get(number, {})}:
            if number in other and one[number].get(key) != other[number].get(key):
                shape = one[number]["shape"]
                raise _disagreement(
                    f"{key} of parameter {number}, of shape {shape} on rank {left}, is "
                    f"{one[number].get(key)!r} on rank {left} and {other[number].get(key)!r} on "
                    f"rank {right}"
                )


def _disagreement(difference: str) -> ValueError:
    return ValueError(
        f"processes that share parameters must do the same with them, but {difference}; build the "
        "optimizer of the same parameters in the same order, with the same options and the same "
        "version of sketchoptim, and load the same checkpoint. Nothing has changed"
    )
