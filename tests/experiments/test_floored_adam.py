import pytest
import torch

import sketchoptim as so
from experiments.floored_adam import FlooredAdam


def steps(optimizer, table, count=3):
    for step in range(count):
        optimizer.zero_grad()
        ids = torch.tensor([step, step, 7])
        table(ids).square().sum().backward()
        optimizer.step()


def table():
    torch.manual_seed(0)
    return torch.nn.Embedding(20, 4, sparse=True)


def floored(table, **options):
    return FlooredAdam([{"params": [("table", table.weight)]}], lr=0.1, **options)


def test_without_a_floor_it_is_adam():
    ours, plain = table(), table()
    steps(floored(ours), ours)
    steps(so.Adam([("table", plain.weight)], lr=0.1), plain)
    assert torch.equal(ours.weight, plain.weight)


@pytest.mark.parametrize("over", ["table", "touched"])
@pytest.mark.parametrize("is_maximum", [False, True])
@pytest.mark.filterwarnings("ignore:.*stepped by the reference")
def test_a_floor_makes_the_steps_of_rows_smaller(over, is_maximum):
    start, without, low, high = table(), table(), table(), table()
    for one, floor in ((without, 0.0), (low, 30.0), (high, 300.0)):
        optimizer = floored(one, floor=floor, over=over, is_maximum=is_maximum)
        steps(optimizer, one, count=1)
    moved = [(one.weight - start.weight).norm() for one in (without, low, high)]
    assert moved[0] > moved[1] > moved[2] > 0


@pytest.mark.filterwarnings("ignore:.*stepped by the reference")
def test_no_row_takes_a_larger_step_than_the_largest():
    start, without, limited = table(), table(), table()
    steps(floored(without), without)
    steps(floored(limited, largest_step=0.5), limited)
    sizes = [(one.weight - start.weight).square().mean(1).sqrt() for one in (without, limited)]
    touched = torch.tensor([3.0, *[1.0] * 3])  # row 7 in each step, rows 0 to 2 once
    assert torch.allclose(sizes[1][[7, 0, 1, 2]], 0.5 * 0.1 * touched, rtol=1e-3)
    assert (sizes[0] >= sizes[1]).all()


def test_a_restored_run_has_the_same_floors():
    whole, half = table(), table()
    optimizer, first = floored(whole, floor=1.0), floored(half, floor=1.0)
    steps(optimizer, whole, count=2)
    steps(first, half, count=1)
    second = floored(half, floor=1.0)
    second.load_state_dict(first.state_dict())
    second.zero_grad()
    half(torch.tensor([1, 1, 7])).square().sum().backward()
    second.step()
    assert second.means == pytest.approx(optimizer.means)
    assert torch.equal(whole.weight, half.weight)
