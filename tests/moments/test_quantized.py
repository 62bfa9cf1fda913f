"""Moments in 8-bit codes with a scale for each block."""

import math

import pytest
import torch
from gradients import sparse
from hypothesis import given
from hypothesis import strategies as st
from moment_runs import ADAM, moved, opened

import sketchoptim as so
from sketchoptim import moments
from sketchoptim.moments import Average, Table
from sketchoptim.moments._quantized import code_book, encoder

SUM = Average(1.0, 1.0)
CPU = torch.device("cpu")
# Rows longer than a block, of a block, several to a block.
SHAPES = [(64, 300), (32, 256), (200, 64), (90, 100), (5000, 1), (20, 3, 100)]

pytestmark = pytest.mark.filterwarnings("ignore:.*is stepped by the reference kernels")


def bytes_a_weight(shape):
    table = Table(torch.Size(shape), torch.float32, CPU)
    both = (moments.declare(so.Quantized(), name, table) for name in ("first", "second"))
    return sum(part.nbytes(torch.float32) for parts in both for part in parts) / math.prod(shape)


@pytest.mark.parametrize("dim", [1, 16, 64, 129, 255, 256, 257, 300, 511, 513, 4096])
def test_both_moments_take_at_most_2_1_bytes_a_weight(dim):
    assert bytes_a_weight((5000, dim)) <= 2.1


def test_small_parameters_and_vectors_are_kept_in_float32():
    assert bytes_a_weight((63, 64)) == 8.0
    assert bytes_a_weight((5000,)) == 8.0
    moment = opened(so.Quantized(), "first", rows=10, dim=3)
    values = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(moved(moment, torch.arange(10), values, SUM), values)
    assert torch.equal(moment.estimate(torch.arange(10)), values)


@pytest.mark.parametrize("is_signed", [True, False])
def test_codes_are_the_nearest(is_signed):
    book = code_book(is_signed)
    borders = (book[1:] + book[:-1]) / 2
    up, down = (borders.nextafter(torch.tensor(limit)) for limit in (2.0, -2.0))
    random = torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    values = torch.cat([random, random**6, book, borders, up, down, torch.zeros(1)])
    values = torch.cat([values, -values]).clamp(-1, 1) if is_signed else values.clamp(0, 1)
    assert torch.equal(encoder(is_signed, CPU)(values).long(), torch.bucketize(values, borders))


@pytest.mark.parametrize(("name", "bound"), [("first", 0.0071), ("second", 0.0036)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_value_is_near_its_code(shape, name, bound):
    rows, dim = shape[0], math.prod(shape[1:])
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** -(torch.arange(rows)[:, None] % 5)
    values = torch.randn(rows, dim, generator=generator) * sizes
    values = values if name == "first" else values.square()
    moment = opened(so.Quantized(), name, rows=rows, dim=dim)
    moved(moment, torch.arange(rows), values, SUM)
    error = (moment.estimate(torch.arange(rows)) - values).abs()
    # Blocks as they are specified: parts of a row, or as many whole rows as fit.
    block_rows = max(1, 256 // dim)
    for start in range(0, rows, block_rows):
        for column in range(0, dim, 256):
            part = (slice(start, start + block_rows), slice(column, column + 256))
            scale = values[part].abs().max()
            assert error[part].max() <= bound * scale
            large = values[part].abs() >= scale / 10
            assert (error[part][large] <= 10 * bound * values[part].abs()[large]).all()


def test_a_second_moment_vanishes_only_where_it_is_zero():
    moment = opened(so.Quantized(), rows=20, dim=256)
    values = torch.zeros(20, 256)
    values[:, 0], values[:, 1] = 1.0, 1e-30
    moved(moment, torch.arange(20), values, SUM)
    found = moment.estimate(torch.arange(20))
    assert (found[:, 1] > 0).all()
    assert (found[:, 2:] == 0).all()


@given(st.sampled_from(SHAPES), st.integers(0, 1000))
def test_rows_that_share_no_block_with_touched_ones_keep_their_bits(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    rows, dim = shape[0], math.prod(shape[1:])
    moment = opened(so.Quantized(), "first", rows=rows, dim=dim)
    moved(moment, torch.arange(rows), torch.randn(rows, dim, generator=generator), SUM)
    before = moment.estimate(torch.arange(rows))
    ids = torch.randperm(rows, generator=generator)[:5].sort().values
    moved(moment, ids, torch.randn(5, dim, generator=generator), ADAM, step=2)
    after = moment.estimate(torch.arange(rows))
    block = max(1, 256 // dim)
    is_alone = ~torch.isin(torch.arange(rows) // block, ids // block)
    assert torch.equal(after[is_alone], before[is_alone])
    # Neighbours in a block are rounded anew, each time by a code at most.
    assert (after - before)[~is_alone].abs().max() > 0


def test_how_rows_come_in_chunks_does_not_matter_to_rows_of_whole_blocks():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(32, 256, generator=generator)
    estimates = []
    for sizes in ([32], [5, 20, 7]):
        moment = opened(so.Quantized(), "first", rows=32, dim=256)
        moved(moment, torch.arange(32), values, SUM, sizes=sizes)
        estimates.append(moment.estimate(torch.arange(32)))
    assert torch.equal(*estimates)


@pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("kind", ["Adam", "Adagrad", "RMSprop", "SGD"])
def test_training_follows_exact_moments(kind, is_sparse):
    options = {"momentum": 0.9} if kind == "SGD" else {}
    ends = []
    for memory in ("8-bit", "exact"):
        generator = torch.Generator().manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(40, 256, generator=generator))
        start = parameter.detach().clone()
        group = {"params": [parameter], "memory": memory}
        optimizer = getattr(so, kind)([group], lr=0.01, **options)
        for _ in range(20):
            gradient = torch.randn(40, 256, generator=generator) + 0.5
            ids = torch.arange(0, 40, 3)
            parameter.grad = sparse(ids, gradient[ids], (40, 256)) if is_sparse else gradient
            optimizer.step()
        ends.append(parameter.detach() - start)
    assert (ends[0] - ends[1]).norm() <= 0.02 * ends[1].norm()


def test_a_step_makes_no_copy_of_the_parameter():
    parameter = torch.nn.Parameter(torch.zeros(4000, 512))
    optimizer = so.Adam([{"params": [parameter], "memory": "8-bit"}])
    parameter.grad = torch.ones(4000, 512)
    optimizer.step()
    with torch.profiler.profile(profile_memory=True) as profile:
        optimizer.step()
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest < parameter.nbytes / 2


def test_codes_go_through_a_checkpoint_as_they_are():
    parameter = torch.nn.Parameter(torch.zeros(40, 256))
    optimizer = so.Adam([{"params": [parameter], "memory": "8-bit"}])
    parameter.grad = torch.randn(40, 256, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    loaded = so.Adam([{"params": [parameter], "memory": "8-bit"}])
    loaded.load_state_dict(optimizer.state_dict())
    for key, tensor in optimizer.state[parameter].items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(loaded.state[parameter][key], tensor)
            assert loaded.state[parameter][key].dtype == tensor.dtype


@pytest.mark.parametrize("options", [{"bits": 4}, {"block": 32}, {"block": 2**17}])
def test_sizes_that_do_not_exist_are_refused(options):
    with pytest.raises(ValueError, match=f"^{next(iter(options))} must be"):
        so.Quantized(**options)
