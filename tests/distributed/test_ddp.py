"""Tables under DistributedDataParallel: replicas stay equal, and are what one process gets."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from replicas import check_same_on_every_rank, local_part, train
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sketchoptim as so

ROWS, DIM, STEPS, BATCH = 300, 8, 6, 32
HASHING = so.nn.FeatureHashing(features=ROWS)


class Lookup(nn.Module):
    """Classes of ids, by a table, and a loss."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.linear = table, nn.Linear(DIM, 3)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids[:, None] if isinstance(self.table, nn.EmbeddingBag) else ids)
        logits = self.linear(rows)
        # Sums over a constant, so that empty batches have a loss too.
        return nn.functional.cross_entropy(logits, ids % 3, reduction="sum") / BATCH


class Classes(nn.Module):
    """An output layer of so.nn, and its loss for hidden vectors of ids."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(ROWS, DIM, sparse=True), head

    def forward(self, ids: Tensor) -> Tensor:
        fixed = torch.Generator().manual_seed(int(ids.numel()))
        return self.head(self.words(ids), (7 * ids + 1) % ROWS, generator=fixed)


class Texts(nn.Module):
    """Classes of short texts, by MACH over bags of features."""

    def __init__(self) -> None:
        super().__init__()
        self.mach = so.nn.MACH(lambda: so.nn.BagEncoder(ROWS, DIM), DIM, ROWS, 20, members=2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.mach(HASHING([f"text {number}" for number in ids.tolist()]), ids)


def sampled() -> nn.Module:
    return so.nn.SampledSoftmax(DIM, ROWS, samples=20, bias=True)


def found_by_hash() -> nn.Module:
    return so.nn.LSHSoftmax(DIM, ROWS, bits=4, tables=3, budget=30, bias=True)


MODELS = {
    "embedding": lambda: Lookup(nn.Embedding(ROWS, DIM, sparse=True, padding_idx=0)),
    "bag": lambda: Lookup(nn.EmbeddingBag(ROWS, DIM, sparse=True)),
    "dense": lambda: Lookup(nn.Embedding(ROWS, DIM)),
    "sampled": lambda: Classes(sampled()),
    "lsh": lambda: Classes(found_by_hash()),
    "mach": Texts,
}


def build(name: str, memory: str = "lean") -> tuple[nn.Module, so.Adam]:
    torch.manual_seed(0)
    model = MODELS[name]()
    return model, so.Adam(so.param_groups(model, memory=memory, min_rows=ROWS), lr=0.05)


def batches(seed: int = 1) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(ROWS, (BATCH,), generator=generator),) for _ in range(STEPS)]


def parts(whole: list[tuple[Tensor]]) -> list[tuple[Tensor]]:
    return [(local_part(ids),) for (ids,) in whole]


@on_ranks(2, 4)
def test_replicas_of_every_layer_stay_equal():
    for name in MODELS:
        model, optimizer = build(name)
        train(DistributedDataParallel(model), optimizer, parts(batches()))
        assert optimizer.state, name
        check_same_on_every_rank(model, optimizer)


@on_ranks(2)
def test_replicas_stay_equal_in_every_memory():
    for memory in ("exact", "8-bit", "row-wise", "rank-one", "paper-mv", "paper-v"):
        model, optimizer = build("embedding", memory)
        train(DistributedDataParallel(model), optimizer, parts(batches()))
        check_same_on_every_rank(model, optimizer)


@on_ranks(2, 4)
def test_parts_of_a_batch_train_as_the_whole():
    for name in ("embedding", "dense", "mach"):
        (whole, one), (model, optimizer) = build(name), build(name)
        train(whole, one, batches())
        # A sum over ranks, where DDP divides by their number.
        scale = dist.get_world_size() if isinstance(model, Lookup) else 1
        replica = DistributedDataParallel(model)
        train(lambda *batch, r=replica, s=scale: s * r(*batch), optimizer, parts(batches()))
        for left, right in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=2e-6)


@on_ranks(2, 4)
def test_empty_batches_and_batches_of_padding_take_part():
    model, optimizer = build("embedding")
    replica = DistributedDataParallel(model)
    nothing = torch.zeros(0, dtype=torch.int64)
    for odd in (nothing, torch.zeros(BATCH, dtype=torch.int64)):  # id 0 is padding
        some = [(odd,) if dist.get_rank() == 0 else batch for batch in parts(batches())]
        train(replica, optimizer, some)
        check_same_on_every_rank(model, optimizer)
        everyone = [(odd,)]
        train(replica, optimizer, everyone)
        check_same_on_every_rank(model, optimizer)


@on_ranks(2)
def test_labels_of_padding_alone_do_not_spoil_other_ranks():
    for make in (sampled, found_by_hash):
        torch.manual_seed(0)
        head = make()
        replica = DistributedDataParallel(head)
        optimizer = so.Adam(head.parameters(), lr=0.05)
        labels = torch.full((4,), head.ignore_index) if dist.get_rank() == 0 else torch.arange(4)
        replica(torch.ones(4, DIM, requires_grad=True), labels).backward()
        optimizer.step()  # would refuse NaN
        check_same_on_every_rank(head, optimizer)


@on_ranks(2)
def test_gradients_accumulate_without_communication():
    for name in ("embedding", "sampled", "mach"):
        model, optimizer = build(name)
        other, same = build(name)
        replica, once = DistributedDataParallel(model), DistributedDataParallel(other)
        first, second = parts(batches())[:2]
        with replica.no_sync():
            replica(*first).backward()
        replica(*second).backward()
        optimizer.step()
        (once(*first) + other(*second)).backward()
        same.step()
        check_same_on_every_rank(model, optimizer)
        for left, right in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=2e-6)


@on_ranks(2, 4)
def test_clipping_gives_every_rank_the_same_norm():
    model, optimizer = build("sampled")
    replica = DistributedDataParallel(model)
    for batch in parts(batches()):
        optimizer.zero_grad()
        replica(*batch).backward()
        norm = so.clip_grad_norm_(model.parameters(), 0.01)
        norms = [torch.zeros_like(norm) for _ in range(dist.get_world_size())]
        dist.all_gather(norms, norm)
        assert all(torch.equal(norm, other) for other in norms)
        optimizer.step()
    check_same_on_every_rank(model, optimizer)


@on_ranks(2)
def test_a_bucket_view_and_a_static_graph_change_nothing():
    for options in ({"gradient_as_bucket_view": True}, {"static_graph": True}):
        (model, optimizer), (other, same) = build("mach"), build("mach")
        train(DistributedDataParallel(model, **options), optimizer, parts(batches()))
        train(DistributedDataParallel(other), same, parts(batches()))
        for left, right in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(left, right)


@on_ranks(2)
def test_a_table_that_a_rank_does_not_use_takes_part_with_no_ids():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (nn.Embedding(ROWS, DIM, sparse=True) for _ in range(2))

        def forward(self, ids: Tensor) -> Tensor:
            unused = self.two(ids[:0] if dist.get_rank() == 0 else ids)
            return (self.one(ids) ** 2).sum() + (unused**2).sum()

    torch.manual_seed(0)
    model = Two()
    optimizer = so.Adam(model.parameters())
    train(DistributedDataParallel(model), optimizer, parts(batches()))
    check_same_on_every_rank(model, optimizer)


@on_ranks(2)
def test_gradients_that_are_not_finite_on_one_rank_are_refused_by_all():
    model, optimizer = build("embedding")
    replica = DistributedDataParallel(model)
    (ids,) = parts(batches())[0]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = replica(ids)
    (loss * (float("nan") if dist.get_rank() == 0 else 1.0)).backward()
    with pytest.raises(ValueError, match="finite"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
