"""Contract 8: bad input raises, says what is wrong, and has changed nothing."""

import copy
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import tiny_runs
import torch
from tiny_runs import MEMORIES, PRESET_PLANS, Plan, Run, TinyModel, batches, differences
from torch import Tensor, nn

import sketchoptim as so

NAN, INF = math.nan, math.inf
OPTIMIZERS = {kind.__name__: kind for kind in (so.Adam, so.AdamW, so.RMSprop, so.Adagrad, so.SGD)}
COMPRESSED = {name: memory for name, memory in MEMORIES.items() if not name.startswith("exact")}
COMPRESSED_PLANS = {name: plan for name, plan in PRESET_PLANS.items() if name != "exact"}
WITH_ONE_MOMENT = {name: it for name, it in COMPRESSED.items() if not name.startswith("ratio")}

# -- hyper-parameters ----------------------------------------------------------------------------

NUMBERS = {
    "Adam": ("lr", "eps", "weight_decay"),
    "AdamW": ("lr", "eps", "weight_decay"),
    "RMSprop": ("lr", "alpha", "eps", "weight_decay"),
    "Adagrad": ("lr", "lr_decay", "eps", "initial_accumulator_value", "weight_decay"),
    "SGD": ("lr", "momentum", "dampening", "weight_decay"),
}
NOT_NUMBERS = [
    (NAN, ValueError),
    (INF, ValueError),
    (-INF, ValueError),
    (-0.1, ValueError),
    (torch.tensor(NAN), ValueError),
    ("0.1", TypeError),
    (None, TypeError),
    (True, TypeError),
    ([0.1], TypeError),
    (torch.ones(2), TypeError),
]
DECAYS = {"RMSprop": "alpha", "SGD": "momentum"}

BAD_OPTIONS = [
    *(
        (kind, {name: value}, error, rf"^{name} must be ")
        for kind, names in NUMBERS.items()
        for name in names
        for value, error in NOT_NUMBERS
    ),
    *(
        (kind, {name: 1.0}, ValueError, rf"^{name} must be in \[0, 1\), got 1.0")
        for kind, name in DECAYS.items()
    ),
    *(
        (kind, {"betas": betas}, error, pattern)
        for kind in ("Adam", "AdamW")
        for betas, error, pattern in [
            ((1.0, 0.999), ValueError, r"^betas\[0\] must be in \[0, 1\), got 1.0"),
            ((0.9, NAN), ValueError, r"^betas\[1\] must be in \[0, 1\), got nan"),
            ((0.9, -0.1), ValueError, r"^betas\[1\] must be in \[0, 1\)"),
            ((0.9, "b"), TypeError, r"^betas\[1\] must be a number, got 'b'"),
            ((0.9,), ValueError, r"^betas must be two numbers, got \(0.9,\)"),
            ((0.9, 0.99, 0.999), ValueError, r"^betas must be two numbers"),
            (0.9, ValueError, r"^betas must be two numbers, got 0.9"),
            (None, ValueError, r"^betas must be two numbers, got None"),
        ]
    ),
    *(
        (kind, options, error, pattern)
        for kind in OPTIMIZERS
        for options, error, pattern in [
            ({"maximize": "no"}, TypeError, "^maximize must be True or False, got 'no'"),
            ({"nonfinite": "ignore"}, ValueError, '^nonfinite must be "raise" or "skip", got'),
            ({"nonfinite": None}, ValueError, '^nonfinite must be "raise" or "skip", got None'),
        ]
    ),
    ("SGD", {"nesterov": 1}, TypeError, "^nesterov must be True or False, got 1"),
    ("SGD", {"nesterov": True, "momentum": 0.0}, ValueError, "^nesterov needs momentum > 0"),
    ("SGD", {"nesterov": True, "dampening": 0.1}, ValueError, "^nesterov needs .*dampening=0.1"),
]

