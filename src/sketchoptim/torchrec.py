"""Optimizers of sketchoptim for models that TorchRec has sharded.

Import it by itself: it needs torchrec, which sketchoptim does not install.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torchrec.distributed.types import ShardedModule
from torchrec.optim.keyed import KeyedOptimizer as _TorchRecKeyedOptimizer

from .optim import Optimizer

Named = list[tuple[str, nn.Parameter]]


def table_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the tables that TorchRec has sharded, by name.

    Where a table is on other ranks alone, TorchRec has an empty parameter in its place.
    """
    shardings = _shardings(model)
    return {name: it for name, it in model.named_parameters() if it in shardings}


def _shardings(model: nn.Module) -> dict[Tensor, Any]:
    """TorchRec's `ParameterSharding` of every table."""
    return {
        parameter: module.module_sharding_plan[name.split(".")[-2]]
        for module in model.modules()
        if isinstance(module, ShardedModule)
        for name, parameter in module.named_parameters()
    }


class KeyedOptimizer(_TorchRecKeyedOptimizer):  # type: ignore[misc]
    """A keyed optimizer over tables with the compute kernel "dense", wherever their rows are.

    Use it as TorchRec's `KeyedOptimizerWrapper`, by itself or in a `CombinedOptimizer`. Row-wise
    sharded tables are stepped with the ids that their rows have in the whole table, to the bits of
    one process; `torch.distributed.checkpoint` saves and reshards their state.

    Args:
        model: The sharded model, such as a `DistributedModelParallel`.
        params: Its parameters to optimize, by name, such as `table_parameters` gives them.
        build: Makes the optimizer from pairs of a name and a parameter. The gradients of these
            tables are dense, so the group must name its `memory`.

    Example:

        tables = KeyedOptimizer(
            model,
            table_parameters(model),
            lambda named: so.Adam([{"params": named, "memory": "lean"}], lr=0.01),
        )
    """

    def __init__(
        self, model: nn.Module, params: Mapping[str, Tensor], build: Callable[[Named], Optimizer]
    ) -> None:
        shardings = _shardings(model)
        found = [_slice_of(name, it, shardings.get(it)) for name, it in params.items()]
        self._slices = [it for it in found if it is not None]
        self.params = {it.name: it.view for it in self._slices}
        self._optimizer = build(list(self.params.items()))
        self.defaults: dict[str, Any] = {"_save_param_groups": False}
        self._shown: dict[Tensor, dict[str, Any]] = {}
        # What the constructor of torch.optim.Optimizer would make; TorchRec's does not call it.
        self._optimizer_step_pre_hooks: dict[int, Any] = {}
        self._optimizer_step_post_hooks: dict[int, Any] = {}
        self._patch_step_function()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer."""
        return self._optimizer.param_groups

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The state of each parameter, in the tensors that the optimizer uses.

        Rows of a sharded table are DTensors of the whole table over the same memory. TorchRec saves
        and loads through this.
        """
        packed = self._optimizer.state_dict()
        numbers = [number for group in packed["param_groups"] for number in group["params"]]
        parameters = [it for group in self.param_groups for it in group["params"]]
        self._shown = {
            # With the optional entries: TorchRec expects as many as are in the checkpoint.
            parameter: {"skipped": 0, "began_after": 0, **packed["state"][number]}
            for number, parameter in zip(numbers, parameters, strict=True)
            if number in packed["state"]
        }
        for entries in self._shown.values():
            entries.pop("digest", None)  # TorchRec loads into the tensors, past any check
        return self._shown

    def step(self, closure: Any = None) -> None:
        """Moves every parameter that has a gradient."""
        for it in self._slices:
            it.take_gradient_()
        self._optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients."""
        for it in self._slices:
            it.view.grad = it.source.grad = None

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Makes the state of no steps, for a checkpoint to be loaded into; no weight moves."""
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = 0.0  # marks a step that only makes state
        for it in self._slices:
            it.view.grad = torch.zeros_like(it.view)
        self._optimizer.step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        self.zero_grad()

    def post_load_state_dict(self) -> None:
        """Takes over the numbers that TorchRec has loaded into the dicts of `state`."""
        for parameter, shown in self._shown.items():
            numbers = {key: it for key, it in shown.items() if not isinstance(it, Tensor)}
            self._optimizer.state[parameter].update(numbers)


class _Slice(NamedTuple):
    """The rows of a table that this rank steps."""

    name: str
    source: Tensor
    """TorchRec's parameter, which has the gradient."""
    view: nn.Parameter
    """A parameter over the same memory: a DTensor of the whole table where ranks divide it."""

    def take_gradient_(self) -> None:
        gradient, view = self.source.grad, self.view
        if isinstance(view, DTensor) and not self.source.numel():
            gradient = view.to_local().detach()  # without rows here, but with some on other ranks
        if isinstance(view, DTensor) and gradient is not None:
            gradient = _as_part(gradient, view.shape, view.device_mesh)
        view.grad = gradient


def _slice_of(name: str, parameter: Tensor, sharding: Any) -> _Slice | None:
    """The slice of a parameter; None where all its rows are on other ranks."""
    if sharding is not None and sharding.compute_kernel != "dense":
        raise ValueError(
            f'{name} must have the compute kernel "dense", got {sharding.compute_kernel!r}, which '
            "steps in its own backward pass; constrain the sharding plan"
        )
    local = parameter.detach()
    spec = None if sharding is None else sharding.sharding_spec
    shards = [] if spec is None else spec.shards
    if len(shards) < 2:  # on one rank, or whole on all of them
        is_elsewhere = shards and not local.numel()
        return None if is_elsewhere else _Slice(name, parameter, nn.Parameter(local))
    rows = sum(shard.shard_sizes[0] for shard in shards)
    block = -(-rows // dist.get_world_size())
    expected = [[min(rank * block, rows), 0] for rank in range(dist.get_world_size())]
    if [list(shard.shard_offsets) for shard in shards] != expected:
        raise ValueError(
            f"{name} must be data-parallel, table-wise, or row-wise over all ranks, got "
            f"{sharding.sharding_type}; change the sharding plan"
        )
    dim = shards[0].shard_sizes[1]
    mesh = init_device_mesh(local.device.type, (dist.get_world_size(),))
    part = _as_part(local.view(-1, dim), torch.Size([rows, dim]), mesh)  # empty: with its columns
    return _Slice(name, parameter, nn.Parameter(part))


def _as_part(rows: Tensor, shape: torch.Size, mesh: DeviceMesh) -> DTensor:
    """The rows of this rank as a part of the whole, in the same memory."""
    return DTensor.from_local(
        rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1)
    )
