"""Steps that repeat the one before do what any step does: the same bits, and the same errors."""

import copy
import weakref

import pytest
import torch
from backends import bits
from torch import nn

import sketchoptim as so
from sketchoptim import _torch_private
from sketchoptim.optim import _repetition

ROWS, DIM, TABLES = 40, 5, 6


@pytest.fixture(params=["dense", "sparse", "mixed"])
def kinds(request):
    """Which of the tables have sparse gradients."""
    return [
        {"dense": False, "sparse": True, "mixed": number % 2 == 0}[request.param]
        for number in range(TABLES)
    ]


class Run:
    """An optimizer that has taken three steps, the last of which are remembered."""

    def __init__(self, kinds, *, dtype=torch.float32, memory="lean-0.1", **options):
        generator = torch.Generator().manual_seed(0)
        self.kinds, self.step_number = kinds, 0
        self.tables = [
            nn.Parameter(torch.randn(ROWS, DIM, generator=generator).to(dtype)) for _ in kinds
        ]
        self.optimizer = so.AdamW([{"params": self.tables, "memory": memory}], **options)
        for _ in range(3):
            self.step()

    def gradients(self):
        """New ones, in new tensors."""
        generator = torch.Generator().manual_seed(self.step_number)
        for number, (table, is_sparse) in enumerate(zip(self.tables, self.kinds, strict=True)):
            count = 3 + (self.step_number + number) % 4 if is_sparse else ROWS
            values = torch.randn(count, DIM, generator=generator).to(table.dtype)
            if is_sparse:
                ids = torch.randint(0, ROWS, (1, count), generator=generator)
                values = torch.sparse_coo_tensor(ids, values, table.shape, check_invariants=False)
            table.grad = values

    def step(self, change=None):
        self.step_number += 1
        self.gradients()
        if change is not None:
            change(self)
        self.optimizer.step()

    def outcome(self, change):
        """Four more steps, of which the second is changed: what each raised, and all numbers."""
        raised = []
        for at in range(4):
            try:
                self.step(change if at == 1 else None)
                raised.append(None)
            except (TypeError, ValueError) as error:
                raised.append((type(error), str(error), error.__notes__))
        return raised, [*self.tables], self.optimizer.state_dict()


@pytest.fixture
def repetitions(monkeypatch):
    """How often steps were repeated."""
    taken = []
    prepare = _repetition.Repetition.prepare

    def counted(self, optimizer, options):
        is_repeated = prepare(self, optimizer, options)
        taken.append(is_repeated)
        return is_repeated

    monkeypatch.setattr(_repetition.Repetition, "prepare", counted)
    return taken


def is_nothing(run):
    """No change at all."""


def takes_another_rate(run):
    run.optimizer.param_groups[0]["lr"] = 0.5


def takes_other_betas(run):
    run.optimizer.param_groups[0]["betas"] = (0.9, 0.5)


def does_not_check(run):
    run.optimizer.param_groups[0]["nonfinite"] = "unchecked"


def lacks_a_gradient(run):
    run.tables[3].grad = None


def has_a_gradient_of_zeros(run):
    run.tables[3].grad = torch.zeros(ROWS, DIM, dtype=run.tables[3].dtype)


def has_an_empty_gradient(run):
    ids, values = torch.empty(1, 0, dtype=torch.int64), torch.empty(0, DIM)
    run.tables[2].grad = torch.sparse_coo_tensor(ids, values, (ROWS, DIM), check_invariants=True)


def has_a_transposed_gradient(run):
    run.tables[1].grad = torch.ones(DIM, ROWS).t()


def has_transposed_rows(run):
    ids, rows = torch.arange(DIM).unsqueeze(0), torch.arange(25.0).view(DIM, DIM)
    run.tables[2].grad = torch.sparse_coo_tensor(ids, rows.t(), (ROWS, DIM), check_invariants=True)


def has_a_negated_gradient(run):
    run.tables[1].grad = torch._neg_view(torch.ones(ROWS, DIM))


def has_a_nan(run):
    run.tables[4].grad = run.tables[4].grad * float("nan")


def has_an_id_outside(run):
    run.tables[4].grad = torch.sparse_coo_tensor(
        [[ROWS]], torch.ones(1, DIM), (ROWS, DIM), check_invariants=False
    )


def has_a_gradient_of_another_dtype(run):
    table = run.tables[4]
    table.data = table.data.double()
    table.grad = torch.ones(ROWS, DIM, dtype=torch.float64)
    table.data = table.data.float()


def shares_a_gradient(run):
    run.tables[5].grad = run.tables[3].grad


def moves_a_table(run):
    run.tables[2].data = run.tables[2].data.clone()


def moves_its_state(run):
    state = run.optimizer.state[run.tables[2]]
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.data = value.data.clone()


