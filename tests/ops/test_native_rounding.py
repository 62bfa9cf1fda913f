"""Stochastic rounding in the kernels: the bits of the reference, unbiased, and never frozen.

How the reference rounds counters is in tests/test_sketch_rounding.py.
"""

import math

import pytest
import torch
from backends import LEVELS, bits, needs_native, stepping_by
from collision_free import collision_free_ids
from gradients import sparse
from step_cases import Case, run
from torch import Tensor

import sketchoptim as so
from sketchoptim import _hashing
from sketchoptim.storage import Memory, Sketched

pytestmark = needs_native

LAST_BIT = 2.0**-7  # of a bfloat16 between 1 and 2
DEPTH = 3

FORMS = {
    "lean-0.1": {"conservative": True},
    "linear by row": {},
    "paper by row": {"decay": "paper"},
    "bucket by row": {"decay": "bucket"},
    "linear by element": {"granularity": "element"},
    "paper by element": {"granularity": "element", "decay": "paper"},
    "bucket by element": {"granularity": "element", "decay": "bucket"},
}
DECAYS = ("linear", "paper", "bucket")
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def in_bfloat16(form: dict, width: int) -> Sketched:
    return Sketched(width=width, depth=DEPTH, dtype=torch.bfloat16, **form)


class Run:
    """A sketched optimizer on rows that share no bucket, stepped by the kernels."""

    def __init__(
        self, optimizer: str, form: dict, rows: int, dim: int, *, name: str = "second", **options
    ) -> None:
        width = 2 * rows
        self.ids = collision_free_ids(rows, width, DEPTH)
        self.parameter = torch.nn.Parameter(torch.zeros(int(self.ids[-1]) + 1, dim))
        memory = Memory(**{"first": None, "second": None, name: in_bfloat16(form, width)})
        group = {"params": [self.parameter], "memory": memory}
        self.optimizer = getattr(so, optimizer)([group], **options)
        self.name = name

    def step(self, *gradients: Tensor) -> None:
        with stepping_by(LEVELS[-1]) as taken:
            for values in gradients:
                self.parameter.grad = sparse(self.ids, values, tuple(self.parameter.shape))
                self.optimizer.step()
        assert taken.native == len(gradients)

    def readings(self) -> Tensor:
        """The reading of each row in each hash row, ``[depth, rows, dim]``."""
        state = self.optimizer.state[self.parameter]
        counters, words, scale = (
            state[f"{self.name}_{part}"] for part in ("counters", "words", "scale")
        )
        buckets = _hashing.buckets(words, self.ids, counters.shape[1])
        readings = counters[torch.arange(DEPTH).unsqueeze(1), buckets].float() * scale
        if self.name == "second":
            return readings
        return readings * _hashing.signs(words, self.ids).unsqueeze(-1)


FIRSTS = {f"first, {decay}": {"granularity": "element", "decay": decay} for decay in DECAYS}
MOMENTS = {
    **{name: ("RMSprop", Memory(second=in_bfloat16(form, 8))) for name, form in FORMS.items()},
    **{name: ("SGD", Memory(first=in_bfloat16(form, 8))) for name, form in FIRSTS.items()},
}


@pytest.mark.parametrize(("optimizer", "memory"), MOMENTS.values(), ids=MOMENTS)
def test_kernels_and_reference_round_to_the_same_bits_where_rows_collide(optimizer, memory):
    """Counters, scales and counted writes, over many steps; a row of one number is its own mean."""
    options = {"momentum": 0.9} if optimizer == "SGD" else {"alpha": 0.9}
    case = Case(optimizer, memory, shape=(60, 1), entries=80, steps=30, options=options)
    outcomes = []
    for level in (LEVELS[-1], None):
        with stepping_by(level) as taken:
            outcomes.append(run(case).state)
        assert (taken.native, taken.reference) == ((0, 30) if level is None else (30, 0))
    native, reference = outcomes
    assert native.keys() == reference.keys()
    for name, expected in reference.items():
        if isinstance(expected, Tensor):
            assert torch.equal(bits(native[name]), bits(expected)), name


def size_of(form: dict) -> tuple[int, int]:
    """Rows and columns with 20,000 roundings in all."""
    return (10, 2000) if form.get("granularity") == "element" else (20_000, 1)


@every_form
@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_second_moment_is_rounded_up_as_often_as_its_mean_needs(form, share):
    rows, dim = size_of(form)
    run = Run("Adagrad", form, rows, dim, initial_accumulator_value=1.0)
    run.step(torch.full((rows, dim), math.sqrt(share * LAST_BIT)))
    readings = run.readings()
    assert set(readings.unique().tolist()) == {1.0, 1.0 + LAST_BIT}
    ups = (readings.amin(0) > 1).double().mean().item()
    assert abs(ups - share) < 4 * math.sqrt(share * (1 - share) / (rows * dim))


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_first_moment_is_rounded_away_from_zero_as_often_as_its_mean_needs(decay, sign):
    rows, dim, share = 10, 2000, 0.3
    form = {"granularity": "element", "decay": decay}
    run = Run("SGD", form, rows, dim, name="first", momentum=0.5)
    run.step(torch.full((rows, dim), sign * (1 + share * LAST_BIT)))
    readings = run.readings() * sign
    assert set(readings.unique().tolist()) == {1.0, 1.0 + LAST_BIT}
    ups = (readings.median(0).values > 1).double().mean().item()
    assert abs(ups - share) < 4 * math.sqrt(share * (1 - share) / (rows * dim))


