"""Models that TorchRec has sharded: data-parallel, table-wise and row-wise tables.

Needs torchrec and fbgemm-gpu-cpu, which are no dependencies: docs/howto/torchrec.md.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, world
from torch import Tensor, nn
from torch.distributed import checkpoint

import sketchoptim as so

NOISE = [".*"]  # what TorchRec, FBGEMM and tensordict warn of is not ours
ROWS = {"data": 40, "table": 50, "row": 61, "few": 3}  # the last: no rows for the fourth rank
DIM, STEPS, BATCH = 8, 4, 8


def torchrec_or_skip() -> Any:
    pytest.importorskip("fbgemm_gpu", reason="fbgemm-gpu-cpu is not installed")
    return pytest.importorskip("torchrec", reason="torchrec is not installed")


class Scores(nn.Module):
    """The loss of a batch of bags over all tables."""

    def __init__(self, tables: Any) -> None:
        super().__init__()
        self.tables, self.top = tables, nn.Linear(len(ROWS) * DIM, 1)

    def forward(self, features: Any) -> Tensor:
        return (self.top(self.tables(features).values()) - 1).square().mean()


def collection(torchrec: Any) -> Any:
    torch.manual_seed(0)
    configs = [
        torchrec.EmbeddingBagConfig(
            name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[f"{name} feature"]
        )
        for name, rows in ROWS.items()
    ]
    return Scores(torchrec.EmbeddingBagCollection(tables=configs, device=torch.device("cpu")))


def sharded(torchrec: Any, **placements: Any) -> Any:
    """The model with tables sharded as the names say."""
    from torchrec.distributed import sharding_plan as plans
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingPlan

    model, sharder = collection(torchrec), EmbeddingBagCollectionSharder(fused_params={})
    ranks = dist.get_world_size()
    how = {
        "data": plans.data_parallel(),
        "table": plans.table_wise(rank=ranks - 1, compute_kernel="dense"),
        "row": plans.row_wise(compute_kernel="dense"),
        "few": plans.row_wise(compute_kernel="dense"),
        **placements,
    }
    plan = plans.construct_module_sharding_plan(
        model.tables, how, sharder=sharder, local_size=ranks, world_size=ranks, device_type="cpu"
    )
    weights = {name: it.detach().clone() for name, it in model.named_parameters()}
    parallel = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=ShardingPlan({"tables": plan}),
        sharders=[sharder],
        init_parameters=True,
    )
    fill_(parallel, weights)
    return parallel


def fill_(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Gives every rank its part of the weights."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = weights[name]
            block = -(-whole.shape[0] // dist.get_world_size())
            start = 0 if parameter.shape == whole.shape else dist.get_rank() * block
            if parameter.shape[1:] == whole.shape[1:]:
                parameter.copy_(whole[start : start + parameter.shape[0]])


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights as one process would have them, on every rank."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    found = {}
    for name, value in model.state_dict().items():
        if isinstance(value, ShardedTensor):
            whole = torch.zeros(value.size())
            for shard in value.local_shards():
                start = shard.metadata.shard_offsets[0]
                whole[start : start + len(shard.tensor)] = shard.tensor
            dist.all_reduce(whole)
            value = whole
        found[name] = value.detach().clone()
    return found


def features(torchrec: Any, seed: int, part: Callable[[Tensor], Tensor]) -> Any:
    """A batch of bags of two ids for every table."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack(
        [torch.randint(rows, (BATCH, 2), generator=generator) for rows in ROWS.values()]
    )
    mine = torch.stack([part(bags) for bags in ids])
    return torchrec.KeyedJaggedTensor.from_lengths_sync(
        keys=[f"{name} feature" for name in ROWS],
        values=mine.flatten(),
        lengths=torch.full((mine.shape[0] * mine.shape[1],), 2),
    )


def local_part(batch: Tensor) -> Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def train(torchrec: Any, model: nn.Module, optimizer: Any, part: Any, *, first: int = 0) -> None:
    for seed in range(first, first + STEPS):
        optimizer.zero_grad()
        model(features(torchrec, seed, part)).backward()
        optimizer.step()


def combined(model: nn.Module, memory: str = "lean") -> Any:
    """Our optimizer of tables beside torch's of the rest."""
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

    from sketchoptim.torchrec import KeyedOptimizer, table_parameters

    tables = table_parameters(model)
    rest = {name: it for name, it in model.named_parameters() if name not in tables}
    return CombinedOptimizer(
        [
            ("tables", KeyedOptimizer(model, tables, lambda named: adam(named, memory))),
            ("rest", KeyedOptimizerWrapper(rest, lambda params: torch.optim.Adam(params, lr=0.01))),
        ]
    )


