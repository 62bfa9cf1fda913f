"""Sketches of processes that saw different parts of a stream, merged by one all-reduce."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor

import sketchoptim as so

IDS, DIM, SIZE = 500, 2, (3, 64)


def stream(rank: int, *, is_signed: bool) -> tuple[Tensor, Tensor]:
    """Ids with whole numbers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(IDS, (300,), generator=generator)
    return ids, torch.randint(-5 if is_signed else 0, 6, (300, DIM), generator=generator).float()


def whole_stream(*, is_signed: bool) -> tuple[Tensor, Tensor]:
    parts = [stream(rank, is_signed=is_signed) for rank in range(dist.get_world_size())]
    ids, values = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(values)


def truth() -> Tensor:
    ids, values = whole_stream(is_signed=False)
    return torch.zeros(IDS, DIM).index_add_(0, ids, values)


@on_ranks(2, 4)
def test_linear_sketches_become_that_of_the_whole_stream():
    for kind in (so.CountSketch, so.CountMinSketch):
        is_signed = kind is so.CountSketch
        merged, whole = (kind(*SIZE, DIM, seed=7) for _ in range(2))
        merged.add_(*stream(dist.get_rank(), is_signed=is_signed)).all_reduce_()
        whole.add_(*whole_stream(is_signed=is_signed))
        assert torch.equal(merged.counters, whole.counters), kind


@on_ranks(2)
def test_sketches_that_were_scaled_differently_add_their_estimates():
    merged, whole = (so.CountMinSketch(*SIZE, DIM, seed=7) for _ in range(2))
    factors = [0.5, 0.125]
    merged.add_(*stream(dist.get_rank(), is_signed=False)).scale_(factors[dist.get_rank()])
    for rank, factor in enumerate(factors):
        ids, values = stream(rank, is_signed=False)
        whole.add_(ids, values * factor)
    found = merged.all_reduce_().query(torch.arange(IDS))
    torch.testing.assert_close(found, whole.query(torch.arange(IDS)))


@on_ranks(2, 4)
def test_conservative_sketches_become_an_upper_bound_below_the_plain_sketch():
    merged = so.CountMinSketch(*SIZE, DIM, conservative=True, seed=7)
    merged.add_(*stream(dist.get_rank(), is_signed=False)).all_reduce_()
    plain = so.CountMinSketch(*SIZE, DIM, seed=7).add_(*whole_stream(is_signed=False))
    found, ids = merged.query(torch.arange(IDS)), torch.arange(IDS)
    assert (found >= truth()).all()
    assert (found <= plain.query(ids)).all()
    assert (found < plain.query(ids)).any()


@on_ranks(2, 4)
def test_a_sketch_that_differs_on_one_rank_is_refused_on_all():
    is_last = dist.get_rank() == dist.get_world_size() - 1
    others = [
        lambda: so.CountMinSketch(*SIZE, DIM, seed=8),
        lambda: so.CountMinSketch(*SIZE, DIM, seed=7, conservative=True),
        lambda: so.CountMinSketch(3, 32, DIM, seed=7),
        lambda: so.CountSketch(*SIZE, DIM, seed=7),
        lambda: so.CountMinSketch(*SIZE, DIM, seed=7, dtype=torch.bfloat16),
    ]
    for other in others:
        sketch = other() if is_last else so.CountMinSketch(*SIZE, DIM, seed=7)
        sketch.add_(*stream(0, is_signed=False))
        before = sketch.counters.clone()
        with pytest.raises(ValueError, match="must be of one kind, size, dtype, seed and start"):
            sketch.all_reduce_()
        assert torch.equal(sketch.counters, before)


@on_ranks(4)
def test_sketches_of_a_group_leave_the_others_alone():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[dist.get_rank() // 2]
    sketch = so.CountMinSketch(*SIZE, 1, seed=7)
    sketch.add_(torch.tensor([5]), torch.tensor([[float(dist.get_rank())]])).all_reduce_(group)
    assert sketch.query(torch.tensor([5])).item() == (1 if dist.get_rank() < 2 else 5)
