"""The proved sizes and bounds of sketches."""

import math

import gradients
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sketchoptim as so
from sketchoptim import theory

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


@given(rows=st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(0.0, 1e3)), min_size=1, max_size=20))
def test_the_mean_step_is_at_least_what_the_verdict_promises(rows):
    truth, excess = torch.tensor(rows, dtype=torch.float64).T
    error = float(excess.norm() / truth.norm())
    shares, weights = (truth / (truth + excess)).sqrt(), truth.square()
    mean_share = float((shares * weights).sum() / weights.sum())
    assert mean_share >= (1 + error) ** -0.5 - 1e-12


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (0.0, "wide"),
        (0.049, "wide"),
        (0.05, "fine"),
        (1.0, "fine"),
        (1.01, "too narrow: error above 1"),
        (math.inf, "too narrow: error above 1"),
    ],
)
def test_the_verdict_has_the_limits_that_the_page_states(error, verdict):
    assert theory.error_verdict(error) == verdict


@pytest.mark.parametrize("error", [-0.1, math.nan])
def test_a_verdict_on_no_error_at_all_is_refused(error):
    with pytest.raises(ValueError, match="relative_error must be at least 0"):
        theory.error_verdict(error)
