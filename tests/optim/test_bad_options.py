"""Contract 8: bad options, memories and groups raise, say what is wrong, and change nothing."""

import inspect
import math
from typing import Any

import pytest
import torch
from refusals import refuse_step, trained
from tiny_runs import MEMORIES, OPTIMIZERS, Run, batches, differences
from torch import nn

import sketchoptim as so

NAN, INF = math.nan, math.inf

# Each number that an optimizer takes; what counts as a number is in tests/test_validation.py.
NUMBERS = {
    "Adam": ("lr", "eps", "weight_decay"),
    "AdamW": ("lr", "eps", "weight_decay"),
    "RMSprop": ("lr", "alpha", "eps", "weight_decay"),
    "Adagrad": ("lr", "lr_decay", "eps", "initial_accumulator_value", "weight_decay"),
    "SGD": ("lr", "momentum", "dampening", "weight_decay"),
}
BAD_RATES = {
    "NaN": (NAN, ValueError, "finite and >= 0, got nan"),
    "inf": (INF, ValueError, "finite and >= 0, got inf"),
    "negative": (-0.1, ValueError, "finite and >= 0, got -0.1"),
    "a tensor of NaN": (torch.tensor(NAN), ValueError, "finite and >= 0, got tensor"),
    "two numbers": (torch.ones(2), ValueError, r"one number, got a tensor of shape \[2\]"),
    "no number": (torch.ones(0), ValueError, r"one number, got a tensor of shape \[0\]"),
    "an int too large for a float": (10**400, ValueError, ""),
    "a word": ("0.1", TypeError, "a number, got '0.1'"),
    "nothing": (None, TypeError, "a number, got None"),
    "a flag": (True, TypeError, "a number, got True"),
    "a list": ([0.1], TypeError, r"a number, got \[0.1\]"),
}
BETAS = [
    ((1.0, 0.999), ValueError, r"^betas\[0\] must be in \[0, 1\), got 1.0"),
    ((0.9, NAN), ValueError, r"^betas\[1\] must be in \[0, 1\), got nan"),
    ((0.9, "b"), TypeError, r"^betas\[1\] must be a number, got 'b'"),
    ((0.9, torch.tensor(0.9)), ValueError, "^betas must be two floats or two tensors, got"),
    ((0.9,), ValueError, r"^betas must be two numbers, got \(0.9,\)"),
    ((0.9, 0.99, 0.999), ValueError, r"^betas must be two numbers"),
    (0.9, ValueError, r"^betas must be two numbers, got 0.9"),
]
CHOICES = r"^nonfinite must be one of \['raise', 'skip', 'unchecked'\], got "
BAD_OPTIONS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    *(
        (kind, {name: -0.1}, ValueError, rf"^{name} must be .*, got -0.1$")
        for kind, names in NUMBERS.items()
        for name in names
    ),
    ("RMSprop", {"alpha": 1.0}, ValueError, r"^alpha must be in \[0, 1\), got 1.0"),
    ("SGD", {"momentum": 1.0}, ValueError, r"^momentum must be in \[0, 1\), got 1.0"),
    *(("Adam", {"betas": betas}, error, pattern) for betas, error, pattern in BETAS),
    *(
        (kind, {"maximize": "no"}, TypeError, "^maximize must be True or False, got 'no'")
        for kind in OPTIMIZERS
    ),
    *((kind, {"nonfinite": "ignore"}, ValueError, f"{CHOICES}'ignore'$") for kind in OPTIMIZERS),
    ("Adam", {"nonfinite": None}, ValueError, f"{CHOICES}None$"),
    (
        "SGD",
        {"rounding": "up"},
        ValueError,
        r"^rounding must be one of \[None, 'stochastic', 'nearest'\], got 'up'$",
    ),
    ("SGD", {"nesterov": 1}, TypeError, "^nesterov must be True or False, got 1"),
    ("SGD", {"nesterov": True, "momentum": 0.0}, ValueError, "^nesterov needs momentum > 0"),
    (
        "SGD",
        {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
        ValueError,
        "^nesterov needs .*dampening=0.1",
    ),
]
BAD_MEMORIES = [
    ("Adam", "leen", ValueError, r"^memory must be a Memory or one of \['lean', .*got 'leen'"),
    ("Adam", None, TypeError, "^memory must be a preset's name or a Memory, got None"),
    ("Adam", so.Exact(), TypeError, "^memory must be a preset's name or a Memory, got Exact"),
    *(
        (kind, so.Memory(first=so.Exact()), ValueError, f"^memory.second must be .*for {kind}")
        for kind in ("Adam", "AdamW", "RMSprop", "Adagrad")
    ),
    *(
        (kind, MEMORIES["ratio, float32"], ValueError, f"divides two moments, but {kind} has one")
        for kind in ("RMSprop", "Adagrad", "SGD")
    ),
]
# What an error about a flag of torch.optim recommends instead.
FLAGS = {"amsgrad": "so.Adagrad", "centered": "so.Adam", "differentiable": "torch.optim"}


