"""From torch.optim to ours and back, in the middle of a run."""

import copy

import pytest
import torch
from tiny_runs import CLASSES, ROWS, TinyModel, batches, bits, differences, seeded
from torch import nn
from torch_runs import dense_model, started, tables_of, train

import sketchoptim as so

# torch.optim.Adagrad makes sparse tensors, of which torch warns once.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

DENSE = {
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}, so.Adam),
    "decoupled Adam": (torch.optim.Adam, {"decoupled_weight_decay": True}, so.AdamW),
    "AdamW": (torch.optim.AdamW, {}, so.AdamW),
    "RMSprop": (torch.optim.RMSprop, {"weight_decay": 0.1}, so.RMSprop),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}, so.Adagrad),
    "filled Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.3}, so.Adagrad),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.2}, so.SGD),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, so.SGD),
    "plain SGD": (torch.optim.SGD, {}, so.SGD),
}
SPARSE = {
    "SparseAdam": (torch.optim.SparseAdam, {}, so.Adam),
    "Adagrad": DENSE["Adagrad"],
    "filled Adagrad": DENSE["filled Adagrad"],
}


@pytest.mark.parametrize("case", DENSE)
def test_dense_training_goes_on_to_the_bit(case):
    kind, options, ours = DENSE[case]
    (model, theirs, named), (twin, continued, named_again) = (
        started(kind, options, sparse=False) for _ in range(2)
    )
    converted = so.from_torch(theirs)
    assert type(converted) is ours
    train(model, converted, 4, seed=2)
    train(twin, continued, 4, seed=2)
    for name, parameter in named_again.items():
        assert torch.equal(named[name], parameter), name


@pytest.mark.parametrize("case", SPARSE)
def test_sparse_training_goes_on_as_it_would_have(case):
    kind, options, ours = SPARSE[case]
    (model, theirs, named), (twin, continued, named_again) = (
        started(kind, options, sparse=True) for _ in range(2)
    )
    converted = so.from_torch(theirs, "exact")
    assert type(converted) is ours
    train(model, converted, 4, seed=2)
    train(twin, continued, 4, seed=2)
    for name, parameter in named_again.items():
        torch.testing.assert_close(named[name], parameter, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", DENSE)
def test_there_and_back_changes_no_bit(case, dtype):
    kind, options, _ = DENSE[case]
    model = dense_model(dtype)
    model.scalar = nn.Parameter(torch.tensor(0.5, dtype=dtype))
    theirs = kind(model.named_parameters(), lr=0.05, **options)
    for ids in batches(4):
        theirs.zero_grad()
        (model.loss(ids) * model.scalar).backward()
        theirs.step()
    back = so.to_torch(so.from_torch(theirs, "exact"))
    assert type(back) is (torch.optim.AdamW if case == "decoupled Adam" else kind)
    before, after = (bits(one, model.named_parameters()) for one in (theirs, back))
    assert differences(before, after) == []
    assert back.defaults == theirs.defaults


@pytest.mark.parametrize("case", SPARSE)
def test_there_and_back_changes_no_bit_of_tables(case):
    kind, options, _ = SPARSE[case]
    _, theirs, named = started(kind, options, sparse=True)
    back = so.to_torch(so.from_torch(theirs, "exact"), kind)
    assert differences(bits(theirs, named.items()), bits(back, named.items())) == []


def test_ours_shares_no_state_with_the_given_optimizer():
    model, theirs, _ = started(torch.optim.Adam, {}, sparse=False)
    before = bits(theirs, [])
    kept = copy.deepcopy(theirs.state_dict()["state"])
    converted = so.from_torch(theirs)
    train(model, converted, 3)
    assert differences(before, bits(theirs, [])) == []
    for number, state in theirs.state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(value, kept[number][key])


def test_one_of_ours_divides_into_two_of_torch():
    model = seeded(TinyModel(), 0)
    ours = so.Adam(model.named_parameters(), lr=0.05)
    train(model, ours, 5)
    tables = so.to_torch(ours, torch.optim.SparseAdam, parameters=tables_of(model).values())
    body = so.to_torch(ours, parameters=model.head.parameters())
    assert tables.param_groups[0]["param_names"] == ["table.weight", "late.weight"]
    assert body.param_groups[0]["param_names"] == ["head.weight", "head.bias"]
    assert tables.state[model.table.weight]["step"] == 5
    head = model.head.weight
    assert torch.equal(body.state[head]["exp_avg"], ours.state[head]["first_values"])
    assert body.state[head]["exp_avg"] is not ours.state[head]["first_values"]
    for ids in batches(2):
        model.zero_grad()
        model.loss(ids).backward()
        tables.step()
        body.step()


# -- into compressed memory ------------------------------------------------------------------------

WIDE = {
    "linear": so.Sketched(width=4096, granularity="element"),
    "paper": so.Sketched(width=4096, granularity="element", decay="paper"),
    "conservative": so.Sketched(width=4096, granularity="element", conservative=True),
}


@pytest.mark.parametrize("storage", WIDE.values(), ids=WIDE)
@pytest.mark.parametrize("case", SPARSE)
def test_a_sketch_without_collisions_holds_the_exact_moments(case, storage):
    kind, options, _ = SPARSE[case]
    _, theirs, named = started(kind, options, sparse=True)
    first = so.Sketched(width=4096, granularity="element", decay=storage.decay)
    ours = so.from_torch(theirs, so.Memory(first, storage))
    back = so.to_torch(ours, kind)
    for parameter in named.values():
        for key, value in theirs.state[parameter].items():
            expected = torch.as_tensor(value)
            found = torch.as_tensor(back.state[parameter][key])
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)


