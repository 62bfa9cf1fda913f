"""A sketch without collisions is exact storage of its granularity that decays as it does.

The seed is one under which every row has a bucket of its own in every hash row. The exact form is

- for the paper's and the bucket form, whose buckets move only when their row does, `Exact` or
  `RowWise`, which move touched rows alone;
- for the linear form, which decays the whole table, torch.optim on the densified gradient, with
  rows that the gradient does not name put back, and the same by hand for one number a row.
"""

import math

import backends
import pytest
import torch
from collision_free import collision_free_seed
from gradients import STREAMS, densified, start
from torch import nn

import sketchoptim as so
from sketchoptim import _hashing

SHAPE, STEPS, RATE = (30, 4), 50, 0.05
BACKENDS = (None, *backends.LEVELS[-1:])
FORMS = {
    "linear": {"decay": "linear"},
    "conservative": {"decay": "linear", "conservative": True},
    "paper": {"decay": "paper"},
    "bucket": {"decay": "bucket"},
}
# Options that make the place of epsilon, of the bias correction and of the start matter.
SECOND_ONLY = {
    "Adam": {"betas": (0.8, 0.95), "eps": 0.02},
    "AdamW": {"betas": (0.8, 0.95), "eps": 0.02, "weight_decay": 0.2},
    "RMSprop": {"alpha": 0.9, "eps": 0.02},
    "Adagrad": {"lr_decay": 0.02, "initial_accumulator_value": 0.1, "eps": 0.02},
}
MOMENTA = {
    "plain": {"momentum": 0.9},
    "dampened": {"momentum": 0.8, "dampening": 0.5},
    "nesterov": {"momentum": 0.8, "nesterov": True},
}


WIDTH = 512
every_width = pytest.mark.parametrize("width", [WIDTH, 1000])


def run(name, memory, kind, options, *, backend=None):
    """The weights after all steps."""
    parameter = nn.Parameter(start(SHAPE))
    groups = [{"params": [parameter], "memory": memory}]
    optimizer = getattr(so, name)(groups, lr=RATE, **options)
    with backends.stepping_by(backend):
        for gradient in STREAMS[kind](SHAPE, STEPS):
            parameter.grad = gradient
            optimizer.step()
    return parameter.detach()


def touched_rows(gradient):
    return gradient._indices()[0].unique() if gradient.is_sparse else slice(None)


def run_torch(name, kind, options):
    """torch.optim on densified gradients; rows that a gradient does not name are put back."""
    parameter = nn.Parameter(start(SHAPE))
    # Decoupled weight decay touches nothing but the row itself, so putting rows back undoes it.
    optimizer = getattr(torch.optim, name)([parameter], lr=RATE, **options)
    (group,) = optimizer.param_groups
    for step, gradient in enumerate(STREAMS[kind](SHAPE, STEPS), start=1):
        if name.startswith("Adam") and gradient.is_sparse:
            # SparseAdam adds epsilon before it corrects the second moment, Adam after it.
            group["eps"] = options["eps"] / math.sqrt(1 - options["betas"][1] ** step)
        before = parameter.detach().clone()
        parameter.grad = densified(gradient)
        optimizer.step()
        with torch.no_grad():
            after = parameter.detach().clone()
            parameter.copy_(before)
            parameter[touched_rows(gradient)] = after[touched_rows(gradient)]
    return parameter.detach()


def run_rows_by_hand(name, kind, options):
    """One number a row, the mean of the squares, decayed for all rows at every step."""
    weights = start(SHAPE, dtype=torch.float64)
    decay = {"Adam": 0.95, "AdamW": 0.95, "RMSprop": 0.9, "Adagrad": 1.0}[name]
    weight = 1.0 if name == "Adagrad" else 1 - decay
    squares = torch.full(SHAPE[:1], options.get("initial_accumulator_value", 0.0)).double()
    for step, gradient in enumerate(STREAMS[kind](SHAPE, STEPS), start=1):
        dense, rows = densified(gradient).double(), touched_rows(gradient)
        squares = decay * squares + weight * dense.square().mean(1)
        rate = RATE / (1 + (step - 1) * options.get("lr_decay", 0.0))
        root, eps = squares.sqrt().unsqueeze(1), options["eps"]
        if name.startswith("Adam"):
            correction = math.sqrt(1 - decay**step)
            root = root / correction
            eps = eps / correction if gradient.is_sparse else eps
        moved = weights * (1 - rate * options.get("weight_decay", 0.0)) - rate * dense / (
            root + eps
        )
        weights[rows] = moved[rows]
    return weights.float()


def check_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (found - start(SHAPE)).abs().max() > 0.1  # it went somewhere


