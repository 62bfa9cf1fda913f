"""Contract 9: what works with torch.optim's optimizers works with these."""

import copy
import functools
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import tiny_runs
import torch
from tiny_runs import PRESET_PLANS, Plan, Run, TinyModel, batches, differences
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

import sketchoptim as so

KINDS = [so.Adam, so.AdamW, so.RMSprop, so.Adagrad, so.SGD]
COMPRESSED = {name: plan for name, plan in PRESET_PLANS.items() if name != "exact"}


def losses(run: Run, ids_of_steps: list[Tensor]) -> list[float]:
    found = []
    for ids in ids_of_steps:
        found.append(run.backward(ids).item())
        run.optimizer.step()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@tiny_runs.each(PRESET_PLANS)
def test_it_trains_in_every_precision(plan, dtype):
    # float16 cannot hold the default eps, with torch.optim neither.
    run = Run.start(Plan(so.Adam, plan.memory, {"eps": 1e-4}), dtype=dtype)
    (ids,) = batches(1)
    found = losses(run, [ids] * 12)
    assert found[-1] < 0.5 * found[0]
    assert all(parameter.dtype == dtype for parameter in run.model.parameters())


# -- learning rates ------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=8),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS.keys())
@pytest.mark.parametrize("lr", [0.05, torch.tensor(0.05)], ids=["number", "tensor"])
def test_a_scheduler_gives_the_rates_and_the_steps_it_gives_torch(scheduler, lr):
    torch.manual_seed(0)
    ours, theirs = nn.Linear(4, 3), nn.Linear(4, 3)
    theirs.load_state_dict(ours.state_dict())
    pairs = []
    for kind, model in ((so.Adam, ours), (torch.optim.Adam, theirs)):
        optimizer = kind(model.parameters(), lr=copy.deepcopy(lr))
        pairs.append((model, optimizer, scheduler(optimizer)))
    generator = torch.Generator().manual_seed(2)
    for _ in range(6):
        inputs = torch.randn(5, 4, generator=generator)
        for model, optimizer, schedule in pairs:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            schedule.step()
        rates = [float(optimizer.param_groups[0]["lr"]) for _, optimizer, _ in pairs]
        assert rates[0] == rates[1]
    assert pairs[0][1].param_groups[0]["betas"] == pairs[1][1].param_groups[0]["betas"]
    torch.testing.assert_close(ours.weight, theirs.weight)


def test_a_plateau_scheduler_lowers_the_rate():
    run = Run.start(PRESET_PLANS["lean"])
    schedule = lr_scheduler.ReduceLROnPlateau(run.optimizer, factor=0.25, patience=0)
    for loss in (1.0, 2.0):
        run.train(batches(1))
        schedule.step(loss)
    assert [group["lr"] for group in run.optimizer.param_groups] == [0.05 / 4] * 3


@tiny_runs.each(PRESET_PLANS)
def test_a_rate_of_zero_leaves_the_parameters(plan):
    run = Run.start(Plan(so.Adam, plan.memory, {"lr": 0.0}))
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    run.train(batches(3))
    assert all(map(torch.equal, run.model.parameters(), before))


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_for_a_rate_steps_like_the_number(kind):
    number = Run.start(Plan(kind, "paper-mv", {"lr": 0.25})).train(batches(3))
    tensor = Run.start(Plan(kind, "paper-mv", {"lr": torch.tensor(0.25)})).train(batches(3))
    found = differences(number.bits(), tensor.bits())
    assert sorted(found) == [f"group {i}: lr" for i in range(3)]


# -- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@tiny_runs.each(PRESET_PLANS)
def test_a_grad_scaler_unscales_skips_and_goes_on(plan, dtype):
    """A scale of a power of two changes no bit of a gradient, so the runs are equal."""
    scaled, straight = Run.start(plan, dtype=dtype), Run.start(plan, dtype=dtype)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=100)
    for number, ids in enumerate(batches(4)):
        scaled.optimizer.zero_grad()
        scaler.scale(scaled.model.loss(ids)).backward()
        if number == 1:
            scaled.model.table.weight.grad._values()[0, 0] = torch.inf
        before = scaled.bits()
        scaler.step(scaled.optimizer)
        scaler.update()
        if number == 1:
            assert differences(scaled.bits(), before) == []
            assert scaler.get_scale() == 8.0
        else:
            straight.train([ids])
    assert differences(scaled.bits(), straight.bits()) == []


