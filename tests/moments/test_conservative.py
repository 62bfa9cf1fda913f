"""A second moment in a conservative sketch."""

import backends
import pytest
import torch
from gradients import STREAMS, sparse, start
from moment_runs import ADAGRAD, ADAM, by_element, by_row, moved, opened, random_rows
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sketchoptim as so
from sketchoptim import _rows
from sketchoptim.moments import Average


@pytest.mark.parametrize("average", [Average(0.99, 1 - 0.99), ADAGRAD], ids=["adam", "adagrad"])
@pytest.mark.parametrize("storage", [by_row, by_element], ids=["row", "element"])
def test_a_conservative_estimate_is_never_below_the_truth(storage, average):
    moment, generator = opened(storage(conservative=True)), torch.Generator().manual_seed(0)
    truth = torch.zeros(40, 3, dtype=torch.float64)
    for step in range(1, 500):
        ids, values = random_rows(generator)
        exact = values.double()
        if storage is by_row:
            exact = exact.mean(1, keepdim=True).expand(-1, 3)
        truth *= average.decay
        truth[ids] += average.weight * exact
        estimates = moved(moment, ids, values, average, step=step).double()
        assert (estimates >= truth[ids] * (1 - 1e-4)).all()
    assert (estimates > truth[ids] * 1.05).any()  # rows did collide


def test_a_folded_conservative_table_is_still_never_below_the_truth():
    moment = opened(by_row(conservative=True, fold_at=(50, 100)))
    truth, generator = torch.zeros(40, dtype=torch.float64), torch.Generator().manual_seed(6)
    for step in range(1, 200):
        ids, values = random_rows(generator)
        truth *= ADAM.decay
        truth[ids] += ADAM.weight * values.double().mean(1)
        estimates = moved(moment, ids, values, ADAM, step=step).squeeze(1)
        assert (estimates >= truth[ids] * (1 - 1e-5)).all()
    assert moment.sketch.width == 2


@pytest.mark.parametrize("storage", [by_row, by_element], ids=["row", "element"])
def test_a_conservative_estimate_is_never_above_the_plain_one(storage):
    conservative, plain = opened(storage(conservative=True)), opened(storage())
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 300):
        ids, values = random_rows(generator)
        low, high = (moved(each, ids, values, ADAM, step=step) for each in (conservative, plain))
        assert (low <= high * (1 + 1e-4)).all()
    assert (low < high * 0.95).any()


@pytest.mark.parametrize("storage", [by_row, by_element], ids=["row", "element"])
def test_a_conservative_step_does_not_depend_on_the_order_of_rows(storage):
    ascending, shuffled = (opened(storage(conservative=True)) for _ in range(2))
    generator = torch.Generator().manual_seed(2)
    for step in range(1, 30):
        ids, values = random_rows(generator)
        order = torch.randperm(len(ids), generator=generator)
        expected = moved(ascending, ids, values, ADAM, step=step)
        found = moved(shuffled, ids[order], values[order], ADAM, step=step)
        assert torch.equal(found, expected[order])
        assert torch.equal(shuffled.sketch.counters, ascending.sketch.counters)


@pytest.mark.parametrize("storage", [by_row, by_element], ids=["row", "element"])
def test_more_targets_than_counters_wait_in_a_copy_of_the_table(storage):
    """Whether targets wait in a list or in a copy, the table ends with the same bits."""
    generator = torch.Generator().manual_seed(3)
    ids, values = random_rows(generator)
    ends = []
    for touched in (0, 10_000):
        moment = opened(storage(conservative=True))
        for _ in range(3):
            moment.begin_(ADAM, touched=touched)
            assert (moment._raised is None) == (touched == 0)
            for part in range(len(ids)):
                moment.update_(ids[part : part + 1], values[part : part + 1])
            moment.end_()
        ends.append(moment.sketch.counters)
    assert torch.equal(*ends)


class LargestAllocation(TorchDispatchMode):
    """The elements of the largest storage that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given_storages = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor) and not leaf.is_sparse
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_sparse:
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in given_storages:
                    self.elements = max(self.elements, storage.nbytes() // leaf.element_size())
        return result


@pytest.mark.parametrize("kind", STREAMS)
def test_a_step_of_lean_allocates_nothing_with_an_entry_for_each_row(kind, monkeypatch):
    shape = (6_000, 4)
    monkeypatch.setattr(_rows, "CHUNK_ELEMENTS", 1 << 10)
    parameter = torch.nn.Parameter(start(shape))
    optimizer = so.Adam([{"params": [parameter], "memory": "lean-0.1"}])
    generator = torch.Generator().manual_seed(4)
    for _ in range(2):
        parameter.grad = torch.randn(shape, generator=generator)
        if kind == "sparse":
            ids = torch.randperm(shape[0], generator=generator)[:500].clone()
            parameter.grad = sparse(ids, parameter.grad[ids], shape)
        with backends.stepping_by(None), LargestAllocation() as largest:
            optimizer.step()
        assert 0 < largest.elements < shape[0]
