"""A sketch as an object: what it takes, what it gives back, how it prints and copies."""

import copy
import pickle

import numpy as np
import pytest
import torch
from sketch_cases import (
    Size,
    build,
    every_kind,
    over,
)

import sketchoptim as so
from sketchoptim import _hashing, _sketch


@pytest.mark.parametrize("depth", range(1, 9))
def test_the_median_of_an_even_depth_is_the_mean_of_the_middle_two(depth):
    generator = torch.Generator().manual_seed(depth)
    readings = torch.randn(depth, 50, 3, generator=generator)
    expected = np.median(readings.numpy(), axis=0)
    assert np.array_equal(_sketch.median(readings).numpy(), expected)


@every_kind
def test_an_empty_sketch_estimates_zero(kind):
    found = build(kind, Size(3, 8, 2)).query(torch.tensor([0, 5, _hashing.MAX_ID]))
    assert torch.equal(found, torch.zeros(3, 2))
    assert found.dtype == torch.float32


@every_kind
def test_no_ids_add_nothing_and_give_no_estimates(kind):
    none = torch.zeros(0, dtype=torch.int64)
    found = build(kind, Size(3, 8, 2)).add_(none, torch.zeros(0, 2))
    assert not found.counters.any()
    assert found.query(none).shape == (0, 2)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64])
def test_values_of_any_real_dtype_are_added_as_float32(kind, dtype):
    values = torch.tensor([[3.0], [5.0]])
    found = build(kind, Size(3, 64, 1)).add_(torch.arange(2), values.to(dtype))
    assert torch.equal(
        found.counters, build(kind, Size(3, 64, 1)).add_(torch.arange(2), values).counters
    )


@every_kind
def test_int32_ids_are_the_same_ids(kind):
    ids, values = torch.tensor([7, 2**31 - 1]), torch.ones(2, 1)
    wide, narrow = (build(kind, Size(3, 64, 1)) for _ in range(2))
    assert torch.equal(wide.add_(ids, values).counters, narrow.add_(ids.int(), values).counters)
    assert torch.equal(wide.query(ids), narrow.query(ids.int()))


@every_kind
def test_the_input_of_a_sketch_stays_as_it_is(kind):
    ids, values = torch.tensor([5, 3, 5]), torch.tensor([[1.0], [2.0], [4.0]])
    found = build(kind, Size(3, 64, 1)).scale_(0.5).add_(ids, values)
    found.query(ids).fill_(99.0)
    assert ids.tolist() == [5, 3, 5]
    assert values.tolist() == [[1.0], [2.0], [4.0]]
    assert found.query(ids).tolist() == [[5.0], [2.0], [5.0]]


@every_kind
def test_a_sketch_of_values_with_a_graph_has_none_itself(kind):
    values = torch.ones(2, 1, requires_grad=True)
    found = build(kind, Size(3, 64, 1)).add_(torch.arange(2), values * 2)
    assert not found.counters.requires_grad
    assert found.query(torch.arange(2)).tolist() == [[2.0], [2.0]]


@every_kind
def test_the_seed_chooses_the_hash(kind):
    ids, values = torch.arange(20), torch.ones(20, 1)
    counters = [build(kind, Size(3, 64, 1), seed).add_(ids, values).counters for seed in (0, 0, 1)]
    assert torch.equal(counters[0], counters[1])
    assert not torch.equal(counters[0], counters[2])


@every_kind
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_nbytes_are_those_of_the_counters(kind, dtype, size):
    assert build(kind, Size(3, 100, 7), dtype=dtype).nbytes == 3 * 100 * 7 * size


def test_a_sketch_prints_its_kind_and_size():
    assert repr(so.CountSketch(3, 100, 7)) == (
        "CountSketch(depth=3, width=100, dim=7, dtype=torch.float32, nbytes=8,400)"
    )
    assert repr(so.CountMinSketch(2, 4, 1, dtype=torch.bfloat16)) == (
        "CountMinSketch(depth=2, width=4, dim=1, dtype=torch.bfloat16, nbytes=16)"
    )


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_is_a_sketch_of_its_own(kind, dtype, duplicate):
    generator = torch.Generator().manual_seed(0)
    ids, values = torch.arange(9), torch.rand(9, 2, generator=generator)
    original = build(kind, Size(3, 8, 2), seed=4, dtype=dtype).add_(ids, values).scale_(0.3)
    before = {name: tensor.clone() for name, tensor in original.tensors().items()}
    twin = duplicate(original).add_(ids, values).scale_(0.5)
    for name, tensor in original.tensors().items():
        assert torch.equal(tensor, before[name])
    original.add_(ids, values).scale_(0.5)
    for name, tensor in original.tensors().items():
        assert torch.equal(tensor, twin.tensors()[name])


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sketch_over_the_tensors_of_another_shares_them(kind, dtype):
    original = build(kind, Size(3, 8, 2), dtype=dtype)
    view = over(kind, original.tensors())
    view.add_(torch.arange(5), torch.ones(5, 2)).scale_(0.5)
    assert torch.equal(original.query(torch.arange(5)), view.query(torch.arange(5)))
    assert original.counters.any()


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sketch_does_not_depend_on_the_default_dtype(kind, dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = build(kind, Size(3, 8, 2), dtype=dtype).add_(torch.arange(9), torch.ones(9, 2))
        estimates = found.scale_(0.3).query(torch.arange(9))
    finally:
        torch.set_default_dtype(before)
    expected = build(kind, Size(3, 8, 2), dtype=dtype).add_(torch.arange(9), torch.ones(9, 2))
    assert estimates.dtype == torch.float32
    assert torch.equal(estimates, expected.scale_(0.3).query(torch.arange(9)))
    for name, tensor in expected.tensors().items():
        assert found.tensors()[name].dtype == tensor.dtype


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_as_a_number_stays_on_the_cpu(kind, dtype):
    with torch.device("meta"):
        found = build(kind, Size(3, 8, 2), dtype=dtype)
    devices = {name: tensor.device.type for name, tensor in found.tensors().items()}
    expected = {"counters": "meta", "scale": "cpu", "words": "meta", "writes": "cpu"}
    assert devices == {name: expected[name] for name in found.tensors()}