def test_a_grad_scaler_lets_us_clip_in_between():
    run = Run.start(PRESET_PLANS["lean"])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    run.optimizer.zero_grad()
    scaler.scale(run.model.loss(batches(1)[0])).backward()
    scaler.unscale_(run.optimizer)
    norm = so.clip_grad_norm_(run.model.parameters(), 0.01)
    assert norm < 100
    scaler.step(run.optimizer)
    assert run.optimizer.state[run.model.table.weight]["step"] == 1


def test_autocast_around_the_model_gives_gradients_it_takes():
    run = Run.start(PRESET_PLANS["lean"])
    (ids,) = batches(1)
    found = []
    for _ in range(12):
        run.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run.model.loss(ids)
        loss.backward()
        run.optimizer.step()
        found.append(loss.item())
    assert found[-1] < 0.5 * found[0]


@tiny_runs.each(PRESET_PLANS)
def test_gradients_of_several_backward_passes_add_up(plan):
    """Accumulated in p.grad, whose rows then repeat, they are the sum's gradient."""
    parts, whole = Run.start(plan), Run.start(plan)
    for ids in batches(3):
        parts.optimizer.zero_grad()
        for piece in ids.split(2):
            parts.model.loss(piece).mul(len(piece)).backward()
        parts.optimizer.step()
        whole.optimizer.zero_grad()
        whole.model.loss(ids).mul(len(ids)).backward()
        whole.optimizer.step()
    for ours, theirs in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("is_coalesced", [True, False], ids=["coalesced", "uncoalesced"])
@tiny_runs.each(PRESET_PLANS)
def test_gradients_are_never_written_into(plan, is_coalesced):
    run = Run.start(plan)
    run.backward(batches(1)[0])
    if is_coalesced:
        for table in (run.model.table, run.model.late):
            table.weight.grad = table.weight.grad.coalesce()
    gradients = [parameter.grad for parameter in run.model.parameters()]
    copies = copy.deepcopy(gradients)
    run.optimizer.step()
    for parameter, gradient, kept in zip(run.model.parameters(), gradients, copies, strict=True):
        assert parameter.grad is gradient
        if gradient.is_sparse:
            assert gradient.is_coalesced() == is_coalesced
            assert torch.equal(gradient._indices(), kept._indices())
            assert torch.equal(gradient._values(), kept._values())
        else:
            assert torch.equal(gradient, kept)


@tiny_runs.each(PRESET_PLANS)
def test_a_parameter_without_a_gradient_is_left_out(plan):
    run = Run.start(plan).train(batches(2))
    before = run.bits()
    run.train(batches(2), uses_late=False)
    changed = differences(run.bits(), before)
    assert not [name for name in changed if name.startswith("late")]
    assert "table.weight" in changed


@tiny_runs.each(PRESET_PLANS)
def test_frozen_parameters_stay_as_they_are(plan):
    run = Run.start(plan)
    run.model.table.weight.requires_grad_(False)
    run.model.head.bias.requires_grad_(False)
    before = run.bits()
    run.train(batches(2))
    changed = differences(run.bits(), before)
    assert not [name for name in changed if name.startswith(("table", "head.bias"))]
    assert "late.weight" in changed
    run.model.table.weight.requires_grad_(True)  # thawed, it starts
    run.train(batches(1))
    assert run.optimizer.state[run.model.table.weight]["step"] == 1