def adam(named: Any, memory: str) -> so.Adam:
    return so.Adam([{"params": named, "memory": memory}], lr=0.05)


@on_ranks(2, 4, ignore=NOISE)
def test_sharded_tables_train_as_those_of_one_process():
    torchrec = torchrec_or_skip()
    for memory in ("lean", "row-wise", "exact"):
        model, alone = sharded(torchrec), collection(torchrec)
        optimizer = combined(model, memory)
        train(torchrec, model, optimizer, local_part)
        names = [name for name, _ in alone.named_parameters() if name.startswith("tables.")]
        tables = [(name, alone.get_parameter(name)) for name in names]
        both = [adam(tables, memory), torch.optim.Adam(alone.top.parameters(), lr=0.01)]
        for seed in range(STEPS):
            alone.zero_grad()
            alone(features(torchrec, seed, lambda batch: batch)).backward()
            for one in both:
                one.step()
        found = whole_weights(model)
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=0, atol=1e-5)


@on_ranks(2, ignore=NOISE)
def test_row_wise_tables_have_the_sketch_of_the_whole_table_and_native_steps():
    torchrec = torchrec_or_skip()
    model = sharded(torchrec)
    optimizer = combined(model)
    train(torchrec, model, optimizer, local_part)
    (_, tables), _ = optimizer.optimizers
    for name, parameter in tables.params.items():
        state = tables.state[parameter]
        assert state["shape"].tolist() == [ROWS[name.split(".")[-2]], DIM]
        assert tables._optimizer._bindings[id(parameter)].fallback_reason is None, name


@on_ranks(4, ignore=NOISE)
def test_a_checkpoint_is_resharded(folder: Path):
    torchrec = torchrec_or_skip()
    for memory in ("lean", "row-wise", "exact"):
        model = sharded(torchrec)
        optimizer = combined(model, memory)
        train(torchrec, model, optimizer, local_part)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoint.save(state, checkpoint_id=folder / memory)
        weights = whole_weights(model)
        train(torchrec, model, optimizer, lambda batch: batch, first=10)  # the same on all ranks
        expected = whole_weights(model)
        with world(2) as is_member:
            if is_member:
                other = sharded(torchrec)
                resumed = combined(other, memory)
                for _, one in resumed.optimizers:
                    one.init_state()
                loaded = {"model": other.state_dict(), "optimizer": resumed.state_dict()}
                checkpoint.load(loaded, checkpoint_id=folder / memory)
                resumed.load_state_dict(loaded["optimizer"])
                other.load_state_dict(loaded["model"])
                for name, value in whole_weights(other).items():
                    assert torch.equal(value, weights[name]), name
                train(torchrec, other, resumed, lambda batch: batch, first=10)
                for name, value in whole_weights(other).items():
                    torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)


@on_ranks(2, ignore=NOISE)
def test_columns_on_several_ranks_are_refused_by_name():
    torchrec = torchrec_or_skip()
    from torchrec.distributed import sharding_plan as plans

    model = sharded(torchrec, row=plans.column_wise(ranks=[0, 1], compute_kernel="dense"))
    with pytest.raises(ValueError, match=r"tables\.embedding_bags\.row.* got column_wise"):
        combined(model)


@on_ranks(2, ignore=NOISE)
def test_kernels_that_step_by_themselves_are_refused_by_name():
    torchrec = torchrec_or_skip()
    from torchrec.distributed import sharding_plan as plans

    model = sharded(torchrec, table=plans.table_wise(rank=0, compute_kernel="fused"))
    with pytest.raises(ValueError, match=r"tables\.embedding_bags\.table.* got 'fused'"):
        combined(model)


@on_ranks(2, ignore=NOISE)
def test_torchrecs_own_wrapper_steps_whole_tables_natively():
    torchrec = torchrec_or_skip()
    from torchrec.distributed import sharding_plan as plans
    from torchrec.optim.keyed import KeyedOptimizerWrapper

    model = sharded(torchrec, row=plans.data_parallel(), few=plans.data_parallel())
    params = {name: it for name, it in model.named_parameters() if it.numel()}
    optimizer = KeyedOptimizerWrapper(params, lambda params: adam(params, "lean"))
    train(torchrec, model, optimizer, local_part)
    for name, parameter in params.items():
        binding = optimizer._optimizer._bindings[id(parameter)]
        assert binding.fallback_reason is None, name