def named(cases: list[tuple[Any, ...]]) -> list[str]:
    return [f"{kind}-{option}" for kind, option, *_ in cases]


def a_parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(3, 2))


# -- constructors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "error", "pattern"), BAD_OPTIONS, ids=named(BAD_OPTIONS)
)
def test_a_constructor_refuses_options_out_of_range(kind, options, error, pattern):
    with pytest.raises(error, match=pattern):
        OPTIMIZERS[kind]([a_parameter()], **options)


@pytest.mark.parametrize(("rate", "error", "pattern"), BAD_RATES.values(), ids=BAD_RATES)
def test_a_constructor_refuses_what_is_no_learning_rate(rate, error, pattern):
    with pytest.raises(error, match=f"^lr must be {pattern}"):
        so.Adam([a_parameter()], lr=rate)


@pytest.mark.parametrize(
    ("kind", "memory", "error", "pattern"), BAD_MEMORIES, ids=named(BAD_MEMORIES)
)
def test_a_constructor_refuses_a_memory_it_cannot_use(kind, memory, error, pattern):
    with pytest.raises(error, match=pattern):
        OPTIMIZERS[kind]([a_parameter()], memory=memory)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_flag_of_torch_optim_that_is_refused_names_what_to_use(kind):
    for flag in FLAGS.keys() & inspect.signature(OPTIMIZERS[kind]).parameters:
        with pytest.raises(ValueError, match=f"^{flag} must be False in {kind}; .*{FLAGS[flag]}"):
            OPTIMIZERS[kind]([a_parameter()], **{flag: True})


def test_options_are_validated_before_parameters():
    with pytest.raises(ValueError, match=r"^lr must be"):
        so.Adam([], lr=-1.0)


@pytest.mark.parametrize(
    ("params", "error", "pattern"),
    [
        ([], ValueError, "empty parameter list"),
        (torch.ones(3), TypeError, "iterable of Tensors"),
        ([3.0], TypeError, "can only optimize Tensors"),
        ([torch.ones(3, requires_grad=True) * 2], ValueError, "non-leaf"),
        ([{"params": [a_parameter()], "memory": "leen"}], ValueError, "memory must be"),
        ([{"params": [a_parameter()], "lr": NAN}], ValueError, "lr must be"),
    ],
    ids=["empty", "tensor", "number", "non-leaf", "memory", "lr"],
)
def test_a_constructor_refuses_parameters_and_groups(params, error, pattern):
    with pytest.raises(error, match=pattern):
        so.Adam(params)


# -- groups ----------------------------------------------------------------------------------------

BAD_GROUPS = [
    ("Adam", {"lr": NAN}, ValueError, "^lr must be finite"),
    ("RMSprop", {"alpha": 1.0}, ValueError, r"^alpha must be in \[0, 1\)"),
    ("SGD", {"nesterov": True}, ValueError, "^nesterov needs momentum > 0"),
    ("Adam", {"memory": "leen"}, ValueError, "^memory must be a Memory or one of"),
    ("Adagrad", {"memory": so.Memory(first=so.Exact())}, ValueError, "^memory.second must be"),
    *(
        ("Adam", {flag: True}, ValueError, f"^{flag} must be False in Adam; .*{remedy}")
        for flag, remedy in FLAGS.items()
    ),
    ("Adam", {"foreach": True, "fused": True}, ValueError, "^foreach and fused must not both"),
    ("Adam", {"fused": "yes"}, ValueError, r"^fused must be one of \[None, False, True\]"),
    ("Adam", {"compress": "dense"}, ValueError, "^compress must be one of"),
    ("Adam", {"memmory": "lean-0.1"}, ValueError, "'memmory'; did you mean 'memory'"),
    ("SGD", {"weigth_decay": 0.1}, ValueError, "did you mean 'weight_decay'"),
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


def test_a_group_that_is_no_dict_is_refused(runs):
    with pytest.raises(TypeError, match="a group must be a dict, got list"):
        runs["Adam"].optimizer.add_param_group([a_parameter()])


# -- steps -----------------------------------------------------------------------------------------


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
    refuse_step(run, ValueError, "lr must be finite and >= 0, got nan")
