"""Deferred gradients under DistributedDataParallel: what one process gets, without its gradient."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from replicas import check_same_on_every_rank, local_part
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sketchoptim as so

WORDS, DIM, BATCH = 1003, 8, 16


class LanguageModel(nn.Module):
    """An embedding, a table that is smaller than what it is made of, a hidden layer, and a head."""

    def __init__(self, *, is_tied: bool, is_sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parities = nn.Embedding(2, DIM, sparse=is_sparse)
        self.embedding = nn.Embedding(WORDS, DIM, sparse=is_sparse)
        self.hidden, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, WORDS)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.hidden(self.embedding(words) + self.parities(words % 2)).tanh()
        return nn.functional.cross_entropy(self.head(hidden), (3 * words + 1) % WORDS)


class Bags(nn.Module):
    """Classes of bags of ids, whose table has a row of padding."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.EmbeddingBag(WORDS, DIM, sparse=True, mode=mode, padding_idx=3)
        self.linear = nn.Linear(DIM, 4)

    def forward(self, words: Tensor) -> Tensor:
        bags = torch.stack([words, words + 1, torch.full_like(words, 3)], 1) % WORDS
        return nn.functional.cross_entropy(self.linear(self.table(bags)), words % 4)


class Sampled(nn.Module):
    """An embedding under a sampled softmax that draws the same negatives everywhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.hidden = nn.Embedding(WORDS, DIM, sparse=True), nn.Linear(DIM, DIM)
        self.head = so.nn.SampledSoftmax(DIM, WORDS, samples=20, bias=True)

    def forward(self, words: Tensor) -> Tensor:
        fixed = torch.Generator().manual_seed(1)
        hidden = self.hidden(self.embedding(words))
        return self.head(hidden, (7 * words + 1) % WORDS, generator=fixed)


class Recommender(nn.Module):
    """Bags of two features, of which one has no ids in some bags."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = so.nn.EmbeddingBags({"user": (WORDS, DIM), "item": (50, 4)}, mode="mean")
        self.linear = nn.Linear(DIM + 4, 4)

    def forward(self, words: Tensor) -> Tensor:
        pairs = torch.stack([words, (words + 1) % WORDS], 1).flatten()
        lengths = torch.full_like(words, 2), (words % 2).long()
        ids = [pairs, words[words % 2 == 1] % 50]
        return nn.functional.cross_entropy(self.linear(self.bags(ids, lengths=lengths)), words % 4)