BAD_MEMORIES = [
    *(
        (kind, memory, error, pattern)
        for kind in OPTIMIZERS
        for memory, error, pattern in [
            ("leen", ValueError, r"^memory must be a Memory or one of \['lean', .*got 'leen'"),
            (None, TypeError, "^memory must be a preset's name or a Memory, got None"),
            (so.Exact(), TypeError, "^memory must be a preset's name or a Memory, got Exact"),
            ({"second": None}, TypeError, "^memory must be a preset's name or a Memory, got {"),
        ]
    ),
    *(
        (kind, so.Memory(first=so.Exact()), ValueError, f"^memory.second must be .*for {kind}")
        for kind in ("Adam", "AdamW", "RMSprop", "Adagrad")
    ),
    *(
        (kind, MEMORIES["ratio, float32"], ValueError, f"divides two moments, but {kind} has one")
        for kind in ("RMSprop", "Adagrad", "SGD")
    ),
]

FLAGS = ["amsgrad", "centered", "foreach", "fused", "capturable", "differentiable"]


def named(cases: list[tuple[Any, ...]]) -> list[str]:
    return [f"{kind}-{option}" for kind, option, *_ in cases]


def a_parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(3, 2))


@pytest.mark.parametrize(
    ("kind", "options", "error", "pattern"), BAD_OPTIONS, ids=named(BAD_OPTIONS)
)
def test_a_constructor_refuses_options_out_of_range(kind, options, error, pattern):
    with pytest.raises(error, match=pattern):
        OPTIMIZERS[kind]([a_parameter()], **options)


@pytest.mark.parametrize(
    ("kind", "memory", "error", "pattern"), BAD_MEMORIES, ids=named(BAD_MEMORIES)
)
def test_a_constructor_refuses_a_memory_it_cannot_use(kind, memory, error, pattern):
    with pytest.raises(error, match=pattern):
        OPTIMIZERS[kind]([a_parameter()], memory=memory)


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_constructor_refuses_flags_of_torch_optim(kind, flag):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{flag}'"):
        OPTIMIZERS[kind]([a_parameter()], **{flag: True})


@pytest.mark.parametrize(
    ("params", "error", "pattern"),
    [
        ([], ValueError, "empty parameter list"),
        (torch.ones(3), TypeError, "iterable of Tensors"),
        ([3.0], TypeError, "can only optimize Tensors"),
        ([torch.ones(3, requires_grad=True) * 2], ValueError, "non-leaf"),
        ([{"params": [a_parameter()], "memory": "leen"}], ValueError, "memory must be"),
        ([{"params": [a_parameter()], "lr": NAN}], ValueError, "lr must be"),
        (
            [{"params": [a_parameter()], "fused": True}],
            ValueError,
            "fused is not supported by Adam",
        ),
    ],
    ids=["empty", "tensor", "number", "non-leaf", "memory", "lr", "flag"],
)
def test_a_constructor_refuses_parameters_and_groups(params, error, pattern):
    with pytest.raises(error, match=pattern):
        so.Adam(params)


# -- groups --------------------------------------------------------------------------------------


def trained(kind: str = "Adam", **options: Any) -> Run:
    memory = "paper-mv" if kind == "SGD" else "lean"
    return Run.start(Plan(OPTIMIZERS[kind], memory, options)).train(batches(2))


BAD_GROUPS = [
    *((kind, options, error, pattern) for kind, options, error, pattern in BAD_OPTIONS),
    *((kind, {"memory": memory}, error, pattern) for kind, memory, error, pattern in BAD_MEMORIES),
    *(
        (kind, {flag: True}, ValueError, f"^{flag} is not supported by {kind}; leave it out")
        for kind in OPTIMIZERS
        for flag in FLAGS
    ),
    ("Adam", {"decoupled_weight_decay": True}, ValueError, "^decoupled_weight_decay .* see AdamW"),
    ("AdamW", {"decoupled_weight_decay": False}, ValueError, "^decoupled_weight_decay .* see Adam"),
]


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    """A trained run for each optimizer, which no refused call may change."""
    return {kind: trained(kind) for kind in OPTIMIZERS}