def sketched(form, granularity="element", *, width=WIDTH):
    seed = collision_free_seed(SHAPE[0], width)
    return so.Sketched(width=width, granularity=granularity, seed=seed, **FORMS[form])


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("form", ["paper", "bucket"])
@pytest.mark.parametrize("granularity", ["element", "row"])
@pytest.mark.parametrize("name", SECOND_ONLY)
def test_item_wise_second_moments_equal_exact_ones(name, granularity, form, kind):
    memory = so.Memory(None, sketched(form, granularity))
    exact = so.Memory(None, so.Exact() if granularity == "element" else so.RowWise())
    expected = run(name, exact, kind, SECOND_ONLY[name])
    for backend in BACKENDS:
        check_close(run(name, memory, kind, SECOND_ONLY[name], backend=backend), expected)


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("form", ["linear", "conservative"])
@pytest.mark.parametrize("name", SECOND_ONLY)
def test_linear_second_moments_by_element_equal_torch(name, form, kind):
    memory = so.Memory(None, sketched(form))
    options = dict(SECOND_ONLY[name])
    own = {**options, "betas": (0.0, options["betas"][1])} if "betas" in options else options
    expected = run_torch(name, kind, own)
    for backend in BACKENDS:
        check_close(run(name, memory, kind, options, backend=backend), expected)


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("form", ["linear", "conservative"])
@pytest.mark.parametrize("name", SECOND_ONLY)
def test_linear_second_moments_by_row_equal_exact_ones(name, form, kind):
    memory = so.Memory(None, sketched(form, "row"))
    expected = run_rows_by_hand(name, kind, SECOND_ONLY[name])
    for backend in BACKENDS:
        check_close(run(name, memory, kind, SECOND_ONLY[name], backend=backend), expected)


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("name", SECOND_ONLY)
@pytest.mark.parametrize("columns", [False, True])
def test_a_table_of_few_rows_steps_as_row_wise_ones(columns, name, kind):
    few, many = (so.Sketched(columns=columns, array_below=SHAPE[0] + more) for more in (1, 0))
    options = SECOND_ONLY[name]
    expected = run(name, so.Memory(None, so.RowWise(columns=columns)), kind, options)
    assert torch.equal(run(name, so.Memory(None, few), kind, options), expected)
    assert not torch.equal(run(name, so.Memory(None, many), kind, options), expected)


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("form", ["linear", "paper", "bucket"])
@pytest.mark.parametrize("momentum", MOMENTA)
def test_sketched_momentum_equals_exact_momentum(momentum, form, kind):
    options = MOMENTA[momentum]
    if form == "linear":
        expected = run_torch("SGD", kind, options)
    else:
        expected = run("SGD", so.Memory(so.Exact()), kind, options)
    for backend in BACKENDS:
        memory = so.Memory(sketched(form))
        check_close(run("SGD", memory, kind, options, backend=backend), expected)


@every_width
@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("form", ["linear", "ratio", "paper", "bucket"])
def test_adam_with_both_moments_sketched_equals_exact_adam(width, form, kind):
    options = SECOND_ONLY["Adam"]
    if form in ("linear", "ratio"):
        expected = run_torch("Adam", kind, options)
        storage = sketched("linear", width=width)
        memory = so.Memory(storage, storage, form="ratio" if form == "ratio" else "moments")
    else:
        expected = run("Adam", so.Memory(so.Exact(), so.Exact()), kind, options)
        memory = so.Memory(sketched(form, width=width), sketched(form, width=width))
    for backend in BACKENDS:
        check_close(run("Adam", memory, kind, options, backend=backend), expected)


@pytest.mark.parametrize(
    ("form", "kind"),
    # Over sparse gradients only those forms that are lazy as the exact first moment is.
    [("paper", "sparse"), ("bucket", "sparse"), *((form, "dense") for form in FORMS)],
)
def test_an_exact_first_moment_beside_a_sketched_second_one_equals_exact_adam(form, kind):
    options = SECOND_ONLY["Adam"]
    expected = run("Adam", so.Memory(so.Exact(), so.Exact()), kind, options)
    for backend in BACKENDS:
        memory = so.Memory(so.Exact(), sketched(form))
        check_close(run("Adam", memory, kind, options, backend=backend), expected)


@every_width
def test_the_hash_of_these_tests_has_no_collisions_but_both_signs(width):
    parameter = nn.Parameter(start(SHAPE))
    groups = [{"params": [parameter], "memory": so.Memory(sketched("linear", width=width))}]
    optimizer = so.SGD(groups, momentum=0.9)
    parameter.grad = torch.ones(SHAPE)
    optimizer.step()
    words, ids = optimizer.state[parameter]["first_words"], torch.arange(SHAPE[0])
    for row in _hashing.buckets(words, ids, width):
        assert row.unique().numel() == SHAPE[0]
    assert _hashing.signs(words, ids).unique().tolist() == [-1.0, 1.0]
