"""Rows of a gradient: unique, ascending, summed, in chunks; the gradient stays as it is."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from sketchoptim import _rows
from sketchoptim._rows import Rows

ROW_SHAPES = [(), (1,), (4,), (2, 3), (2, 1, 3)]
every_row_shape = pytest.mark.parametrize("row_shape", ROW_SHAPES)


def sparse(
    ids: list[int], values: Tensor, count: int = 50, *, is_coalesced: bool = False
) -> Tensor:
    """A gradient of a parameter of `count` rows."""
    return torch.sparse_coo_tensor(
        torch.tensor([ids], dtype=torch.int64),
        values,
        (count, *values.shape[1:]),
        is_coalesced=is_coalesced,
        check_invariants=True,
    )


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def summed_in_order(ids: list[int], values: Tensor) -> dict[int, Tensor]:
    """Each id's sum, one addition after the other."""
    sums: dict[int, Tensor] = {}
    for row_id, value in zip(ids, values, strict=True):
        sums[row_id] = sums.get(row_id, torch.zeros_like(value)) + value
    return sums


def covered(found: Rows) -> tuple[list[int], list[int], Tensor]:
    """The ids of all chunks, the rows they address, and their gradients, one after the other."""
    ids: list[int] = []
    addressed: list[int] = []
    everything = torch.arange(1000)
    gradients = [torch.zeros(0, found.dim)]
    for chunk in found.chunks():
        ids += chunk.ids.tolist()
        addressed += everything[chunk.at].tolist()
        gradients.append(chunk.gradient)
    return ids, addressed, torch.cat(gradients)


# -- sparse --------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 49), max_size=30), st.sampled_from(ROW_SHAPES), st.integers(0, 2**32)
)
def test_an_uncoalesced_gradient_gives_what_coalescing_gives(ids, row_shape, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-99, 99, (len(ids), *row_shape), generator=generator).float()
    gradient = sparse(ids, values)
    found, expected = _rows.of_gradient(gradient), gradient.coalesce()
    assert torch.equal(found.ids, expected.indices()[0])
    assert torch.equal(found.values, expected.values())


@every_row_shape
def test_duplicates_are_summed_in_their_order(row_shape):
    ids = torch.randint(20, (3000,), generator=torch.Generator().manual_seed(1)).tolist()
    values = randn(3000, *row_shape)
    found = _rows.of_gradient(sparse(ids, values))
    expected = summed_in_order(ids, values)
    assert found.ids.tolist() == sorted(expected)
    assert torch.equal(found.values, torch.stack([expected[i] for i in sorted(expected)]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_duplicates_are_summed_in_float32(dtype):
    ids = [7] * 4000 + [3] * 4000
    values = torch.full((8000, 2), 1.0, dtype=dtype)  # in half precision, sums stick at 256 or 2048
    found = _rows.of_gradient(sparse(ids, values))
    assert found.values.dtype == torch.float32
    assert found.values.tolist() == [[4000.0, 4000.0]] * 2


def test_float64_duplicates_are_summed_in_float64():
    values = torch.tensor([[1.0], [1e-12]], dtype=torch.float64)
    assert _rows.of_gradient(sparse([7, 7], values)).values.item() == 1 + 1e-12


@pytest.mark.parametrize("chunk_elements", [1, 5, 64])
def test_sums_do_not_depend_on_the_size_of_a_chunk(chunk_elements, monkeypatch):
    ids = torch.randint(20, (500,), generator=torch.Generator().manual_seed(1))
    values = randn(500, 3, dtype=torch.bfloat16)
    whole = _rows.unique_sums(ids, values)
    monkeypatch.setattr(_rows, "CHUNK_ELEMENTS", chunk_elements)
    for part, expected in zip(_rows.unique_sums(ids, values), whole, strict=True):
        assert torch.equal(part, expected)


def test_sums_do_not_depend_on_the_number_of_threads():
    ids = torch.randint(5000, (100_000,), generator=torch.Generator().manual_seed(1))
    values = randn(100_000, 8)
    before = torch.get_num_threads()
    try:
        sums = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            sums.append(_rows.unique_sums(ids, values)[1])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])


