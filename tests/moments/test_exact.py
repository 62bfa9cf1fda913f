"""Exact storage, by element and by row: only touched rows move."""

import pytest
import torch
from moment_runs import ADAM, moved, opened, random_rows

import sketchoptim as so
from sketchoptim.moments import Average


@pytest.mark.parametrize("storage", [so.Exact(), so.RowWise()], ids=["exact", "row-wise"])
def test_rows_without_a_gradient_stay_as_they_are(storage):
    moment, generator = opened(storage), torch.Generator().manual_seed(0)
    (part,) = moment.tensors
    for step in range(1, 20):
        before = moment.tensors[part].clone()
        ids, values = random_rows(generator)
        moved(moment, ids, values + 1, ADAM, step=step)
        changed = (moment.tensors[part] != before).reshape(40, -1).any(1)
        assert torch.equal(changed.nonzero().flatten(), ids)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_exact_storage_has_the_parameters_dtype_and_row_wise_storage_float32(dtype):
    assert opened(so.Exact(), dtype=dtype).tensors["values"].dtype == dtype
    assert opened(so.RowWise(), dtype=dtype).tensors["rows"].dtype == torch.float32


def test_row_wise_storage_keeps_the_mean_over_a_row():
    moment = opened(so.RowWise())
    values = torch.tensor([[1.0, 2.0, 6.0]])
    estimate = moved(moment, torch.tensor([4]), values, Average(1.0, 1.0))
    assert estimate.tolist() == [[3.0]]
    assert moment.tensors["rows"][4] == 3.0
