"""The proved bounds, compared with sketches and training runs."""

import math

import gradients
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sketchoptim as so
from sketchoptim import theory

CONSTANTS = {
    "lr": 0.1,
    "eps": 1.0,
    "beta2": 0.99,
    "smoothness": 1.0,
    "largest_gradient": 1.0,
    "gradient_norm": 2.0,
    "variance": 0.5,
    "gap": 3.0,
    "steps": 1000,
    "rows": 500,
    "touched": 20,
    "depth": 3,
    "width": 50,
}

fractions = st.floats(1e-4, 0.9)
sizes = st.integers(1, 10**9)


@given(epsilon=fractions, delta=fractions, items=sizes, dim=st.integers(1, 4096))
def test_a_count_min_size_gives_the_guarantee_it_was_asked_for(epsilon, delta, items, dim):
    size = theory.count_min_size(epsilon=epsilon, delta=delta, items=items, dim=dim)
    found = theory.count_min_guarantee(depth=size.depth, width=size.width, items=items, dim=dim)
    assert found.epsilon <= epsilon * (1 + 1e-12)
    assert found.delta <= delta * (1 + 1e-12)


@given(epsilon=fractions, delta=fractions, items=sizes, dim=st.integers(1, 4096))
def test_no_smaller_count_min_sketch_would_do(epsilon, delta, items, dim):
    depth, width = theory.count_min_size(epsilon=epsilon, delta=delta, items=items, dim=dim)
    if width > 1:
        found = theory.count_min_guarantee(depth=depth, width=width - 1)
        assert found.epsilon > epsilon
    if depth > 1:
        found = theory.count_min_guarantee(depth=depth - 1, width=width, items=items, dim=dim)
        assert found.delta > delta


@given(epsilon=st.floats(0.01, 0.9), delta=fractions, items=sizes)
def test_a_count_sketch_size_bounds_the_misses_of_a_median(epsilon, delta, items):
    depth, width = theory.count_sketch_size(epsilon=epsilon, delta=delta, items=items)
    assert depth % 2 == 1
    miss = 1 / (width * epsilon**2)
    assert miss <= 1 / 8 * (1 + 1e-12)
    # the exact probability that at least half of the rows miss is below its Chernoff bound
    half = (depth + 1) // 2
    exact = sum(
        math.comb(depth, k) * miss**k * (1 - miss) ** (depth - k) for k in range(half, depth + 1)
    )
    assert items * exact <= delta


@pytest.mark.parametrize("kind", ["CountMinSketch", "CountSketch"])
def test_for_error_builds_the_size_that_theory_says(kind):
    size = {"CountMinSketch": theory.count_min_size, "CountSketch": theory.count_sketch_size}[kind]
    sketch = getattr(so, kind).for_error(0.1, 0.01, 1000, 4)
    assert (sketch.depth, sketch.width) == size(epsilon=0.1, delta=0.01, items=1000, dim=4)


def test_the_form_of_the_paper_can_underestimate():
    table = torch.nn.Parameter(torch.zeros(2, 1))
    paper = so.Sketched(width=1, granularity="element", decay="paper")
    optimizer = so.RMSprop([table], alpha=0.5, memory=so.Memory(second=paper))
    for row, gradient in ((0, 1.0), (1, 0.0)):
        table.grad = gradients.sparse(torch.tensor([row]), torch.tensor([[gradient]]), (2, 1))
        optimizer.step()
    # Row 0 has 0.5 and got no second gradient, but row 1, which has zero, halved their bucket.
    assert optimizer.state[table]["second_counters"].flatten().tolist() == [0.25] * 3


# A run whose constants are all known: f(x) is the sum over rows of p * sum of sqrt(1 + x^2) over
# the row's columns. Rows are drawn with probability p, the gradient of one is at most 1 in each
# column, and that of f is Lipschitz with the largest p.
ROWS, DIM, BATCH, WIDTH, START = 400, 2, 1024, 20, 2.0
RUN = {"lr": 2.0, "eps": 1.0}
SHARE = (1.0 / torch.arange(1, ROWS + 1)) / (1.0 / torch.arange(1, ROWS + 1)).sum()


