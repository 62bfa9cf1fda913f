"""A factor for each column over a moment by row."""

import pytest
import torch
from gradients import STREAMS, start
from hash_specification import mix
from moment_runs import ADAGRAD, ADAM, moved, opened
from torch import nn

import sketchoptim as so
from sketchoptim._rows import Rows
from sketchoptim.moments import Average

ROWS, DIM = 40, 3
BY_ROW = so.RowWise(columns=True)
SKETCH = so.Sketched(width=512, conservative=True, columns=True)
IDS = torch.arange(ROWS)


def random_squares(seed: int, sizes: tuple[float, ...] = (100.0, 1.0, 0.01)) -> torch.Tensor:
    """Squares whose columns, and whose rows, differ in size."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(ROWS, 1, generator=generator).mul(12).exp()
    return torch.rand(ROWS, DIM, generator=generator) * torch.tensor(sizes) * rows


def give_shares(step: int) -> list[int]:
    """The rows whose squares the factors follow in a step."""
    return [row for row in range(ROWS) if (mix(row) + step) % 8 == 0]


def factors_after(values, average=ADAM, *, steps=1):
    moment = opened(BY_ROW)
    for _ in range(steps):
        moved(moment, IDS[: len(values)], values, average)
    return moment.factors()


def test_the_first_step_divides_by_the_mean_over_a_row_alone():
    values = random_squares(0)
    expected = (values.mean(1, keepdim=True) * ADAM.weight).expand(-1, DIM)
    torch.testing.assert_close(moved(opened(BY_ROW), IDS, values, ADAM), expected)


@pytest.mark.parametrize("average", [ADAM, ADAGRAD], ids=["Adam", "Adagrad"])
def test_after_one_step_the_factors_are_those_of_that_step(average):
    values = random_squares(0)
    giving = values[give_shares(1)]
    expected = (giving / giving.mean(1, keepdim=True)).mean(0)
    torch.testing.assert_close(factors_after(values, average), expected, rtol=1e-5, atol=1e-6)


def test_every_row_gives_its_shares_in_one_of_eight_steps():
    moment = opened(BY_ROW, dim=ROWS)
    given = []
    for step in range(1, 9):  # each row has all its mass in a column of its own
        moved(moment, IDS, torch.eye(ROWS), Average(0.0, 1.0), step=step)
        given += moment.columns.nonzero().flatten().tolist()
    assert sorted(given) == list(range(ROWS))


def test_a_row_weighs_alike_whatever_its_size():
    values = random_squares(0)
    sizes = torch.logspace(-8, 8, ROWS).unsqueeze(1)
    torch.testing.assert_close(factors_after(values * sizes), factors_after(values))


def test_the_factors_of_adagrad_are_means_over_all_steps_alike():
    moment = opened(BY_ROW)
    steps = [random_squares(seed, sizes) for seed, sizes in enumerate([(1, 2, 3), (9, 1, 1)])]
    means = []
    for step, values in enumerate(steps, start=1):
        moved(moment, IDS, values, ADAGRAD, step=step)
        giving = values[give_shares(step)]
        means.append((giving / giving.mean(1, keepdim=True)).mean(0))
    torch.testing.assert_close(moment.factors(), sum(means) / 2, rtol=1e-5, atol=1e-6)


def test_rows_and_steps_without_shares_leave_the_factors_as_they_are():
    values = random_squares(0)
    values[20:] = 0
    found = factors_after(values)
    assert found.min() < 1
    torch.testing.assert_close(found, factors_after(values[:20]), rtol=0, atol=0)
    moment = opened(BY_ROW)
    moved(moment, IDS, values * 0, ADAM)
    assert moment.factors().tolist() == [1.0] * DIM
    moved(moment, IDS, values, ADAM)
    before = moment.columns.clone()
    moved(moment, IDS, values * 0, ADAM)
    others = [row for row in range(ROWS) if row not in give_shares(1)]
    moved(moment, IDS[others], random_squares(1)[others], ADAM)
    assert torch.equal(moment.columns, before)


def test_a_column_of_zeros_has_the_least_factor_and_the_others_keep_their_mean():
    values = random_squares(0, (1.0, 1.0, 0.0))
    moment = opened(BY_ROW)
    for _ in range(2):
        estimates = moved(moment, IDS, values, ADAM)
    assert moment.factors()[2] == 2.0**-20
    assert moment.factors().mean() == pytest.approx(1)
    assert torch.isfinite(estimates).all()
    moved(moment, IDS, random_squares(1), ADAM)  # and may have mass later
    assert moment.factors()[2] > 2.0**-20


@pytest.mark.parametrize("storage", [BY_ROW, SKETCH], ids=["row-wise", "sketch"])
def test_squares_of_rank_one_are_estimated_exactly_once_the_factors_are_known(storage):
    rows, columns = torch.linspace(0.5, 2.0, ROWS), torch.tensor([2.5, 0.4, 0.1])
    values, sum_of_last = torch.outer(rows, columns), Average(0.0, 1.0)
    moment = opened(storage)
    moved(moment, IDS, values, sum_of_last)
    found = moved(moment, IDS, values, sum_of_last)
    torch.testing.assert_close(found, values, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(moment.estimate(IDS), values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("storage", [BY_ROW, SKETCH], ids=["row-wise", "sketch"])
def test_the_order_and_the_number_of_chunks_change_no_bit_of_the_factors(storage):
    found = []
    for sizes in ([ROWS], [1] * ROWS, [7, 30, 3]):
        moment = opened(storage)
        for seed in range(3):
            moved(moment, IDS, random_squares(seed), ADAM, sizes=sizes)
        found.append(moment.columns)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("storage", [BY_ROW, SKETCH], ids=["row-wise", "sketch"])
def test_a_whole_moment_of_rank_one_is_taken_over(storage):
    values = torch.outer(torch.linspace(0.5, 2.0, ROWS), torch.tensor([2.5, 0.4, 0.1]))
    moment = opened(storage)
    moment.load_(Rows(None, values), start=0.0)
    found = moment.estimate(IDS)
    assert (found >= values * (1 - 1e-5)).all()
    torch.testing.assert_close(found.median(0).values, values.median(0).values, rtol=0.1, atol=0)


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("name", ["Adam", "Adagrad", "RMSprop"])
def test_the_steps_of_columns_of_different_size_come_closer(name, kind):
    """A mean over a row keeps the ratio of a hundred, a factor for each column does not."""
    shape, spread = (20, 4), torch.tensor([10.0, 1.0, 1.0, 0.1])
    ratios = {}
    for columns in (False, True):
        memory = so.Memory(second=so.Sketched(ratio=8.0, conservative=True, columns=columns))
        weight = nn.Parameter(start(shape))
        optimizer = getattr(so, name)([{"params": [weight], "memory": memory}], lr=0.01)
        for gradient in STREAMS[kind](shape, 30):
            weight.grad = gradient * spread
            optimizer.step()
        moves = (weight.detach() - start(shape)).abs().mean(0)
        ratios[columns] = (moves.max() / moves.min()).item()
    assert ratios[True] < 0.15 * ratios[False]


def test_columns_are_an_option_of_sketches_by_row_alone():
    with pytest.raises(
        ValueError, match='columns=True needs granularity="row", got granularity="e'
    ):
        so.Sketched(granularity="element", columns=True)
    with pytest.raises(TypeError, match="columns"):
        so.RowWise(columns=1)


def test_a_factor_costs_four_bytes_a_column():
    weight = nn.Parameter(torch.zeros(3000, 50))
    weight.grad = torch.ones(3000, 50)
    sizes = {}
    for columns in (False, True):
        memory = so.Memory(second=so.Sketched(conservative=True, columns=columns))
        optimizer = so.Adam([{"params": [weight], "memory": memory}])
        optimizer.step()
        sizes[columns] = so.memory_report(optimizer).state_bytes
    assert sizes[True] == sizes[False] + 50 * 4
