"""From torch.optim to ours and back, in the middle of a run."""

import copy
import math

import pytest
import torch
from tiny_runs import CLASSES, DIM, ROWS, TinyModel, batches, bits, differences, seeded
from torch import nn
from torch.optim import lr_scheduler

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


def dense_model(dtype=torch.float32):
    model = TinyModel(dtype)
    model.table.sparse = model.late.sparse = False
    return seeded(model, 0)


def tables_of(model):
    return {"table": model.table.weight, "late": model.late.weight}


def train(model, optimizer, count, *, seed=1, scheduler=None):
    losses = []
    for ids in batches(count, seed=seed):
        optimizer.zero_grad()
        loss = model.loss(ids)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def started(kind, options, *, sparse, steps=5, lr=0.05):
    """A model some steps into its training, with the optimizer of what it trains."""
    model = seeded(TinyModel(), 0) if sparse else dense_model()
    named = tables_of(model) if sparse else dict(model.named_parameters())
    optimizer = kind(list(named.items()), lr=lr, **options)
    train(model, optimizer, steps)
    return model, optimizer, named


# -- the exact way there and back ----------------------------------------------------------------


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
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


# -- into compressed memory -----------------------------------------------------------------------

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


def test_lean_takes_the_mean_over_a_row_and_is_never_below_it():
    _, theirs, named = started(torch.optim.SparseAdam, {}, sparse=True)
    ours = so.from_torch(theirs)
    back = so.to_torch(ours, torch.optim.SparseAdam)
    for parameter in named.values():
        truth = theirs.state[parameter]["exp_avg_sq"].mean(1)
        found = back.state[parameter]["exp_avg_sq"]
        assert (found == found[:, :1]).all()
        assert (found[:, 0] >= truth * (1 - 1e-6)).all()
        assert found.max() <= truth.max() * (1 + 1e-6)
        assert not back.state[parameter]["exp_avg"].any()
        assert ours.state[parameter].keys().isdisjoint({"first_table", "first_values"})


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


@pytest.mark.parametrize("memory", ["lean", "paper-mv", "paper-v", "row-wise"])
def test_training_goes_on_in_compressed_memory(memory):
    model, theirs, named = started(torch.optim.SparseAdam, {}, sparse=True, steps=20)
    before = train(model, theirs, 5, seed=3)
    ours = so.from_torch(theirs, memory)
    for parameter in named.values():
        assert ours.state[parameter]["step"] == 25
        assert ours.state[parameter]["is_compressed"]
    after = train(model, ours, 5, seed=3)
    assert sum(after) < 1.1 * sum(before)


def test_tables_with_dense_gradients_are_compressed_when_named():
    model, theirs, named = started(torch.optim.Adam, {}, sparse=False)
    table = named["table.weight"]
    ours = so.from_torch(theirs, tables=[table])
    train(model, ours, 3)
    compressed = [name for name, p in named.items() if ours.state[p]["is_compressed"]]
    assert compressed == ["table.weight"]
    assert ours.state[table]["second_table"].shape == (3, int(ROWS / 8 / 3), 1)
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


# -- groups and schedulers ------------------------------------------------------------------------


def test_groups_keep_their_options_and_names():
    model = dense_model()
    groups = [
        {"params": list(tables_of(model).items()), "lr": 0.1, "note": "mine"},
        {"params": [("head", model.head.weight)], "betas": (0.8, 0.9), "eps": 1e-5},
    ]
    theirs = torch.optim.Adam(groups, lr=0.01, weight_decay=0.1, foreach=True)
    lr_scheduler.StepLR(theirs, 1)
    ours = so.from_torch(theirs, schedulers=[])
    for before, after in zip(theirs.param_groups, ours.param_groups, strict=True):
        for key in ("lr", "initial_lr", "betas", "eps", "weight_decay", "maximize", "param_names"):
            assert before[key] == after[key]
        assert all(p is q for p, q in zip(before["params"], after["params"], strict=True))
        assert "foreach" not in after
    assert ours.param_groups[0]["note"] == "mine"
    ours.add_param_group({"params": [("bias", model.head.bias)]})
    assert (ours.param_groups[2]["lr"], ours.param_groups[2]["weight_decay"]) == (0.01, 0.1)
    back = so.to_torch(ours)
    assert back.param_groups[0]["note"] == "mine"
    assert back.param_groups[2]["param_names"] == ["bias"]
    assert "memory" not in back.param_groups[0]


def test_a_tensor_learning_rate_stays_the_same_tensor():
    lr = torch.tensor(0.1)
    theirs = torch.optim.Adam(dense_model().parameters(), lr=lr)
    assert so.from_torch(theirs).param_groups[0]["lr"] is lr


def chained(optimizer):
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.StepLR(optimizer, 3)]
    )


def sequential(optimizer):
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    return lr_scheduler.SequentialLR(
        optimizer, [warm, lr_scheduler.ExponentialLR(optimizer, 0.9)], milestones=[4]
    )


SCHEDULERS = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "chained": chained,
    "sequential": sequential,
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
}


@pytest.mark.parametrize("done", [0, 3])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on_steering(name, done):
    def run(*, converts):
        model = dense_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scheduler = SCHEDULERS[name](optimizer)
        train(model, optimizer, done, scheduler=scheduler)
        if converts:
            optimizer = so.from_torch(optimizer, schedulers=[scheduler])
            train(model, optimizer, 2, scheduler=scheduler)
            optimizer = so.to_torch(optimizer, schedulers=[scheduler])
        else:
            train(model, optimizer, 2, scheduler=scheduler)
        rates = []
        for _ in range(5):
            train(model, optimizer, 1, scheduler=scheduler)
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    assert run(converts=True) == run(converts=False)


