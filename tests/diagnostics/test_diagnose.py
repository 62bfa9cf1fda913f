"""What `diagnose` sees of optimizers and tensors."""

from contextlib import nullcontext

import pytest
import tiny_runs
import torch
from tiny_runs import PLANS, Run, batches, differences
from torch import nn

import sketchoptim as so
from sketchoptim.diagnostics import estimate_error, power_law

ROWS, DIM = 2_000, 8


def trained(memory, *, steps=3, touched=300, kind=so.Adam, exponent=1.0, **options):
    """An optimizer of one table after some steps over Zipf-distributed rows."""
    table = nn.Embedding(ROWS, DIM, sparse=True)
    generator = torch.Generator().manual_seed(0)
    optimizer = kind([("table", table.weight)], memory=memory, **options)
    frequencies = torch.arange(1, ROWS + 1, dtype=torch.float64) ** -exponent
    for _ in range(steps):
        optimizer.zero_grad()
        ids = torch.multinomial(frequencies, touched, replacement=True, generator=generator)
        (table(ids) * torch.randn(touched, DIM, generator=generator)).sum().backward()
        optimizer.step()
    return optimizer, table.weight


def found_in(optimizer, quantity, **options):
    (found,) = (it for it in so.diagnose(optimizer, **options).findings if it.quantity == quantity)
    return found


@tiny_runs.each(PLANS)
def test_every_plan_is_diagnosed_and_nothing_changes(plan):
    run = Run.start(plan).train(batches(3))
    before = run.bits()
    first = so.diagnose(run.optimizer)
    again = so.diagnose(run.optimizer, since=first)
    assert differences(before, run.bits()) == []
    quantities = {found.quantity for found in first.findings}
    assert {"gradient"} <= quantities <= {"gradient", *run.optimizer.moment_names}
    for found in again.findings:
        assert 0 <= found.power_law.row_midpoint <= 0.5 + 1e-6
        assert found.top_kept in (1.0, None)
        assert all(isinstance(value, float) for value in found.scalars().values())
    lines = str(again).splitlines()
    assert len(lines) == len(again.findings) + 1


def test_a_tensor_is_diagnosed_by_its_power_law():
    tensor = torch.rand(50, 4, generator=torch.Generator().manual_seed(0))
    (found,) = so.diagnose(tensor).findings
    assert found.power_law == power_law(tensor)
    assert found.error is found.load is found.top_kept is None


def test_the_load_is_that_of_the_rows_of_the_gradient():
    optimizer, weight = trained("paper-mv")
    width = optimizer.state[weight]["second_counters"].shape[1]
    touched = weight.grad.coalesce().indices().shape[1]
    assert found_in(optimizer, "second").load == touched / width
    weight.grad = torch.zeros(ROWS, DIM)
    assert found_in(optimizer, "second").load == ROWS / width
    optimizer.zero_grad()
    assert found_in(optimizer, "second").load is None


@pytest.mark.parametrize(("beta", "is_overflowing"), [(0.9, True), (0.99, False)])
def test_a_first_moment_above_its_limit_is_reported_as_overflowing(beta, is_overflowing):
    narrow = so.Sketched(width=4, granularity="element")
    warned = pytest.warns(UserWarning, match="active rows") if is_overflowing else nullcontext()
    with warned:
        optimizer, _ = trained(so.Memory(narrow, narrow), betas=(beta, 0.999))
    found = found_in(optimizer, "first")
    assert found.limit == pytest.approx(2 / (1 - beta))
    assert found.is_overflowing is is_overflowing
    assert ("load above" in str(so.diagnose(optimizer))) is is_overflowing
    assert found_in(optimizer, "second").limit is None


@pytest.mark.parametrize(
    ("ratio", "exponent", "verdict"),
    [
        (1 / 8, 1.0, "fine"),
        (1 / 8, 0.0, "too narrow: error above 1"),  # all rows are alike, and share counters
        (4, 1.0, "wide"),
    ],
)
def test_the_verdict_depends_on_the_width_and_on_the_spread_of_the_rows(ratio, exponent, verdict):
    memory = so.Memory(second=so.Sketched(ratio=ratio, conservative=True))
    optimizer, _ = trained(memory, steps=20, exponent=exponent)
    assert found_in(optimizer, "second").verdict == verdict
    assert found_in(optimizer, "gradient").verdict == ""
    assert str(so.diagnose(optimizer)).splitlines()[-1].endswith(f"  {verdict}")


@pytest.mark.parametrize("memory", ["lean-0.1", "paper-v-only"])
def test_the_error_is_what_the_sketch_says_of_itself(memory):
    optimizer, weight = trained(memory)
    state = optimizer.state[weight]
    sketch = so.CountMinSketch.over(
        conservative=memory == "lean-0.1",
        counters=state["second_counters"],
        scale=state["second_scale"],
        words=state["second_words"],
        writes=None,
    )
    assert found_in(optimizer, "second").error == estimate_error(sketch, ROWS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_buckets_that_hold_only_their_start_are_not_occupied(dtype):
    one = so.Sketched(width=512, dtype=dtype, clean_every=2, clean_by=0.3)
    options = {"kind": so.Adagrad, "initial_accumulator_value": 0.1, "touched": 40}
    optimizer, weight = trained(so.Memory(second=one), **options)
    found = found_in(optimizer, "second")
    last = weight.grad.coalesce().indices().shape[1]
    assert last / 512 / 2 < found.occupied < 3 * 40 / 512


def test_the_heaviest_rows_are_compared_with_an_earlier_diagnosis():
    optimizer, weight = trained("exact", steps=1)
    first = so.diagnose(optimizer)
    assert all(found.top_kept is None for found in first.findings)
    top = found_in(optimizer, "second").power_law.top_rows
    optimizer.state[weight]["second_values"][list(top[:25])] = 0.0
    optimizer.state[weight]["second_values"][ROWS - 25 :] = 1.0
    assert found_in(optimizer, "second", since=first).top_kept == pytest.approx(0.75)


def test_midpoints_of_moments_are_those_of_their_estimates():
    optimizer, weight = trained("exact")
    values = optimizer.state[weight]["second_values"]
    assert found_in(optimizer, "second").power_law == power_law(values)
    assert found_in(optimizer, "gradient").power_law == power_law(weight.grad)
    assert found_in(optimizer, "second").kept == "exact"


def test_nothing_of_the_size_of_the_parameter_is_made():
    weight = nn.Parameter(torch.zeros(100_000, 32))
    optimizer = so.Adam([weight], memory="paper-v-only")
    weight.grad = torch.sparse_coo_tensor(
        torch.arange(50).unsqueeze(0), torch.ones(50, 32), weight.shape, check_invariants=True
    )
    optimizer.step()
    with torch.profiler.profile(profile_memory=True) as profile:
        so.diagnose(optimizer)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest < weight.nbytes / 4


@pytest.mark.parametrize("shape", [(0, 3), (4, 0)])
def test_a_parameter_without_elements_is_left_out(shape):
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = so.Adam([{"params": [weight], "memory": "lean-0.1"}])
    weight.grad = torch.zeros(shape)
    optimizer.step()
    assert so.diagnose(optimizer).findings == ()


def test_before_the_first_step_there_are_no_moments():
    optimizer = so.Adam(nn.Embedding(10, 2, sparse=True).parameters())
    assert so.diagnose(optimizer).findings == ()


def test_another_thing_is_refused():
    with pytest.raises(TypeError, match="subject must be an optimizer of sketchoptim or a tensor"):
        so.diagnose(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
