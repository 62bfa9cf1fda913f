"""accelerate and Lightning on several ranks, with data-parallel and with sharded models."""

from pathlib import Path
from typing import Any

import client_models
import torch
import torch.distributed as dist
from ranks import on_ranks
from replicas import check_same_on_every_rank
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

import sketchoptim as so

NOISE = [".*"]  # what the frameworks warn of, such as too few workers, is not ours
BATCH, MAX_NORM = 64, 0.2


def examples() -> list[dict[str, Tensor]]:
    return client_models.examples(256)


def whole_run(model: nn.Module) -> nn.Module:
    """The model after one epoch in one process."""
    optimizer = so.AdamW(client_models.parameters_of(model), lr=0.05)
    for batch in DataLoader(examples(), batch_size=BATCH):
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        so.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return model


def build(*, is_sparse: bool) -> client_models.Classifier:
    torch.manual_seed(0)
    return client_models.Classifier(is_sparse=is_sparse)


def check_close(model: nn.Module, expected: nn.Module) -> None:
    for found, other in zip(model.parameters(), expected.parameters(), strict=True):
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(whole.detach(), other.detach(), rtol=0, atol=1e-5)


# -- accelerate ------------------------------------------------------------------------------------


def accelerated_run(model: nn.Module, plugin: Any = None) -> Any:
    """The accelerator after one epoch, with the model and optimizer that it prepared."""
    from accelerate import Accelerator, DistributedType
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    so.enable_sparse_clipping()
    accelerator = Accelerator(cpu=True)
    if plugin is not None:  # accelerate offers it on accelerators alone; its code needs none
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    optimizer = so.AdamW(client_models.parameters_of(model), lr=0.05)
    data = DataLoader(examples(), batch_size=BATCH // dist.get_world_size())
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for batch in data:
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return accelerator, model, optimizer


@on_ranks(2, ignore=NOISE)
def test_accelerate_trains_replicas():
    for is_sparse in (True, False):
        accelerator, model, optimizer = accelerated_run(build(is_sparse=is_sparse))
        bare = accelerator.unwrap_model(model)
        check_same_on_every_rank(bare, optimizer.optimizer)
        check_close(bare, whole_run(build(is_sparse=is_sparse)))


@on_ranks(2, ignore=NOISE)
def test_accelerate_trains_a_sharded_model():
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)
    _, model, _ = accelerated_run(build(is_sparse=False), plugin)
    assert isinstance(model.table.weight, DTensor)
    check_close(model, whole_run(build(is_sparse=False)))


# -- Lightning -------------------------------------------------------------------------------------


def lightning_module(**options: Any) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build(**options)

        def configure_model(self) -> None:
            if self.device_mesh is not None and not isinstance(self.model.table.weight, DTensor):
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> so.AdamW:
            return so.AdamW(client_models.parameters_of(self.model), lr=0.05)

    return Module()


def fit(module: Any, folder: Path, strategy: Any) -> Any:
    import lightning

    so.enable_sparse_clipping()
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        gradient_clip_val=MAX_NORM,
        use_distributed_sampler=False,  # it would shuffle
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = examples()
    sampler = DistributedSampler(data, shuffle=False)
    batch = BATCH // dist.get_world_size()
    trainer.fit(module, DataLoader(data, batch_size=batch, sampler=sampler))
    return trainer


@on_ranks(2, ignore=NOISE)
def test_lightning_trains_replicas(folder: Path):
    for is_sparse in (True, False):
        module = lightning_module(is_sparse=is_sparse)
        trainer = fit(module, folder, "ddp")
        check_same_on_every_rank(module.model, *trainer.optimizers)
        check_close(module.model, whole_run(build(is_sparse=is_sparse)))


@on_ranks(2, ignore=NOISE)
def test_lightning_trains_a_sharded_model(folder: Path):
    from lightning.pytorch.strategies import ModelParallelStrategy

    module = lightning_module(is_sparse=False)
    ranks = dist.get_world_size()
    fit(module, folder, ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1))
    assert isinstance(module.model.table.weight, DTensor)
    check_close(module.model, whole_run(build(is_sparse=False)))