@pytest.mark.parametrize("set_to_none", [True, False])
@tiny_runs.each(PRESET_PLANS)
def test_zero_grad_clears_sparse_and_dense_gradients(plan, set_to_none):
    run = Run.start(plan).train(batches(1))
    run.optimizer.zero_grad(set_to_none=set_to_none)
    for parameter in run.model.parameters():
        assert (parameter.grad is None) == set_to_none
        if not set_to_none:
            assert parameter.grad.to_dense().count_nonzero() == 0
    run.model.loss(batches(1)[0]).backward()
    run.optimizer.step()
    assert run.optimizer.state[run.model.table.weight]["step"] == 2


@pytest.mark.parametrize("is_coalesced", [True, False], ids=["coalesced", "uncoalesced"])
@tiny_runs.each(PRESET_PLANS)
def test_an_empty_gradient_moves_no_row(plan, is_coalesced):
    """As a batch gives that holds nothing but padding."""
    run = Run.start(plan).train(batches(2))
    run.optimizer.zero_grad()
    weight = run.model.table.weight
    empty = torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64),
        torch.empty(0, tiny_runs.DIM),
        weight.shape,
        check_invariants=True,
    )
    weight.grad = empty.coalesce() if is_coalesced else empty
    before = weight.detach().clone()
    run.optimizer.step()
    assert torch.equal(weight, before)
    assert run.optimizer.state[weight]["step"] == 3
    run.train(batches(1))
    assert weight.isfinite().all()


@tiny_runs.each(PRESET_PLANS)
def test_an_empty_gradient_can_be_the_first(plan):
    torch.manual_seed(0)
    table = nn.Embedding(10, 4, sparse=True, padding_idx=0)
    optimizer = so.Adam(table.parameters(), lr=0.1, memory=plan.memory)
    before = table.weight.detach().clone()
    table(torch.tensor([0, 0])).sum().backward()
    optimizer.step()
    assert torch.equal(table.weight, before)
    optimizer.zero_grad()
    table(torch.tensor([0, 3])).sum().backward()
    optimizer.step()
    changed = (table.weight != before).any(1).nonzero().flatten().tolist()
    assert changed == [3]


def test_a_second_backward_through_old_weights_is_refused_as_with_torch():
    """Autograd is told that a step writes into the parameters."""
    run = Run.start(PRESET_PLANS["lean"])
    output = run.model.head(run.model.table(torch.tensor([1, 2]))).square().sum()
    output.backward(retain_graph=True)
    run.optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


@tiny_runs.each(PRESET_PLANS)
def test_a_step_raises_the_version_of_what_it_writes(plan):
    run = Run.start(plan)
    run.backward(batches(1)[0])
    versions = [parameter._version for parameter in run.model.parameters()]
    run.optimizer.step()
    assert all(p._version > v for p, v in zip(run.model.parameters(), versions, strict=True))


@tiny_runs.each(PRESET_PLANS)
def test_gradients_that_are_part_of_a_graph_are_taken(plan):
    run, twin = Run.start(plan), Run.start(plan).train(batches(1))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
        loss = nn.functional.cross_entropy(
            run.model(batches(1)[0]), batches(1)[0][:, 0] % tiny_runs.CLASSES
        )
        dense = [run.model.head.weight, run.model.head.bias]
        for parameter, gradient in zip(
            dense, torch.autograd.grad(loss, dense, create_graph=True), strict=True
        ):
            parameter.grad = gradient
        for table in (run.model.table.weight, run.model.late.weight):
            (table.grad,) = torch.autograd.grad(loss, [table], retain_graph=True)
    run.optimizer.step()
    assert differences(run.bits(), twin.bits()) == []
    assert run.model.head.weight.grad_fn is None


@tiny_runs.each(PRESET_PLANS)
def test_strided_parameters_move_like_contiguous_ones(plan):
    """A transposed or sliced tensor is a parameter like any other."""
    start = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
    found = []
    for data in (start.clone(), start.t().contiguous().t(), start.repeat(1, 2)[:, :6]):
        parameter = nn.Parameter(data)
        optimizer = so.Adam([{"params": [parameter], "memory": plan.memory}], lr=0.1)
        for gradient in (rows.to_sparse(1), rows.t().contiguous().t(), rows):
            parameter.grad = None
            parameter.grad = gradient
            optimizer.step()
        found.append(parameter.detach().clone())
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