@pytest.mark.parametrize(("kind", "options", "error", "pattern"), BAD_GROUPS, ids=named(BAD_GROUPS))
def test_a_refused_group_leaves_the_optimizer_as_it_was(runs, kind, options, error, pattern):
    run = runs[kind]
    before, description = run.bits(), repr(run.optimizer)
    group = {"params": [a_parameter()], **options}
    given = dict(group)
    with pytest.raises(error, match=pattern):
        run.optimizer.add_param_group(group)
    assert differences(run.bits(), before) == []
    assert repr(run.optimizer) == description
    assert group == given


@pytest.mark.parametrize(
    ("params", "error", "pattern"),
    [
        (lambda run: [run.model.table.weight], ValueError, "more than one parameter group"),
        (lambda run: [torch.ones(2, requires_grad=True) * 1], ValueError, "non-leaf"),
        (lambda run: ["weights"], TypeError, "can only optimize Tensors"),
        (lambda run: {run.model.table.weight}, TypeError, "ordered collection"),
    ],
    ids=["twice", "non-leaf", "string", "set"],
)
def test_a_group_that_torch_refuses_leaves_the_optimizer_as_it_was(runs, params, error, pattern):
    run = runs["Adam"]
    before = run.bits()
    with pytest.raises(error, match=pattern):
        run.optimizer.add_param_group({"params": params(run)})
    assert differences(run.bits(), before) == []
    assert len(run.optimizer.param_groups) == 3


# -- steps ---------------------------------------------------------------------------------------


def refuse_step(run: Run, error: type[Exception], pattern: str) -> None:
    """The step raises; parameters, gradients and state are what they were."""
    before = run.bits()
    gradients = [copy.deepcopy(parameter.grad) for parameter in run.model.parameters()]
    with pytest.raises(error, match=pattern):
        run.optimizer.step()
    assert differences(run.bits(), before) == []
    for parameter, gradient in zip(run.model.parameters(), gradients, strict=True):
        if gradient is not None and gradient.layout in (torch.strided, torch.sparse_coo):
            assert torch.equal(dense(parameter.grad).nan_to_num(7), dense(gradient).nan_to_num(7))


def dense(gradient: Tensor) -> Tensor:
    """The values of a gradient, also where its ids are out of range."""
    return gradient._values() if gradient.is_sparse else gradient


@pytest.mark.parametrize(
    ("kind", "options", "error", "pattern"), BAD_OPTIONS, ids=named(BAD_OPTIONS)
)
def test_a_step_refuses_options_that_went_out_of_range(runs, kind, options, error, pattern):
    """In the last group: those before it stay as they are."""
    run = runs[kind]
    run.backward(batches(1)[0])
    group = run.optimizer.param_groups[-1]
    kept = {name: group[name] for name in options}
    group.update(options)
    try:
        refuse_step(run, error, pattern)
    finally:
        group.update(kept)


def test_a_step_refuses_a_learning_rate_that_a_scheduler_made_nan():
    run = trained()
    schedule = torch.optim.lr_scheduler.LambdaLR(
        run.optimizer, [lambda epoch: 1.0, lambda epoch: 1.0, lambda epoch: NAN if epoch else 1.0]
    )
    run.train(batches(1))
    schedule.step()
    run.backward(batches(1)[0])
    refuse_step(run, ValueError, "lr must be >= 0 and finite, got nan")


