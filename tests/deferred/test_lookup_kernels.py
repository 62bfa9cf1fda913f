"""Steps of the kernels along the gradients of lookups, whose rows are never written."""

import pytest
import torch
from backends import LEVELS, needs_native, stepping_by
from torch import Tensor

import sketchoptim as so
from sketchoptim.deferred import DeferredGradient, Lookups

pytestmark = [needs_native, pytest.mark.filterwarnings("ignore:.*active rows a bucket")]

ROWS = 200
COLUMNS = so.Memory(second=so.Sketched(conservative=True, columns=True))
OTHERS = ("row-wise", "paper-mv", "exact", COLUMNS)
FORMS = {
    "each": {},
    "bags": {"offsets": True},
    "means": {"offsets": True, "mode": "mean"},
    "weights": {"lookup_weights": True},
    "weighted bags": {"offsets": True, "lookup_weights": True},
    "padding": {"padding_idx": 3},
}


def lookups(
    table: Tensor, seed: int, *, offsets: bool = False, lookup_weights: bool = False, **options
) -> Lookups:
    """Lookups of a few rows many times and of others once, from columns of a wider matrix."""
    generator = torch.Generator().manual_seed(seed)
    count, dim = 150, table.shape[1]
    ids = torch.cat([torch.arange(50), torch.randint(0, ROWS, (count - 50,), generator=generator)])
    ends = torch.randint(0, count, (39,), generator=generator).sort().values
    outputs = 40 if offsets else count
    wide = torch.randn(outputs, 2 * dim + 3, generator=generator).to(table.dtype)
    return Lookups(
        table,
        ids[torch.randperm(count, generator=generator)],
        wide[:, 3 : 3 + dim],
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), ends]) if offsets else None,
        lookup_weights=torch.rand(count, generator=generator) if lookup_weights else None,
        **options,
    )


def stepped(gradients, *, is_plain: bool, dim: int, memory="lean", dtype=torch.float32, **options):
    """The table and its counters after steps along gradients, deferred or plain."""
    generator = torch.Generator().manual_seed(9)
    values = torch.randn(ROWS, dim, generator=generator).to(dtype)
    table = torch.nn.Parameter(values)
    optimizer = so.AdamW([("table", table)], lr=0.1, memory=memory, **options)
    for make in gradients:
        gradient = make(table)
        table.grad = gradient.to_sparse_rows() if is_plain else gradient
        optimizer.step()
    state = optimizer.state[table].values()
    return [table.detach(), *(it for it in state if isinstance(it, Tensor))]