# -- groups --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_options_of_a_group_win_over_the_defaults(kind):
    run = Run.start(Plan(kind, "paper-mv"))
    run.optimizer.param_groups[0]["lr"] = 0.0
    before = run.bits()
    changed = differences(run.train(batches(2)).bits(), before)
    assert "table.weight" not in changed
    assert "late.weight" not in changed
    assert "head.weight" in changed


def test_named_parameters_are_accepted_with_and_without_groups():
    model = TinyModel()
    names = [name for name, _ in model.named_parameters()]
    assert so.Adam(model.named_parameters()).param_groups[0]["param_names"] == names
    tables = [(name, p) for name, p in model.named_parameters() if "head" not in name]
    heads = [(name, p) for name, p in model.named_parameters() if "head" in name]
    optimizer = so.Adam([{"params": tables}, {"params": heads, "memory": "row-wise"}])
    assert optimizer.param_groups[1]["param_names"] == ["head.weight", "head.bias"]
    Run(model, optimizer).train(batches(2))


@tiny_runs.each(PRESET_PLANS)
def test_a_group_added_after_training_started_trains(plan):
    run = Run.start(plan).train(batches(2))
    torch.manual_seed(5)
    extra = nn.Embedding(20, 4, sparse=True)
    run.optimizer.add_param_group({"params": extra.parameters(), "lr": 0.5})
    before = run.bits()
    run.optimizer.zero_grad()
    extra(torch.tensor([3, 4])).square().sum().backward()
    run.optimizer.step()
    assert differences(run.bits(), before) == []
    assert run.optimizer.state[extra.weight]["step"] == 1
    run.train(batches(1))
    assert run.optimizer.state[run.model.table.weight]["step"] == 3


def test_an_added_group_inherits_the_default_memory_and_keeps_dense_parameters_exact():
    run = Run.start(PRESET_PLANS["lean"])
    layer = nn.Linear(3, 2)
    run.optimizer.add_param_group({"params": layer.parameters()})
    layer(torch.ones(1, 3)).sum().backward()
    run.optimizer.step()
    assert run.optimizer.param_groups[-1]["memory"] == so.storage.PRESETS["lean"]
    assert run.optimizer.state[layer.weight]["first_values"].shape == layer.weight.shape


def stepped(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    """The parameter after four steps on the same dense gradients."""
    generator = torch.Generator().manual_seed(4)
    for _ in range(4):
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return parameter.detach()


def test_a_group_that_drops_the_momentum_drops_it_for_dense_gradients_too():
    ours, theirs = nn.Parameter(torch.ones(6, 3)), nn.Parameter(torch.ones(6, 3))
    dropped = so.SGD([{"params": [ours], "memory": "lean"}], lr=0.1, momentum=0.9)
    plain = torch.optim.SGD([theirs], lr=0.1, momentum=0.0)
    torch.testing.assert_close(stepped(dropped, ours), stepped(plain, theirs))
    assert so.memory_report(dropped).state_bytes == 0


def test_a_group_that_drops_the_first_moment_drops_it_for_dense_gradients_too():
    ours, theirs = nn.Parameter(torch.ones(6, 3)), nn.Parameter(torch.ones(6, 3))
    memory = so.Memory(first=None, second=so.Exact())
    dropped = so.Adam([{"params": [ours], "memory": memory}], lr=0.1)
    plain = torch.optim.Adam([theirs], lr=0.1, betas=(0.0, 0.999))
    torch.testing.assert_close(stepped(dropped, ours), stepped(plain, theirs))


def test_a_clip_bounds_the_steps_of_exact_dense_parameters():
    parameter = nn.Parameter(torch.zeros(6, 3))
    memory = so.Memory(first=so.Exact(), second=so.Exact(), clip=0.25)
    optimizer = so.Adam([{"params": [parameter], "memory": memory}], lr=0.1)
    parameter.grad = torch.ones(6, 3)  # a first step is one learning rate long
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((6, 3), -0.025))