@every_row_shape
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_coalesced_gradient_is_not_copied(row_shape, dtype):
    gradient = sparse([3, 8, 20], randn(3, *row_shape, dtype=dtype), is_coalesced=True)
    found = _rows.of_gradient(gradient)
    assert found.values.data_ptr() == gradient._values().data_ptr()
    assert found.ids.data_ptr() == gradient._indices().data_ptr()


@pytest.mark.parametrize("ids", [[3, 3, 1], [20, 8, 3], [3, 3, 8]])
def test_a_gradient_that_is_coalesced_by_its_flag_alone_is_summed_all_the_same(ids):
    values = randn(3, 2)
    found = _rows.of_gradient(sparse(ids, values)._coalesced_(True))
    expected = _rows.of_gradient(sparse(ids, values))
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.values, expected.values)
    assert found.ids.tolist() == sorted(set(ids))


@every_row_shape
@pytest.mark.parametrize("is_coalesced", [True, False])
def test_a_sparse_gradient_without_entries_has_no_rows(row_shape, is_coalesced):
    gradient = sparse([], torch.zeros(0, *row_shape), is_coalesced=is_coalesced)
    found = _rows.of_gradient(gradient)
    assert len(found) == 0
    assert list(found.chunks()) == []
    assert found.values.shape == (0, *row_shape)


@pytest.mark.parametrize("is_coalesced", [True, False])
@every_row_shape
def test_chunks_flatten_the_rows_of_a_sparse_gradient(row_shape, is_coalesced):
    values = randn(3, *row_shape)
    found = _rows.of_gradient(sparse([3, 8, 20], values, is_coalesced=is_coalesced))
    ids, addressed, gradients = covered(found)
    assert ids == addressed == [3, 8, 20]
    assert found.dim == math.prod(row_shape)
    assert torch.equal(gradients, values.reshape(3, -1))


@pytest.mark.parametrize("is_coalesced", [True, False])
def test_a_sparse_gradient_stays_as_it_is(is_coalesced):
    ids, values = [2, 5, 9] if is_coalesced else [5, 2, 5], randn(3, 4)
    gradient = sparse(ids, values.clone(), is_coalesced=is_coalesced)
    for chunk in _rows.of_gradient(gradient).chunks():
        assert chunk.gradient.numel()
    assert gradient.is_coalesced() == is_coalesced
    assert gradient._indices().tolist() == [ids]
    assert torch.equal(gradient._values(), values)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("padding", [None, 0])
def test_an_embedding_over_several_backward_passes_gives_its_dense_gradient(passes, padding):
    tables = [
        nn.Embedding(30, 4, padding_idx=padding, sparse=is_sparse) for is_sparse in (True, False)
    ]
    generator = torch.Generator().manual_seed(0)
    for _ in range(passes):
        ids = torch.randint(12, (5, 7), generator=generator)
        weights = torch.randint(-9, 9, (5, 7, 4), generator=generator).float()
        for table in tables:
            (table(ids) * weights).sum().backward()
    sparse_gradient, dense_gradient = (table.weight.grad for table in tables)
    found = _rows.of_gradient(sparse_gradient)
    assert torch.equal(found.ids, found.ids.unique())
    rebuilt = torch.zeros(30, 4).index_copy(0, found.ids, found.values)
    assert torch.equal(rebuilt, dense_gradient)


def test_a_batch_of_padding_alone_has_rows_of_zero_at_most():
    table = nn.Embedding(30, 4, padding_idx=0, sparse=True)
    table(torch.zeros(5, dtype=torch.int64)).sum().backward()
    assert not _rows.of_gradient(table.weight.grad).values.any()


def test_an_embedding_bag_in_half_precision_gives_rows_in_float32():
    table = nn.EmbeddingBag(30, 4, mode="sum", sparse=True, dtype=torch.bfloat16)
    table(torch.tensor([[1, 2, 2], [2, 9, 9]])).sum().backward()
    ids, _, gradients = covered(_rows.of_gradient(table.weight.grad))
    assert ids == [1, 2, 9]
    assert gradients.dtype == torch.float32
    assert gradients[:, 0].tolist() == [1.0, 3.0, 2.0]


