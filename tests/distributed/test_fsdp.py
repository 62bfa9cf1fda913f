"""Models under FSDP2: the training of one process, whatever the mesh and the policies."""

import pytest
import torch
import torch.distributed as dist
from language_models import LanguageModel, batches, train
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh

import sketchoptim as so

REFERENCE = ".*is stepped by the reference kernels"


def sharded(model: LanguageModel, **policies) -> LanguageModel:
    """The model, its rows divided among the processes."""
    policies.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    for layer in (model.embedding, model.head):
        fully_shard(layer, **policies)
    return fully_shard(model, **policies)


def check_training(model: nn.Module, *, tolerance: float, **options) -> None:
    """Trains the model and its twin in one process, and compares losses and weights."""
    twin, words = LanguageModel(), batches(6)
    losses, expected = (
        train(it, so.AdamW(so.param_groups(it, **options), lr=0.01), words) for it in (model, twin)
    )
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance)
    for (name, one), (_, other) in zip(
        twin.named_parameters(), model.named_parameters(), strict=True
    ):
        torch.testing.assert_close(
            other.full_tensor(), one.detach(), rtol=tolerance, atol=tolerance, msg=name
        )


@on_ranks(2, 4)
def test_a_sharded_model_trains_as_in_one_process():
    check_training(sharded(LanguageModel()), tolerance=2e-5)


@on_ranks(4)
def test_replicas_of_sharded_models_train_as_in_one_process():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    check_training(sharded(LanguageModel(), mesh=mesh), tolerance=2e-5)


@on_ranks(2)
def test_weights_that_are_offloaded_train_as_in_one_process():
    policy = CPUOffloadPolicy(pin_memory=False)
    check_training(sharded(LanguageModel(), offload_policy=policy), tolerance=2e-5)


@on_ranks(2)
def test_mixed_precision_differs_by_its_rounding():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    check_training(sharded(LanguageModel(), mp_policy=policy), tolerance=0.05)


@on_ranks(2, ignore=[REFERENCE])
def test_hidden_layers_and_tables_may_have_any_memory_that_can_be_divided():
    for options in ({"rest": "8-bit"}, {"memory": "rank-one"}, {"memory": "row-wise"}):
        check_training(sharded(LanguageModel()), tolerance=2e-4, **options)


@on_ranks(2)
def test_state_of_tables_is_below_a_byte_a_row_in_every_process():
    model = sharded(LanguageModel())
    optimizer = so.AdamW(so.param_groups(model, "lean-0.1"), lr=0.01)
    train(model, optimizer, batches(1))
    for table in (model.embedding.weight, model.head.weight):
        assert isinstance(table, DTensor)
        parts = [it for it in optimizer.state[table].values() if isinstance(it, torch.Tensor)]
        assert sum(it.nbytes for it in parts) < len(table)


@on_ranks(2)
def test_both_ways_of_clipping_give_the_norm_of_the_whole_model():
    norms = []
    for clip in (so.clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        for model in (sharded(LanguageModel()), LanguageModel()):
            (words,) = batches(1)
            model(words).logsumexp(-1).sum().backward()
            norm = clip(model.parameters(), 0.5)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            after = clip(model.parameters(), 1e9)
            after = after.full_tensor() if isinstance(after, DTensor) else after
            torch.testing.assert_close(after, torch.tensor(0.5), rtol=1e-4, atol=0)
    for norm in norms[1:]:
        torch.testing.assert_close(norm, norms[0], rtol=1e-5, atol=0)


@on_ranks(2)
def test_a_group_that_names_no_memory_stays_exact_under_fsdp():
    model = sharded(LanguageModel())
    optimizer = so.AdamW(model.parameters(), lr=0.01)
    with pytest.warns(UserWarning, match="dense gradient: exact state"):
        train(model, optimizer, batches(1))
    state = optimizer.state[model.head.weight]
    assert state["second_values"].shape == model.head.weight.to_local().shape