def test_tables_of_one_optimizer_have_hashes_of_their_own():
    run = Run.start(PRESET_PLANS["lean"]).train(batches(1))
    state = run.optimizer.state
    words = [state[t.weight]["second_words"] for t in (run.model.table, run.model.late)]
    assert not torch.equal(*words)


def test_several_optimizers_share_a_model():
    run = Run.start(PRESET_PLANS["lean"])
    tables = so.Adagrad([run.model.table.weight], lr=0.1)
    rest = torch.optim.SGD(
        [p for p in run.model.parameters() if p is not run.model.table.weight], lr=0.1
    )
    (ids,) = batches(1)
    found = []
    for _ in range(12):
        found.append(run.backward(ids).item())
        tables.step()
        rest.step()
    assert found[-1] < 0.7 * found[0]
    assert set(tables.state) == {run.model.table.weight}


# -- hooks and closures --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_step_hooks_run_around_the_step(kind):
    run = Run.start(Plan(kind, "paper-mv"))
    run.backward(batches(1)[0])
    weight = run.model.table.weight
    before = weight.detach().clone()
    seen = []
    run.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: seen.append(torch.equal(weight, before))
    )
    handle = run.optimizer.register_step_post_hook(
        lambda optimizer, args, kwargs: seen.append(torch.equal(weight, before))
    )
    run.optimizer.step()
    assert seen == [True, False]
    handle.remove()
    run.optimizer.step()
    assert seen == [True, False, False]


def test_a_hook_for_all_optimizers_sees_ours():
    seen = []
    handle = register_optimizer_step_post_hook(
        lambda optimizer, args, kwargs: seen.append(type(optimizer))
    )
    try:
        for kind in KINDS:
            Run.start(Plan(kind, "paper-mv")).train(batches(1))
    finally:
        handle.remove()
    assert seen == KINDS


def test_an_optimizer_in_the_backward_pass_frees_gradients_early():
    model, twin = TinyModel(), TinyModel()
    twin.load_state_dict(model.state_dict())
    own = {p: so.Adam([p], lr=0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    model.loss(batches(1)[0]).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    twin.loss(batches(1)[0]).backward()
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        so.Adam([other], lr=0.1).step()
        assert torch.equal(parameter, other)


@tiny_runs.each(PRESET_PLANS)
def test_a_closure_is_called_once_with_gradients_on_and_its_loss_returned(plan):
    run, twin = Run.start(plan), Run.start(plan).train(batches(1))
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        return run.backward(batches(1)[0])

    with torch.no_grad():
        loss = run.optimizer.step(closure)
    assert calls == [True]
    assert loss.item() == Run.start(plan).backward(batches(1)[0]).item()
    assert differences(run.bits(), twin.bits()) == []


def test_a_step_without_a_closure_returns_none():
    run = Run.start(PRESET_PLANS["lean"])
    assert run.optimizer.step() is None
    run.backward(batches(1)[0])
    assert run.optimizer.step() is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", ["lean", "exact", "paper-mv"])
def test_maximize_climbs_what_minimizing_the_negative_descends(kind, memory):
    up = Run.start(Plan(kind, memory, {"maximize": True}))
    down = Run.start(Plan(kind, memory))
    for ids in batches(3):
        up.optimizer.zero_grad()
        up.model.loss(ids).backward()
        up.optimizer.step()
        down.optimizer.zero_grad()
        down.model.loss(ids).neg().backward()
        down.optimizer.step()
    found = differences(up.bits(), down.bits())
    assert sorted(found) == [f"group {i}: maximize" for i in range(3)]


@pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("memory", ["exact", "paper-mv"])
def test_momentum_may_be_switched_on_and_off(memory, is_sparse):
    late, never = nn.Parameter(torch.ones(40, 4)), nn.Parameter(torch.ones(40, 4))
    ours = so.SGD([late], lr=0.1, momentum=0.0, memory=memory)
    theirs = torch.optim.SGD([never], lr=0.1, momentum=0.0)
    for momentum in (0.0, 0.9, 0.9, 0.0, 0.9):
        for parameter, optimizer in ((late, ours), (never, theirs)):
            optimizer.param_groups[0]["momentum"] = momentum
            gradient = torch.zeros(40, 4)
            gradient[3] = 1.0
            parameter.grad = gradient
            if is_sparse and optimizer is ours:
                parameter.grad = gradient.to_sparse(1)
            optimizer.step()
    torch.testing.assert_close(late, never)


# -- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_is_an_optimizer_of_the_same_kind_that_still_takes_groups(kind, copied):
    run = Run.start(Plan(kind, "paper-mv")).train(batches(1))
    model, optimizer = copied((run.model, run.optimizer))
    assert type(optimizer) is kind
    assert repr(optimizer) == repr(run.optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "memory": "paper-mv"})
    with pytest.raises(ValueError, match="fused is not supported"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "fused": True})
    Run(model, optimizer).train(batches(1))