@every_form
def test_every_hash_row_rounds_a_row_alike(form):
    # Independently rounded they would drift apart, and the least of them would be biased.
    rows, dim = (4, 40) if form.get("granularity") == "element" else (160, 1)
    run = Run("RMSprop", form, rows, dim, alpha=0.99)
    generator = torch.Generator().manual_seed(0)
    run.step(*(torch.randn(rows, dim, generator=generator) for _ in range(600)))
    readings = run.readings()
    spread = (readings.amax(0) - readings.amin(0)).mean() / readings.mean()
    assert spread < 0.01


@every_form
def test_rounding_bits_differ_between_steps_and_between_numbers(form):
    rows, dim = size_of(form)
    run = Run("RMSprop", form, rows, dim, alpha=0.0)
    patterns = []
    for _ in range(2):
        run.step(torch.full((rows, dim), math.sqrt(1 + LAST_BIT / 2)))
        patterns.append(run.readings().amin(0).flatten() > 1)
        assert not torch.equal(patterns[-1][:-1], patterns[-1][1:])
    agreeing = (patterns[0] == patterns[1]).double().mean().item()
    assert abs(agreeing - 0.5) < 4 * 0.5 / math.sqrt(rows * dim)
    neighbours = (patterns[0][1:] == patterns[0][:-1]).double().mean().item()
    assert abs(neighbours - 0.5) < 4 * 0.5 / math.sqrt(rows * dim)


# From 1.24 down to .057: where a second moment rounded to nearest was once seen to freeze.
SQUARES = [1.24] * 100 + [0.057] * 1000


@every_form
def test_a_second_moment_follows_the_gradients_down(form):
    rows, dim = (4, 64) if form.get("granularity") == "element" else (256, 1)
    run = Run("RMSprop", form, rows, dim, alpha=0.998)
    run.step(*(torch.full((rows, dim), math.sqrt(square)) for square in SQUARES))
    true = 0.0
    for square in SQUARES:
        true = 0.998 * true + 0.002 * square
    assert run.readings().amin(0).mean().item() == pytest.approx(true, rel=0.03)


# -- weights -------------------------------------------------------------------------------------

HALVES = (torch.bfloat16, torch.float16)
BACKENDS = [*LEVELS, None]


def sgd(weight: Tensor, **options) -> so.SGD:
    """SGD without state, on a compressed table."""
    return so.SGD([{"params": [torch.nn.Parameter(weight)], "memory": "lean-0.1"}], **options)


def stepped(optimizer: so.SGD, gradient: Tensor, *, level: str | None) -> Tensor:
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = gradient
    with stepping_by(level, threads=2) as taken:
        optimizer.step()
    assert (taken.native, taken.reference) == ((0, 1) if level is None else (1, 0))
    return parameter.detach()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rate", [1.0, 0.7, 1e-3, 1e-6, 5e2, 1e30])
def test_every_level_rounds_weights_to_the_bits_of_the_reference(dtype, rate):
    """Of numbers of every size: subnormal, too small, too large."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    gradient = every[every.isfinite() & (every.float().abs() < 1e12)]
    gradient = gradient[: gradient.numel() // 31 * 31].view(-1, 31)
    zeros = torch.zeros(gradient.shape, dtype=dtype)
    found = [
        bits(stepped(sgd(zeros.clone(), lr=rate), gradient, level=level)) for level in BACKENDS
    ]
    for other in found[1:]:
        assert torch.equal(other, found[0])


@pytest.mark.parametrize("level", BACKENDS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_weights_follow_steps_far_below_their_last_bit(level, dtype):
    rows, dim, steps = 50, 40, 40
    moved = {}
    for rounding in ("stochastic", "nearest"):
        optimizer = sgd(torch.ones(rows, dim, dtype=dtype), lr=1e-4, rounding=rounding)
        for _ in range(steps):
            weight = stepped(optimizer, torch.ones(rows, dim, dtype=dtype), level=level)
        moved[rounding] = 1 - weight.double().mean().item()
    assert moved["nearest"] == 0
    last_bit = torch.finfo(dtype).eps
    spread = math.sqrt(steps * 1e-4 * last_bit / (rows * dim))  # of a mean of so many roundings
    assert moved["stochastic"] == pytest.approx(steps * 1e-4, abs=5 * spread)


def test_a_resumed_run_rounds_to_the_same_bits():
    def run_on(optimizer: so.SGD, steps: range) -> Tensor:
        for step in steps:
            gradient = torch.full((9, 33), 1.0 + step, dtype=torch.bfloat16)
            weight = stepped(optimizer, gradient, level=LEVELS[-1])
        return weight

    start = torch.ones(9, 33, dtype=torch.bfloat16)
    unbroken = sgd(start.clone(), lr=1e-3)
    whole = run_on(unbroken, range(6)).clone()
    first = sgd(start.clone(), lr=1e-3)
    half = run_on(first, range(3)).clone()
    resumed = sgd(half, lr=1e-3)
    resumed.load_state_dict(first.state_dict())
    assert torch.equal(run_on(resumed, range(3, 6)), whole)


def test_parameters_are_rounded_by_bits_of_their_own():
    weights = [torch.nn.Parameter(torch.ones(30, 30, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = so.SGD([{"params": weights, "memory": "lean-0.1"}], lr=1e-3)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert not torch.equal(*weights)