def test_a_sketch_by_row_takes_the_mean_over_a_row_and_is_never_below_it():
    _, theirs, named = started(torch.optim.SparseAdam, {}, sparse=True)
    ours = so.from_torch(theirs, "lean-0.1")
    back = so.to_torch(ours, torch.optim.SparseAdam)
    for parameter in named.values():
        truth = theirs.state[parameter]["exp_avg_sq"].mean(1)
        found = back.state[parameter]["exp_avg_sq"]
        assert (found == found[:, :1]).all()
        assert (found[:, 0] >= truth * (1 - 1e-6)).all()
        assert found.max() <= truth.max() * (1 + 1e-6)
        assert not back.state[parameter]["exp_avg"].any()
        assert ours.state[parameter].keys().isdisjoint({"first_counters", "first_values"})


@pytest.mark.parametrize("memory", ["row-wise", "rank-one", so.Memory(second=so.TopSingular())])
def test_a_moment_by_factors_keeps_the_mass_of_rows(memory):
    _, theirs, named = started(torch.optim.SparseAdam, {}, sparse=True)
    back = so.to_torch(so.from_torch(theirs, memory), torch.optim.SparseAdam)
    for parameter in named.values():
        truth = theirs.state[parameter]["exp_avg_sq"]
        found = back.state[parameter]["exp_avg_sq"]
        assert (found - truth).norm() < 0.8 * truth.norm()
        if memory != so.Memory(second=so.TopSingular()):
            torch.testing.assert_close(found.sum(1), truth.sum(1), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    "storage", [so.RowWise(columns=True), so.Sketched(width=512, columns=True, conservative=True)]
)
def test_a_moment_of_rank_one_is_carried_over_into_rows_and_columns_and_back(storage):
    table = nn.Embedding(60, 6, sparse=True)
    theirs = torch.optim.SparseAdam(table.parameters())
    table(torch.arange(60)).sum().backward()
    theirs.step()
    truth = torch.outer(torch.linspace(0.1, 3.0, 60), torch.linspace(0.2, 1.8, 6))
    theirs.state[table.weight]["exp_avg_sq"].copy_(truth)
    ours = so.from_torch(theirs, so.Memory(second=storage))
    back = so.to_torch(ours, torch.optim.SparseAdam)
    torch.testing.assert_close(back.state[table.weight]["exp_avg_sq"], truth, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("conservative", [True, False])
def test_what_adagrad_starts_from_is_carried_once(conservative):
    table = nn.Embedding(5_000, 2, sparse=True)
    options = {"initial_accumulator_value": 0.5}
    theirs = torch.optim.Adagrad(table.parameters(), **options)
    table(torch.tensor([3])).sum().backward()
    theirs.step()
    one = so.Sketched(width=64, granularity="element", conservative=conservative)
    ours = so.from_torch(theirs, so.Memory(second=one))
    found = so.to_torch(ours).state[table.weight]["sum"]
    assert found[3].tolist() == [1.5, 1.5]
    assert (found == 0.5).float().mean() > 0.9


@pytest.mark.parametrize("memory", ["lean-0.1", "paper-mv", "paper-v", "row-wise"])
def test_training_goes_on_in_compressed_memory(memory):
    model, theirs, named = started(torch.optim.SparseAdam, {}, sparse=True, steps=20)
    before = train(model, theirs, 5, seed=3)
    ours = so.from_torch(theirs, memory)
    for parameter in named.values():
        assert ours.state[parameter]["step"] == 25
        assert ours.state[parameter]["is_compressed"]
    after = train(model, ours, 5, seed=3)
    assert sum(after) < 1.1 * sum(before)


@pytest.mark.parametrize("form", ["tensors", "names", "one name"])
def test_tables_with_dense_gradients_are_compressed_when_named(form):
    model, theirs, named = started(torch.optim.Adam, {}, sparse=False)
    table = named["table.weight"]
    forms = {"tensors": [table], "names": ["table.weight"], "one name": "table.weight"}
    ours = so.from_torch(theirs, "lean-0.1", tables=forms[form])
    train(model, ours, 3)
    compressed = [name for name, p in named.items() if ours.state[p]["is_compressed"]]
    assert compressed == ["table.weight"]
    assert ours.state[table]["second_counters"].shape == (3, int(ROWS / 8 / 3), 1)
    assert ours.state[named["head.bias"]]["second_values"].shape == (CLASSES,)


def test_a_named_table_without_state_is_compressed_at_its_first_dense_gradient():
    model = dense_model()
    ours = so.from_torch(torch.optim.Adam(model.parameters()), tables=[model.table.weight])
    train(model, ours, 1)
    assert ours.state[model.table.weight]["is_compressed"]
    assert ours.state[model.table.weight]["step"] == 1
    assert not ours.state[model.late.weight]["is_compressed"]


def test_before_its_first_step_an_optimizer_converts_to_a_fresh_one():
    model = seeded(TinyModel(), 0)
    ours = so.from_torch(torch.optim.Adagrad(model.parameters(), lr=0.1))
    assert not ours.state
    train(model, ours, 1)
    assert ours.state[model.table.weight]["is_compressed"]
    assert not ours.state[model.head.bias]["is_compressed"]


def test_sparse_momentum_goes_into_the_sketch():
    model, theirs, named = started(torch.optim.SGD, {"momentum": 0.9}, sparse=True)
    table = named["table"]
    truth = theirs.state[table]["momentum_buffer"].to_dense()
    theirs.zero_grad()
    one = so.Sketched(width=4096, granularity="element")
    ours = so.from_torch(theirs, so.Memory(first=one))
    back = so.to_torch(ours)
    torch.testing.assert_close(back.state[table]["momentum_buffer"], truth, rtol=1e-5, atol=1e-7)
    train(model, ours, 2)
    train(model, back, 2)


def test_the_first_step_after_conversion_dampens():
    weight = nn.Parameter(torch.zeros(3))
    theirs = torch.optim.SGD([weight], lr=1.0, momentum=0.5, dampening=0.5)
    weight.grad = torch.ones(3)
    theirs.step()
    so.from_torch(theirs).step()
    assert weight.tolist() == [-2.0] * 3  # 1, then 0.5 * 1 + 0.5 * 1


def test_a_converted_optimizer_saves_and_loads():
    _, theirs, named = started(torch.optim.SparseAdam, {}, sparse=True)
    ours = so.from_torch(theirs)
    again = so.Adam(list(named.items()), lr=0.05)
    again.load_state_dict(ours.state_dict())
    assert differences(bits(ours, named.items()), bits(again, named.items())) == []