def test_state_follows_the_order_of_parameters_and_not_the_model():
    """What an optimizer does depends on its parameters' numbers alone."""
    first, second = Run.start(PRESET_PLANS["lean"]), Run.start(PRESET_PLANS["lean"], seed=3)
    second.model.load_state_dict(first.model.state_dict())
    assert differences(first.train(batches(3)).bits(), second.train(batches(3)).bits()) == []


def test_it_prints_its_groups():
    text = repr(Run.start(PRESET_PLANS["lean"]).optimizer)
    assert "Parameter Group 2" in text
    assert "lr: 0.05" in text


def test_an_unused_optimizer_goes_away_with_its_tables():
    """Nothing global holds on to parameters or state."""
    import gc
    import weakref

    run = Run.start(PRESET_PLANS["paper-mv"]).train(batches(2))
    held = [weakref.ref(run.optimizer), weakref.ref(run.model.table.weight)]
    del run
    gc.collect()
    assert [reference() for reference in held] == [None, None]


# -- torch.compile -------------------------------------------------------------------------------

pytest_compile = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script.* is deprecated:DeprecationWarning"),
]


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def with_marks(*marks: pytest.MarkDecorator) -> Callable[[Any], Any]:
    return lambda test: functools.reduce(lambda marked, mark: mark(marked), marks, test)


@with_marks(*pytest_compile)
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("kind", "memory"),
    [*itertools.product([so.Adam], ["lean", "exact", "paper-mv"]), (so.SGD, "paper-mv")],
)
def test_a_compiled_training_step_gives_the_bits_of_a_plain_one(kind, memory):
    plain, compiled = Run.start(Plan(kind, memory)), Run.start(Plan(kind, memory))

    def step(ids: Tensor) -> Tensor:
        loss = compiled.backward(ids)
        compiled.optimizer.step()
        return loss

    fast = torch.compile(step, backend="eager")
    for ids in batches(3):
        fast(ids)
    assert differences(compiled.bits(), plain.train(batches(3)).bits()) == []


@with_marks(*pytest_compile)
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_training_step_compiled_ahead_of_time_gives_the_same_bits():
    plain, compiled = Run.start(PRESET_PLANS["lean"]), Run.start(PRESET_PLANS["lean"])
    fast = torch.compile(lambda ids: compiled.train([ids]), backend="aot_eager")
    for ids in batches(3):
        fast(ids)
    assert differences(compiled.bits(), plain.train(batches(3)).bits()) == []


@with_marks(*pytest_compile)
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_model_trains():
    plain, compiled = Run.start(PRESET_PLANS["lean"]), Run.start(PRESET_PLANS["lean"])
    compiled.model.forward = torch.compile(compiled.model.forward, backend="aot_eager")
    assert differences(compiled.train(batches(3)).bits(), plain.train(batches(3)).bits()) == []