@pytest.mark.parametrize(
    ("level", "memory"),
    [
        *((level, "lean") for level in LEVELS),
        *((level, memory) for level in LEVELS[-1:] for memory in OTHERS),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_steps_have_the_bits_of_the_plain_gradient(level, form, memory):
    gradients = [
        lambda table: DeferredGradient(table, [lookups(table, 1, **FORMS[form])]),
        lambda table: DeferredGradient(table, [lookups(table, 2, **FORMS[form])]).mul_(0.3),
        lambda table: DeferredGradient(
            table, [lookups(table, 3, **FORMS[form]), lookups(table, 4, offsets=True)]
        ),
    ]
    for dim, options in ((16, {}), (37, {"weight_decay": 0.1}), (130, {"maximize": True})):
        with stepping_by(level, threads=2) as taken:
            found = stepped(gradients, is_plain=False, dim=dim, memory=memory, **options)
            expected = stepped(gradients, is_plain=True, dim=dim, memory=memory, **options)
        assert taken.native == 6
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rows_are_near_those_of_the_plain_gradient(dtype):
    gradients = [lambda table: DeferredGradient(table, [lookups(table, 1, offsets=True)])]
    options = {"dim": 24, "dtype": dtype, "rounding": "nearest"}
    found = stepped(gradients, is_plain=False, **options)
    expected = stepped(gradients, is_plain=True, **options)
    torch.testing.assert_close(found[0].float(), expected[0].float(), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2.0**60])
@pytest.mark.parametrize("where", ["output", "weight"])
def test_a_gradient_that_is_not_finite_is_refused_before_anything_moves(value, where):
    def spoilt(table: Tensor) -> DeferredGradient:
        part = lookups(table, 1, offsets=True, lookup_weights=True)
        spoiled = part.output_gradient if where == "output" else part.lookup_weights
        with torch.no_grad():
            spoiled[-1] = value
        return DeferredGradient(
            table,
            [
                Lookups(
                    table,
                    part.ids,
                    part.output_gradient,
                    offsets=part.offsets,
                    lookup_weights=part.lookup_weights,
                )
            ],
        )

    table, other = (torch.nn.Parameter(torch.ones(ROWS, 8)) for _ in range(2))
    for nonfinite in ("raise", "skip"):
        optimizer = so.Adam([table, other], nonfinite=nonfinite)
        other.grad = DeferredGradient(other, [lookups(other, 2)])
        table.grad = spoilt(table)
        if nonfinite == "raise":
            with pytest.raises(ValueError, match="must be finite"):
                optimizer.step()
            assert bool((other == 1).all())
        else:
            optimizer.step()
            assert optimizer.state[table]["skipped"] == 1
            assert not bool((other == 1).all())
        assert bool((table == 1).all())


def test_large_finite_gradients_are_taken_although_their_bound_is_too_large():
    def large(table: Tensor) -> DeferredGradient:
        part = lookups(table, 1)
        return DeferredGradient(
            table, [Lookups(table, part.ids, torch.full((150, 8), 2.0**38 / 150))]
        ).mul_(1.0)

    found, expected = (stepped([large], is_plain=plain, dim=8) for plain in (False, True))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("offsets", [[1, 5], [0, 200], [5, 0]])
def test_offsets_that_divide_no_ids_are_refused(offsets):
    table = torch.nn.Parameter(torch.ones(ROWS, 8))
    ids, output = torch.arange(10), torch.ones(2, 8)
    optimizer = so.Adam([table])
    table.grad = DeferredGradient(
        table, [Lookups(table, ids, output, offsets=torch.tensor(offsets))]
    )
    with pytest.raises(ValueError, match="the offsets behind the gradient"):
        optimizer.step()
    assert bool((table == 1).all())


class Bags:
    """Steps of bags of five tables, of which the later ones repeat the first."""

    def __init__(self, dtype):
        torch.manual_seed(0)
        tables = {f"table_{number}": (ROWS, 8) for number in range(5)}
        self.layer = so.nn.EmbeddingBags(tables, dtype=dtype)
        self.optimizer = so.Adam(self.layer.named_parameters(), lr=0.1)

    def backward(self, seed):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(ROWS, (5 * 40,), generator=generator)
        offsets = torch.randint(5 * 40, (5 * 12 + 1,), generator=generator).sort().values
        offsets[0], offsets[-1] = 0, 5 * 40
        output = self.layer(ids, offsets)
        self.ids, self.output_gradient = (
            ids,
            torch.randn(output.shape, generator=generator).to(output.dtype),
        )
        output.backward(self.output_gradient)

    def steps(self, change):
        """What the steps raised, of which the fifth has another gradient, and all numbers."""
        raised = []
        for seed in range(7):
            self.backward(seed)
            if seed == 4:
                change(self)
            try:
                self.optimizer.step()
            except (ValueError, RuntimeError) as error:
                raised.append((seed, str(error)))
            self.optimizer.zero_grad()
        states = [*self.optimizer.state.values()]
        numbers = [it for state in states for it in state.values() if isinstance(it, Tensor)]
        return raised, [*map(torch.Tensor.detach, self.layer.parameters()), *numbers]


def is_clipped(bags):
    torch.nn.utils.clip_grad_norm_(bags.layer.parameters(), 1e-3)


def is_accumulated(bags):
    bags.backward(10)


def has_a_nan(bags):
    bags.output_gradient.view(torch.uint8).numpy()[3, -8:] = 0xFF  # without a new version


def was_modified(bags):
    bags.ids.zero_()


def has_an_id_outside(bags):
    bags.ids.numpy()[100] = ROWS


def has_a_plain_gradient(bags):
    bags.layer.table_2.grad = bags.layer.table_2.grad.to_sparse_rows()


def lacks_a_gradient(bags):
    bags.layer.table_3.grad = None


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (is_clipped, None),
        (is_accumulated, None),
        (has_a_plain_gradient, None),
        (lacks_a_gradient, None),
        (has_a_nan, "must be finite"),
        (was_modified, "the ids behind a deferred gradient"),
        (has_an_id_outside, "must have row ids between 0"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repeated_steps_of_bags_do_what_single_steps_do(monkeypatch, change, error, dtype):
    bags = Bags(dtype)
    repeated, found = bags.steps(change)
    assert bags.optimizer._repetitions
    monkeypatch.setattr("sketchoptim.optim.base.is_repeatable", lambda steps: False)
    single, expected = Bags(dtype).steps(change)
    assert repeated == single
    assert [seed for seed, _ in single] == ([] if error is None else [4])
    assert error is None or error in single[0][1]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