def squared_gradients(*, conservative: bool, steps: int) -> list[float]:
    """The squared gradients of f along a run of RMSprop."""
    generator = torch.Generator().manual_seed(0)
    table = torch.nn.Parameter(torch.full((ROWS, DIM), START))
    sketch = so.Sketched(width=WIDTH, conservative=conservative)
    optimizer = so.RMSprop([table], **RUN, alpha=0.99, memory=so.Memory(second=sketch))
    found = []
    for _ in range(steps):
        slope = table.detach() / (1 + table.detach() ** 2).sqrt()
        found.append(float((SHARE.unsqueeze(1) * slope).square().sum()))
        ids = torch.multinomial(SHARE, BATCH, replacement=True, generator=generator)
        table.grad = gradients.sparse(ids, slope[ids] / BATCH, table.shape)
        optimizer.step()
    return found


def bound_of_run(*, conservative: bool, steps: int) -> theory.ConvergenceBound:
    return theory.convergence_bound(
        **RUN,
        beta2=0.99,
        smoothness=float(SHARE.max()),
        largest_gradient=1.0,
        gradient_norm=math.sqrt(DIM * float(SHARE.square().sum())),
        variance=DIM / BATCH,
        gap=DIM * (math.sqrt(1 + START**2) - 1),
        steps=steps,
        rows=ROWS,
        touched=ROWS,
        depth=3,
        width=WIDTH,
        form="conservative" if conservative else "plain",
    )


@pytest.mark.parametrize("conservative", [True, False])
def test_training_stays_below_the_bound(conservative):
    found = squared_gradients(conservative=conservative, steps=300)
    for steps in (1, 10, 100, 300):
        bound = bound_of_run(conservative=conservative, steps=steps)
        assert bound.holds
        assert min(found[:steps]) <= bound.total


def test_the_bound_falls_below_the_gradient_at_the_start():
    start = squared_gradients(conservative=True, steps=1)[0]
    assert bound_of_run(conservative=True, steps=2000).total < start / 2


def test_the_bound_is_the_formula_of_its_docstring():
    bound = theory.convergence_bound(**CONSTANTS, form="plain")
    shared, fresh = 3 * 20 / 50, math.sqrt(0.01)
    slowdown = 2 * (1 + math.sqrt(0.99 * (1 + math.e / 50 * 500)))
    expected = slowdown * (
        3 / (0.1 * 1000) + (fresh * (1 + shared) + 0.1 / 2) * 0.5 + shared * fresh * 4
    )
    assert bound.total == pytest.approx(expected)


def test_a_conservative_sketch_has_no_term_for_collisions():
    conservative = theory.convergence_bound(**CONSTANTS)
    plain = theory.convergence_bound(**CONSTANTS, form="plain")
    assert conservative.collisions == 0
    assert conservative.slowdown == plain.slowdown
    assert conservative.total < plain.total


@pytest.mark.parametrize(
    ("change", "broken"),
    [({"lr": 0.6}, "lr <= eps / 2L"), ({"beta2": 0.9}, "sqrt(1 - beta2) <= eps / 4G")],
)
def test_nothing_is_claimed_where_an_assumption_fails(change, broken):
    bound = theory.convergence_bound(**CONSTANTS | change)
    assert [a.name for a in bound.assumptions if not a.holds] == [broken]
    assert not bound.holds
    assert bound.total == math.inf
    assert " > " in str(bound)


def test_the_probability_of_failure_counts_every_row_and_step():
    assert theory.convergence_bound(**CONSTANTS).delta == 1.0
    deep = theory.convergence_bound(**CONSTANTS | {"depth": 20})
    assert deep.delta == pytest.approx(500 * 1000 * math.exp(-20))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.0}, "lr must be finite and > 0, got 0.0"),
        ({"eps": math.inf}, "eps must be finite and > 0, got inf"),
        ({"beta2": 1.0}, r"beta2 must be in \[0, 1\), got 1.0"),
        ({"variance": -1.0}, "variance must be finite and >= 0, got -1.0"),
        ({"gap": math.nan}, "gap must be finite and >= 0, got nan"),
        ({"steps": 0}, "steps must be >= 1, got 0"),
        ({"form": "paper"}, r"form must be one of \['conservative', 'plain'\], got 'paper'"),
    ],
)
def test_constants_out_of_range_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        theory.convergence_bound(**CONSTANTS | change)


@pytest.mark.parametrize("size", [theory.count_min_size, theory.count_sketch_size])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, "epsilon must be between 0 and 1, got 0.0"),
        ({"delta": 1.0}, "delta must be between 0 and 1, got 1.0"),
        ({"items": 0}, "items must be >= 1, got 0"),
    ],
)
def test_sizes_for_impossible_errors_are_refused(size, change, message):
    with pytest.raises(ValueError, match=message):
        size(**{"epsilon": 0.1, "delta": 0.1} | change)