def replaces_its_state(run):
    run.optimizer.state[run.tables[2]] = copy.deepcopy(run.optimizer.state[run.tables[2]])


def replaces_one_moment(run):
    state = run.optimizer.state[run.tables[2]]
    key = next(key for key in state if key.startswith("second"))
    state[key] = state[key].clone()


def counts_otherwise(run):
    run.optimizer.state[run.tables[1]]["step"].fill_(40.0)


def counts_badly(run):
    run.optimizer.state[run.tables[1]]["step"].fill_(float("nan"))


def removes_its_state(run):
    del run.optimizer.state[run.tables[2]]


def loads_a_checkpoint(run):
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def reverses_its_tables(run):
    run.optimizer.param_groups[0]["params"].reverse()


def gets_another_table(run):
    table = nn.Parameter(torch.ones(ROWS, DIM))
    table.grad = torch.ones(ROWS, DIM)
    run.optimizer.param_groups[0]["params"].append(table)


CHANGES = [
    is_nothing,
    takes_another_rate,
    takes_other_betas,
    does_not_check,
    lacks_a_gradient,
    has_a_gradient_of_zeros,
    has_an_empty_gradient,
    has_a_transposed_gradient,
    has_transposed_rows,
    has_a_negated_gradient,
    has_a_nan,
    has_an_id_outside,
    has_a_gradient_of_another_dtype,
    shares_a_gradient,
    moves_a_table,
    moves_its_state,
    replaces_its_state,
    replaces_one_moment,
    counts_otherwise,
    counts_badly,
    removes_its_state,
    loads_a_checkpoint,
    reverses_its_tables,
    gets_another_table,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_changes_a_step_is_that_of_an_optimizer_that_repeats_none(
    kinds, change, repetitions, monkeypatch
):
    found = Run(kinds).outcome(change)
    assert repetitions[0]
    assert all(repetitions) or change is not is_nothing
    monkeypatch.setattr(_repetition, "_FEWEST", TABLES + 1)
    expected = Run(kinds).outcome(change)
    assert_same(found, expected)


@pytest.mark.parametrize("memory", ["row-wise", "paper-v-only", "exact-sparse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_storage_has_the_same_bits(memory, dtype, repetitions, monkeypatch):
    is_sparse = memory == "exact-sparse"  # along dense gradients torch steps exact parameters
    options = {"dtype": dtype, "memory": "exact" if is_sparse else memory}
    kinds = [is_sparse] * TABLES
    found = Run(kinds, **options).outcome(is_nothing)
    assert repetitions
    assert all(repetitions)
    monkeypatch.setattr(_repetition, "_FEWEST", TABLES + 1)
    assert_same(found, Run(kinds, **options).outcome(is_nothing))


def test_a_gradient_that_is_skipped_is_counted(kinds, repetitions, monkeypatch):
    found = Run(kinds, nonfinite="skip").outcome(has_a_nan)
    assert found[2]["state"][4]["skipped"] == 1
    monkeypatch.setattr(_repetition, "_FEWEST", TABLES + 1)
    assert_same(found, Run(kinds, nonfinite="skip").outcome(has_a_nan))


def test_a_group_that_torch_steps_does_not_keep_another_from_repeating(repetitions):
    run = Run([True] * TABLES)
    bias = nn.Parameter(torch.zeros(3))
    run.optimizer.add_param_group({"params": [bias]})
    for _ in range(4):
        bias.grad = torch.ones(3)
        run.step()
    assert repetitions[-1]
    assert (bias != 0).all()


def test_a_torch_without_guards_steps_each_table_with_a_warning(kinds, repetitions, monkeypatch):
    _torch_private.has_tensor_guards.cache_clear()
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    with pytest.warns(UserWarning, match="hides its guards"):
        Run(kinds)
    assert repetitions == []
    _torch_private.has_tensor_guards.cache_clear()


def test_gradients_and_state_that_is_thrown_away_are_free_after_the_next_step(kinds):
    run = Run(kinds)
    kept = [weakref.ref(table.grad) for table in run.tables]
    kept += [
        weakref.ref(value)
        for value in run.optimizer.state[run.tables[0]].values()
        if torch.is_tensor(value)
    ]
    run.optimizer.state.clear()
    run.step()
    assert [it() for it in kept] == [None] * len(kept)


def assert_same(found, expected):
    """Errors, tables and state dicts are the same, bit for bit."""
    raised, tables, state = found
    expected_raised, expected_tables, expected_state = expected
    assert raised == expected_raised
    assert all(map(torch.equal, tables, expected_tables))
    assert state["state"].keys() == expected_state["state"].keys()
    for number, entries in state["state"].items():
        other = expected_state["state"][number]
        assert entries.keys() == other.keys()
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(bits(value), bits(other[key])), (number, key)
            else:
                assert value == other[key], (number, key)