def test_a_plateau_scheduler_goes_on_steering():
    _, theirs, _ = started(torch.optim.Adam, {}, sparse=False)
    scheduler = lr_scheduler.ReduceLROnPlateau(theirs, patience=0, factor=0.5)
    scheduler.step(1.0)
    ours = so.from_torch(theirs, schedulers=[scheduler])
    scheduler.step(2.0)
    assert ours.param_groups[0]["lr"] == 0.025
    assert theirs.param_groups[0]["lr"] == 0.05


# -- refusals -------------------------------------------------------------------------------------


def refused(error, match, theirs, named, scheduler=None, **options):
    named = list(named)
    before = bits(theirs, named)
    with pytest.raises(error, match=match):
        so.from_torch(theirs, **options)
    assert differences(before, bits(theirs, named)) == []
    if scheduler is not None:
        assert scheduler.optimizer is theirs


def test_a_forgotten_scheduler_is_refused():
    _, theirs, named = started(torch.optim.Adam, {}, sparse=False)
    scheduler = lr_scheduler.StepLR(theirs, 1)
    refused(
        ValueError, r"must be handed over: give schedulers=\[", theirs, named.items(), scheduler
    )


def test_a_scheduler_of_another_optimizer_is_refused():
    model, theirs, named = started(torch.optim.Adam, {}, sparse=False)
    other = lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1)
    match = "schedulers must steer the given optimizer; StepLR does not"
    refused(ValueError, match, theirs, named.items(), schedulers=[other])


@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad must be False in group 0, got True"),
        (torch.optim.Adam, {"capturable": True}, "capturable must be False in group 0"),
        (torch.optim.Adam, {"differentiable": True}, "differentiable must be False in group 0"),
        (torch.optim.RMSprop, {"centered": True}, "centered must be False in group 0"),
        (torch.optim.RMSprop, {"momentum": 0.9}, "momentum must be 0 in group 0, got 0.9"),
    ],
)
def test_an_option_that_ours_lacks_is_refused(kind, options, match):
    model = dense_model()
    theirs = kind(model.parameters(), **options)
    refused(ValueError, match, theirs, model.named_parameters())


def test_another_optimizer_is_refused():
    theirs = torch.optim.Adamax(dense_model().parameters())
    refused(TypeError, "optimizer must be one of torch.optim's Adam, .*, got Adamax", theirs, [])
    with pytest.raises(TypeError, match="must be one of sketchoptim's, got Adamax"):
        so.to_torch(theirs)


def test_a_memory_that_the_algorithm_cannot_use_is_refused_and_schedulers_stay():
    _, theirs, named = started(torch.optim.Adam, {}, sparse=False)
    scheduler = lr_scheduler.StepLR(theirs, 1)
    options = {"memory": so.Memory(first=so.Exact()), "schedulers": [scheduler]}
    match = "memory.second must be a storage for Adam"
    refused(ValueError, match, theirs, named.items(), scheduler, **options)


def test_the_form_that_keeps_averages_of_buckets_is_refused():
    _, theirs, named = started(torch.optim.SparseAdam, {}, sparse=True)
    one = so.Sketched(granularity="element", decay="bucket")
    match = 'decay="bucket" keeps averages of whole buckets'
    refused(ValueError, match, theirs, named.items(), memory=so.Memory(second=one))


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_state_that_would_poison_a_sketch_is_refused(value):
    _, theirs, named = started(torch.optim.SparseAdam, {}, sparse=True)
    theirs.state[named["late"]]["exp_avg_sq"][3, 1] = value
    refused(ValueError, rf"the second moment of .*\[{ROWS // 2}, {DIM}\]", theirs, named.items())
    so.from_torch(theirs, "exact")


def test_adagrad_without_gradients_needs_its_tables_named():
    _, theirs, named = started(torch.optim.Adagrad, {}, sparse=True)
    theirs.zero_grad()
    refused(ValueError, "must have a gradient to tell", theirs, named.items())
    ours = so.from_torch(theirs, tables=named.values())
    assert all(ours.state[p]["is_compressed"] for p in named.values())


def test_a_table_that_is_no_parameter_is_refused():
    _, theirs, named = started(torch.optim.Adam, {}, sparse=False)
    match = r"tables must be parameters of the optimizer, got another tensor of shape \[2\]"
    refused(ValueError, match, theirs, named.items(), tables=[torch.ones(2)])


# -- back to torch --------------------------------------------------------------------------------


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


def test_sparse_gradients_are_refused_where_torch_takes_none():
    model = seeded(TinyModel(), 0)
    ours = so.Adam(model.parameters())
    train(model, ours, 1)
    with pytest.raises(ValueError, match=r"torch.optim.Adam takes no sparse gradients.*kind="):
        so.to_torch(ours)


def test_a_kind_of_another_algorithm_is_refused():
    ours = so.Adam(dense_model().parameters())
    match = "kind must be torch.optim.Adam or torch.optim.SparseAdam for Adam, got"
    with pytest.raises(ValueError, match=match):
        so.to_torch(ours, torch.optim.SGD)


def test_weight_decay_is_refused_where_torch_has_none():
    ours = so.Adam(dense_model().parameters(), weight_decay=0.1)
    with pytest.raises(ValueError, match=r"weight_decay must be 0 in group 0, got 0.1"):
        so.to_torch(ours, torch.optim.SparseAdam)