# -- dense ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_elements", [1, 7, 12, 1 << 17])
@pytest.mark.parametrize("row_shape", [(), (1,), (4,), (2, 3)])
def test_chunks_of_a_dense_gradient_cover_every_row_once(row_shape, chunk_elements, monkeypatch):
    monkeypatch.setattr(_rows, "CHUNK_ELEMENTS", chunk_elements)
    gradient = randn(10, *row_shape)
    ids, addressed, gradients = covered(_rows.of_gradient(gradient))
    assert ids == addressed == list(range(10))
    assert torch.equal(gradients, gradient.reshape(10, -1))


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 50), st.booleans())
def test_a_chunk_holds_a_row_or_as_many_as_fit(count, dim, chunk_elements, is_dense):
    values = torch.zeros(count, dim)
    gradient = values if is_dense else sparse([*range(count)], values, is_coalesced=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_rows, "CHUNK_ELEMENTS", chunk_elements)
        sizes = [chunk.gradient.shape[0] for chunk in _rows.of_gradient(gradient).chunks()]
    fitting = max(1, chunk_elements // dim)
    assert sum(sizes) == count
    assert set(sizes[:-1]) <= {fitting}
    assert sizes[-1] <= fitting


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_dense_gradient_is_not_copied(dtype):
    gradient = randn(10, 2, 3, dtype=dtype)
    found = _rows.of_gradient(gradient)
    assert found.ids is None
    assert found.values.data_ptr() == gradient.data_ptr()
    (chunk,) = found.chunks()
    assert chunk.gradient.data_ptr() == gradient.data_ptr()


@pytest.mark.parametrize(
    ("dtype", "arithmetic"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_arithmetic_is_done_in_float32_at_least(dtype, arithmetic):
    for gradient in (randn(5, 3, dtype=dtype), sparse([1, 4], randn(2, 3, dtype=dtype))):
        (chunk,) = _rows.of_gradient(gradient).chunks()
        assert chunk.gradient.dtype == arithmetic
    assert _rows.arithmetic_dtype(dtype) == arithmetic


def test_a_dense_half_precision_gradient_is_widened_chunk_by_chunk():
    gradient = randn(10, 4, dtype=torch.bfloat16)
    found = _rows.of_gradient(gradient)
    assert found.values.data_ptr() == gradient.data_ptr()
    assert torch.equal(covered(found)[2], gradient.float())


def test_a_gradient_that_is_not_contiguous_gives_its_rows():
    gradient = randn(4, 10).t()
    assert torch.equal(covered(_rows.of_gradient(gradient))[2], gradient)


def test_a_scalar_is_one_row_of_one_element():
    found = _rows.of_gradient(torch.tensor(3.0))
    assert (len(found), found.dim, found.ids) == (1, 1, None)
    ids, addressed, gradients = covered(found)
    assert ids == addressed == [0]
    assert gradients.tolist() == [[3.0]]


def test_a_vector_has_rows_of_one_element():
    found = _rows.of_gradient(torch.tensor([1.0, 2.0]))
    assert (len(found), found.dim) == (2, 1)
    assert covered(found)[2].tolist() == [[1.0], [2.0]]


@pytest.mark.parametrize("shape", [(0, 4), (0,)])
def test_a_dense_gradient_without_rows_has_no_chunks(shape):
    assert list(_rows.of_gradient(torch.zeros(shape)).chunks()) == []


def test_a_dense_gradient_without_columns_still_has_its_rows():
    found = _rows.of_gradient(torch.zeros(5, 0))
    assert covered(found)[0] == [0, 1, 2, 3, 4]


def test_a_dense_gradient_stays_as_it_is():
    gradient = randn(10, 4)
    before = gradient.clone()
    for chunk in _rows.of_gradient(gradient).chunks():
        assert chunk.gradient.numel()
    assert torch.equal(gradient, before)