OTHER_MEMORIES = {
    "row-wise": so.Memory(second=so.RowWise()),
    "rank one": so.Memory(second=so.RankOne()),
    "top singular": so.Memory(second=so.TopSingular()),
    "exact": so.Memory(second=so.Exact()),
    "by element": MEMORIES["linear by element, float32"],
    "of another depth": so.Memory(second=so.Sketched(depth=2)),
    "of another dtype": so.Memory(second=so.Sketched(dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("memory", OTHER_MEMORIES.values(), ids=OTHER_MEMORIES.keys())
def test_a_step_refuses_a_memory_that_the_state_was_not_made_for(runs, memory):
    run = runs["Adam"]
    run.backward(batches(1)[0])
    group = run.optimizer.param_groups[1]
    kept = group["memory"]
    group["memory"] = memory
    try:
        refuse_step(run, ValueError, "second moment .* must be kept as in earlier steps, got")
    finally:
        group["memory"] = kept


@pytest.mark.parametrize(
    "pair", [*itertools.permutations(OTHER_MEMORIES, 2)], ids=lambda pair: " then ".join(pair)
)
def test_no_memory_takes_over_the_state_of_another(pair):
    before, after = (OTHER_MEMORIES[name] for name in pair)
    run = Run.start(Plan(so.Adam, before)).train(batches(1))
    run.backward(batches(1)[0])
    for group in run.optimizer.param_groups:
        group["memory"] = after
    refuse_step(run, ValueError, "must be kept as in earlier steps")


def test_a_step_refuses_the_name_of_a_preset_put_into_a_group(runs):
    run = runs["Adam"]
    run.backward(batches(1)[0])
    group = run.optimizer.param_groups[2]
    kept = group["memory"]
    group["memory"] = "exact"
    try:
        refuse_step(run, TypeError, "memory of a group must be a Memory, got 'exact'")
    finally:
        group["memory"] = kept


def sparse(ids: list[int], like: Tensor, *, values: Tensor | None = None) -> Tensor:
    """A gradient whose ids nothing has checked."""
    if values is None:
        values = torch.ones(len(ids), *like.shape[1:])
    return torch.sparse_coo_tensor(torch.tensor([ids]), values, like.shape, check_invariants=False)


def with_values(parameter: Tensor, change: Callable[[Tensor], None]) -> Tensor:
    gradient = copy.deepcopy(parameter.grad)
    change(dense(gradient))
    return gradient


def an_element(value: float) -> Callable[[Tensor], None]:
    """A change that puts the value into the last place of the gradient."""

    def change(values: Tensor) -> None:
        values.view(-1)[-1] = value

    return change


BAD_IDS = {
    "too large": [0, 5, tiny_runs.ROWS],
    "far too large": [2**40],
    "negative": [3, -1],
    "both": [-5, tiny_runs.ROWS + 5],
}


@functools.cache
def trained_with(memory: str) -> Run:
    """A trained run, the same one for every call: refused steps leave it as it is."""
    return Run.start(Plan(so.Adam, MEMORIES[memory])).train(batches(2))


@pytest.mark.parametrize("ids", BAD_IDS.values(), ids=BAD_IDS.keys())
@pytest.mark.parametrize("memory", MEMORIES)
def test_a_step_refuses_row_ids_outside_the_table(memory, ids):
    run = trained_with(memory)
    run.backward(batches(1)[0])
    run.model.late.weight.grad = sparse([1], run.model.late.weight)
    run.model.table.weight.grad = sparse(ids, run.model.table.weight)
    pattern = rf"shape \[60, 6\] must have row ids between 0 and 59, got {min(ids)} to {max(ids)}"
    refuse_step(run, ValueError, pattern)


def test_ids_are_checked_in_a_gradient_that_calls_itself_coalesced():
    run = trained()
    weight = run.model.table.weight
    weight.grad = sparse([1, tiny_runs.ROWS], weight)._coalesced_(True)
    refuse_step(run, ValueError, "row ids between 0 and 59, got 1 to 60")


def swapped(parameter: Tensor, data: Tensor) -> None:
    """Puts other data into a parameter that keeps its gradient."""
    parameter.data = data


MISFITS = {
    "gradient of another shape": (
        lambda p: swapped(p, torch.ones(70, 6)),
        ValueError,
        r"gradient of the parameter of shape \[70, 6\] must have that shape, got \[60, 6\]",
    ),
    "gradient of another dtype": (
        lambda p: swapped(p, p.data.double()),
        TypeError,
        r"gradient of the parameter of shape \[60, 6\] must be torch.float64, got torch.float32",
    ),
    "sparse in both dimensions": (
        lambda p: setattr(p, "grad", torch.ones(60, 6).to_sparse()),
        ValueError,
        r"must be sparse in rows alone \(sparse_dim 1\), got 2",
    ),
}


@pytest.mark.parametrize("where", ["table", "late"])
@pytest.mark.parametrize(("spoil", "error", "pattern"), MISFITS.values(), ids=MISFITS.keys())
def test_a_step_refuses_a_gradient_that_does_not_fit(spoil, error, pattern, where):
    """Wherever it is, the parameters before it and behind it stay as they are."""
    run = trained()
    if where == "late":  # the same table, but behind the other
        run.optimizer.param_groups[0]["params"].reverse()
    run.backward(batches(1)[0])
    spoil(run.model.table.weight)
    refuse_step(run, error, pattern)


@pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("shape", [(70, 6), (60, 8), (60, 3, 2)], ids=str)
@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES.keys())
def test_a_step_refuses_a_parameter_that_was_resized(memory, shape, is_sparse):
    first, second = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(60, 6))
    optimizer = so.Adam([{"params": [first, second], "memory": memory}])

    def backward() -> None:
        for parameter in (first, second):
            rows = torch.ones(2, *parameter.shape[1:])
            gradient = sparse([0, 3], parameter, values=rows)
            parameter.grad = gradient if is_sparse else torch.ones_like(parameter)

    if is_sparse:
        backward()
    else:  # many rows at once crowd a sketch of eight buckets
        first.grad, second.grad = sparse([1], first), sparse([1], second)
    optimizer.step()
    second.grad = None
    second.data = torch.ones(shape)
    backward()
    before = tiny_runs.bits(optimizer, [("first", first), ("second", second)])
    with pytest.raises(ValueError, match=r"had shape \[60, 6\] in earlier steps; build the opt"):
        optimizer.step()
    after = tiny_runs.bits(optimizer, [("first", first), ("second", second)])
    assert differences(before, after) == []


@pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_refuses_exact_moments_of_another_dtype(kind, is_sparse):
    parameter = nn.Parameter(torch.ones(5, 2))
    optimizer = OPTIMIZERS[kind]([parameter], lr=0.1, memory="exact")

    def backward() -> None:
        parameter.grad = torch.ones_like(parameter)
        if is_sparse:
            parameter.grad = parameter.grad.to_sparse(1)

    backward()
    optimizer.step()
    parameter.grad = None
    parameter.data = parameter.data.bfloat16()
    backward()
    before = tiny_runs.bits(optimizer, [("p", parameter)])
    with pytest.raises(TypeError, match=r"is torch.bfloat16 but was torch.float32 in earlier"):
        optimizer.step()
    assert differences(tiny_runs.bits(optimizer, [("p", parameter)]), before) == []


UNFIT = {
    "complex64": (
        lambda ones: ones.to(torch.complex64),
        "real floating point, got torch.complex64",
    ),
    "complex128": (lambda ones: ones.to(torch.complex128), "real floating point, got torch.comp"),
    "sparse": (lambda ones: ones.to_sparse(1), "dense tensors, got torch.sparse_coo"),
    "sparse CSR": (lambda ones: ones.to_sparse_csr(), "dense tensors, got torch.sparse_csr"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES.keys())
@pytest.mark.parametrize(("convert", "pattern"), UNFIT.values(), ids=UNFIT.keys())
def test_a_step_refuses_parameters_it_cannot_move(convert, pattern, memory):
    good, bad = nn.Parameter(torch.ones(3, 2)), nn.Parameter(convert(torch.ones(3, 2)))
    optimizer = so.Adam([good, bad], memory=memory)
    good.grad, bad.grad = torch.ones(3, 2), convert(torch.ones(3, 2))
    with pytest.raises(TypeError, match=f"parameters must be {pattern}"):
        optimizer.step()
    assert torch.equal(good, torch.ones(3, 2))
    assert not optimizer.state


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_refuses_a_gradient_on_another_device():
    run = trained()
    run.backward(batches(1)[0])
    run.model.table.weight.data = run.model.table.weight.data.cuda()
    with pytest.raises(ValueError, match="must be on cuda:0, got cpu"):
        run.optimizer.step()


def test_a_closure_that_raises_changes_nothing():
    run = trained()

    def closure() -> float:
        run.backward(batches(1)[0])
        raise RuntimeError("no data")

    before = run.bits()
    with pytest.raises(RuntimeError, match="no data"):
        run.optimizer.step(closure)
    assert differences(run.bits(), before) == []


# -- gradients that are not finite ---------------------------------------------------------------

NONFINITE = {
    "NaN": NAN,
    "inf": INF,
    "-inf": -INF,
    "a square that overflows": 1e20,
    "a square that is just finite": 1.8e19,
    "the largest float32": torch.finfo(torch.float32).max,
}


@pytest.mark.parametrize("value", NONFINITE.values(), ids=NONFINITE.keys())
@pytest.mark.parametrize("where", ["table", "head"])
@pytest.mark.parametrize("memory", COMPRESSED)
def test_a_compressed_moment_refuses_a_gradient_that_is_not_finite(memory, where, value):
    run = trained_with(memory)
    run.backward(batches(1)[0])
    parameter = getattr(run.model, where).weight
    parameter.grad = with_values(parameter, an_element(value))
    refuse_step(run, ValueError, 'must be finite and within .* nonfinite="skip" skips and counts')


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@tiny_runs.each(COMPRESSED_PLANS)
def test_gradients_in_other_precisions_are_refused_too(plan, dtype):
    run = Run.start(plan, dtype=dtype).train(batches(2))
    run.backward(batches(1)[0])
    weight = run.model.table.weight
    weight.grad = with_values(weight, an_element(INF))
    refuse_step(run, ValueError, "must be finite")


def test_a_sum_of_finite_duplicates_that_overflows_is_refused():
    run = trained()
    weight = run.model.table.weight
    values = torch.full((2, 6), 3e38)
    weight.grad = sparse([4, 4], weight, values=values)
    refuse_step(run, ValueError, "must be finite")


def test_duplicates_that_cancel_are_finite():
    run = trained()
    weight = run.model.table.weight
    weight.grad = sparse([4, 4], weight, values=torch.tensor([[1e30], [-1e30]]).expand(2, 6))
    run.model.late.weight.grad = None
    row = weight.detach()[4].clone()
    run.optimizer.step()
    assert torch.equal(weight.detach()[4], row)


def test_weight_decay_of_a_row_that_is_not_finite_is_refused():
    run = trained(weight_decay=0.1)
    run.backward(batches(1)[0])
    with torch.no_grad():
        run.model.table.weight[batches(1)[0].flatten()[0]] = INF
    refuse_step(run, ValueError, "must be finite")


@pytest.mark.parametrize("steps", [1, 24])
@pytest.mark.parametrize("memory", WITH_ONE_MOMENT.values(), ids=WITH_ONE_MOMENT.keys())
@pytest.mark.parametrize("kind", ["RMSprop", "Adagrad"])
def test_the_largest_gradient_allowed_keeps_every_table_finite(kind, memory, steps):
    """Also when all rows have it, step after step, until the lazy scale is at its smallest."""
    options = {"alpha": 0.5} if kind == "RMSprop" else {}
    table = nn.Parameter(torch.ones(30, 6))
    optimizer = OPTIMIZERS[kind]([{"params": [table], "memory": memory}], **options)
    table.grad = sparse(list(range(30)), table, values=torch.full((30, 6), 2.0**40))
    for _ in range(steps):
        optimizer.step()
    kept = [value for value in optimizer.state[table].values() if isinstance(value, Tensor)]
    assert all(tensor.isfinite().all() for tensor in kept)
    assert table.isfinite().all()


@tiny_runs.each(COMPRESSED_PLANS)
def test_skipping_leaves_the_parameter_alone_and_counts(plan):
    plan = Plan(so.Adam, plan.memory, {"nonfinite": "skip"})
    run = Run.start(plan).train(batches(2))
    before = run.bits()
    for count in (1, 2):
        run.backward(batches(1)[0])
        weight = run.model.table.weight
        weight.grad = with_values(weight, an_element(NAN))
        run.optimizer.step()
        assert run.optimizer.state[weight]["skipped"] == count
    after = run.bits()
    changed = differences(after, before)
    assert [name for name in changed if name.startswith("table")] == ["table.weight: skipped"]
    for name in ("late.weight", "head.weight", "head.bias"):
        assert {name, f"{name}: step"} <= set(changed)


@tiny_runs.each(COMPRESSED_PLANS)
def test_a_skipped_step_is_as_if_it_had_not_been(plan):
    plan = Plan(so.Adam, plan.memory, {"nonfinite": "skip"})
    skipping, straight = Run.start(plan).train(batches(2)), Run.start(plan).train(batches(2))
    skipping.optimizer.zero_grad()
    weight = skipping.model.table.weight
    weight.grad = sparse([1, 2], weight, values=torch.full((2, 6), NAN))
    skipping.optimizer.step()
    found = differences(skipping.train(batches(2)).bits(), straight.train(batches(2)).bits())
    assert found == ["table.weight: skipped"]


def test_a_first_step_can_be_skipped():
    plan = Plan(so.Adam, "lean", {"nonfinite": "skip"})
    run = Run.start(plan)
    weight = run.model.table.weight
    weight.grad = sparse([1], weight, values=torch.full((1, 6), NAN))
    before = weight.detach().clone()
    run.optimizer.step()
    assert torch.equal(weight, before)
    assert run.optimizer.state[weight]["skipped"] == 1
    assert run.optimizer.state[weight]["step"] == 0
    run.train(batches(1))
    assert run.optimizer.state[weight]["step"] == 1


TWINS = {
    "Adam": (so.Adam, torch.optim.Adam, {"weight_decay": 0.1}),
    "AdamW": (so.AdamW, torch.optim.AdamW, {}),
    "RMSprop": (so.RMSprop, torch.optim.RMSprop, {}),
    "Adagrad": (so.Adagrad, torch.optim.Adagrad, {}),
    "SGD": (so.SGD, torch.optim.SGD, {"momentum": 0.9}),
}


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize(("ours", "theirs", "options"), TWINS.values(), ids=TWINS.keys())
def test_exact_storage_does_with_nonfinite_gradients_what_torch_does(ours, theirs, options, value):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    twin = copy.deepcopy(model)
    pairs = [(model, ours(model.parameters(), lr=0.1, **options))]
    pairs.append((twin, theirs(twin.parameters(), lr=0.1, **options)))
    for bad in (False, True, False):
        for layer, optimizer in pairs:
            optimizer.zero_grad()
            layer(torch.ones(2, 4)).square().sum().backward()
            if bad:
                layer.weight.grad[1, 2] = value
            optimizer.step()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
    assert not model.weight.isfinite().all() or value == 1e30


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e30])
def test_exact_sparse_adam_does_with_nonfinite_gradients_what_sparse_adam_does(value):
    model, twin = TinyModel(), TinyModel()
    twin.load_state_dict(model.state_dict())
    ours = so.Adam([model.table.weight], lr=0.1, memory="exact")
    theirs = torch.optim.SparseAdam([twin.table.weight], lr=0.1)
    for bad in (False, True, False):
        for optimizer, weight in ((ours, model.table.weight), (theirs, twin.table.weight)):
            values = torch.linspace(-1, 1, 12).view(2, 6)
            if bad:
                values[1, 3] = value
            weight.grad = sparse([2, 7], weight, values=values)
            optimizer.step()
    torch.testing.assert_close(model.table.weight, twin.table.weight, equal_nan=True)