class Fused(nn.Module):
    """An embedding that shares its weight with a fused head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.hidden = nn.Embedding(WORDS, DIM), nn.Linear(DIM, DIM)
        self.head = so.nn.LinearCrossEntropy(DIM, WORDS)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.hidden(self.embedding(words)).tanh(), (3 * words + 1) % WORDS)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": lambda: LanguageModel(is_tied=True),
    "untied": lambda: LanguageModel(is_tied=False, is_sparse=True),
    "bags of sums": lambda: Bags("sum"),
    "bags of means": lambda: Bags("mean"),
    "sampled": Sampled,
    "fused": Fused,
    "recommender": Recommender,
}


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS, (BATCH,), generator=generator) for _ in range(count)]


def train(
    model: nn.Module,
    parameters: nn.Module,
    words: list[Tensor],
    *,
    micro_batches: int = 1,
    uses_no_sync: bool = False,
) -> so.AdamW:
    """The optimizer after steps along clipped gradients, each of several micro-batches."""
    optimizer = so.AdamW(so.param_groups(parameters, min_rows=WORDS), lr=0.05)
    for number, batch in enumerate(words):
        is_last = (number + 1) % micro_batches == 0
        waits = uses_no_sync and not is_last
        with model.no_sync() if waits else nullcontext():
            model(batch).backward()
        if is_last:
            nn.utils.clip_grad_norm_(parameters.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return optimizer


def check_close(model: nn.Module, other: nn.Module) -> None:
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=2e-5)


def cases() -> Iterator[tuple[nn.Module, nn.Module]]:
    """A model with deferred gradients, and its plain twin."""
    so.enable_sparse_clipping()
    for build in MODELS.values():
        model, plain = build(), build()
        so.defer_gradients(model)
        yield model, plain


@on_ranks(2, 4)
def test_parts_of_a_batch_train_as_the_whole():
    for model, plain in cases():
        train(plain, plain, batches(4))
        parts = [local_part(batch) for batch in batches(4)]
        optimizer = train(DistributedDataParallel(model), model, parts)
        check_same_on_every_rank(model, optimizer)
        check_close(model, plain)


@on_ranks(2)
def test_micro_batches_accumulate_with_and_without_no_sync():
    for uses_no_sync in (True, False):
        for model, plain in cases():
            train(plain, plain, batches(8), micro_batches=4)
            parts = [local_part(batch) for batch in batches(8)]
            optimizer = train(
                DistributedDataParallel(model),
                model,
                parts,
                micro_batches=4,
                uses_no_sync=uses_no_sync,
            )
            check_same_on_every_rank(model, optimizer)
            check_close(model, plain)


@on_ranks(2, 4)
def test_no_process_holds_the_gradient_of_all_rows():
    for name in ("tied", "untied", "bags of means"):
        model = MODELS[name]()
        so.defer_gradients(model)
        replica = DistributedDataParallel(model)
        replica(local_part(batches(1)[0])).backward()
        norm = so.clip_grad_norm_(model.parameters(), 0.5)
        assert norm > 0
        gradients = [it.grad for it in model.parameters() if it.shape[0] == WORDS and it.dim() > 1]
        assert all(isinstance(it, so.DeferredGradient) for it in gradients)
        assert not any(it.exists for it in gradients)


@on_ranks(2)
def test_weights_of_the_first_process_are_those_of_all():
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Embedding(WORDS, DIM), nn.Linear(DIM, 2))
    so.defer_gradients(model)
    torch.nn.init.normal_(model[0].weight, mean=float(dist.get_rank()))
    replica = DistributedDataParallel(model)
    replica(torch.tensor([1, 2])).sum().backward()
    check_same_on_every_rank(model)


@on_ranks(2)
def test_a_process_without_lookups_takes_part():
    model = MODELS["bags of sums"]()
    so.defer_gradients(model)
    replica = DistributedDataParallel(model)
    words = batches(1)[0][: 4 * (1 - dist.get_rank())]
    loss = replica(words)
    (loss if len(words) else loss.nan_to_num() * 0.0).backward()
    assert model.table.weight.grad.is_row_sparse
    optimizer = so.AdamW(model.parameters(), lr=0.1)
    optimizer.step()
    check_same_on_every_rank(model, optimizer)


@on_ranks(2)
def test_a_gradient_scaler_finds_what_any_process_has():
    model = MODELS["tied"]()
    so.defer_gradients(model)
    replica, before = DistributedDataParallel(model), copy.deepcopy(model.state_dict())
    optimizer = so.AdamW(so.param_groups(model), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    loss = replica(local_part(batches(1)[0]))
    scaler.scale(loss * (float("inf") if dist.get_rank() == 1 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert scaler.get_scale() == 1.0


@on_ranks(2)
def test_a_wrapped_model_cannot_be_armed_and_a_wrapped_part_is_refused():
    model = MODELS["tied"]()
    with pytest.raises(ValueError, match=r"must come before DistributedDataParallel"):
        so.defer_gradients(DistributedDataParallel(model))
    outer = nn.Sequential(MODELS["tied"]())
    so.defer_gradients(outer[0])
    replica = DistributedDataParallel(outer)
    with pytest.raises(RuntimeError, match=r"it manages .*0\.embedding\.weight.*the very module"):
        replica(batches(1)[0])
    so.defer_gradients(model)
    replica = DistributedDataParallel(model)
    replica(batches(1)[0]).backward()
    with pytest.raises(ValueError, match="call materialize_gradients before"):
        so.materialize_gradients(model)


@on_ranks(2)
def test_divided_parameters_are_refused():
    from torch.distributed.fsdp import fully_shard

    model = MODELS["tied"]()
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    armed = MODELS["tied"]()
    so.defer_gradients(armed)
    with pytest.raises(ValueError, match=r"materialize_gradients\(model\) before fully_shard"):
        fully_shard(armed, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match=r"weight is a DTensor, whose rows are divided"):
        so.defer_gradients(model)
