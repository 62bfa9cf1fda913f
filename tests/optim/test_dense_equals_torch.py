"""Dense parameters move as by torch.optim, to the last bit."""

import copy

import pytest
import torch
from gradients import start
from torch import nn
from torch_twins import STEPS, check_same_bits, step_both

import sketchoptim as so

PAIRS = {
    name: (getattr(so, name), getattr(torch.optim, name))
    for name in ("Adam", "AdamW", "SGD", "Adagrad", "RMSprop")
}
CASES = [
    ("Adam", {}),
    ("Adam", {"betas": (0.5, 0.9), "eps": 1e-3}),
    ("Adam", {"weight_decay": 0.1}),
    ("Adam", {"maximize": True, "weight_decay": 0.1}),
    ("AdamW", {}),
    ("AdamW", {"weight_decay": 0.3}),
    ("AdamW", {"weight_decay": 0.3, "maximize": True}),
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.8, "dampening": 0.3}),
    ("SGD", {"momentum": 0.8, "nesterov": True}),
    ("SGD", {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
    ("SGD", {"weight_decay": 0.1}),
    ("SGD", {"maximize": True}),
    ("Adagrad", {}),
    ("Adagrad", {"lr_decay": 0.1}),
    ("Adagrad", {"initial_accumulator_value": 0.5, "eps": 1e-3}),
    ("Adagrad", {"lr_decay": 0.01, "weight_decay": 0.1, "maximize": True}),
    ("RMSprop", {}),
    ("RMSprop", {"alpha": 0.7, "eps": 1e-3}),
    ("RMSprop", {"weight_decay": 0.1}),
    ("RMSprop", {"maximize": True, "weight_decay": 0.1}),
    *((name, {"foreach": True, "weight_decay": 0.1}) for name in PAIRS),
    *((name, {"fused": True, "weight_decay": 0.1}) for name in PAIRS if name != "RMSprop"),
    ("SGD", {"fused": True, "momentum": 0.8, "dampening": 0.3}),
    ("SGD", {"foreach": True, "momentum": 0.8, "nesterov": True}),
]
SHAPES = [(), (1,), (7,), (5, 3), (4, 2, 3), (3, 2, 2, 2), (0,), (0, 4), (3, 0)]


def pair(name, parameters, **options):
    """Our optimizer and torch's, each over its own copy of the parameters."""
    ours, theirs = PAIRS[name]
    copies = [copy.deepcopy(parameters) for _ in range(2)]
    options = {"lr": 0.05, **options}
    return (copies[0], ours(copies[0], **copy.deepcopy(options))), (
        copies[1],
        theirs(copies[1], **copy.deepcopy(options)),
    )


def numbered(shape, *, seed, dtype=torch.float64):
    return nn.Parameter(start(shape, seed=seed, dtype=dtype))


def random_like(parameter, generator):
    drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return drawn.to(parameter.dtype)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_dense_gradients_in_float64_give_the_bits_of_torch(name, options):
    parameters = [numbered(shape, seed=seed) for seed, shape in enumerate(SHAPES)]
    ours, theirs = pair(name, parameters, **options)
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        step_both(ours, theirs, [random_like(p, generator) for p in parameters])
        check_same_bits(ours, theirs)
    assert not torch.equal(ours[0][3], parameters[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_every_precision_follows_torch_bit_for_bit(name, dtype):
    parameters = [numbered(shape, seed=seed, dtype=dtype) for seed, shape in enumerate(SHAPES)]
    ours, theirs = pair(name, parameters, weight_decay=0.1)
    generator = torch.Generator().manual_seed(9)
    for _ in range(STEPS):
        step_both(ours, theirs, [random_like(p, generator) for p in parameters])
    check_same_bits(ours, theirs)


@pytest.mark.parametrize("name", PAIRS)
def test_non_contiguous_parameters_and_gradients_follow_torch_bit_for_bit(name):
    base = start((6, 4, 2), dtype=torch.float64)
    views = [base[:, :, 0].t(), base[::2, 1:, 1], base.permute(2, 0, 1)]
    parameters = [nn.Parameter(view) for view in views]
    assert not any(parameter.is_contiguous() for parameter in parameters)
    ours, theirs = pair(name, parameters, weight_decay=0.1)
    generator = torch.Generator().manual_seed(10)
    for _ in range(STEPS):
        gradients = [random_like(p, generator) for p in parameters]
        gradients[0] = gradients[0].t().contiguous().t()
        step_both(ours, theirs, gradients)
    check_same_bits(ours, theirs)


@pytest.mark.parametrize("name", PAIRS)
def test_a_parameter_without_a_gradient_stays_and_its_step_waits(name):
    parameters = [numbered((4, 2), seed=seed) for seed in range(3)]
    ours, theirs = pair(name, parameters)
    generator = torch.Generator().manual_seed(11)
    for step in range(STEPS):
        gradients = [random_like(p, generator) for p in parameters]
        gradients[0] = gradients[0] if step % 3 == 1 else None
        gradients[1] = gradients[1] if step > 5 else None
        step_both(ours, theirs, gradients)
        check_same_bits(ours, theirs)
    assert [int(ours[1].state[p]["step"]) for p in ours[0]] == [7, STEPS - 6, STEPS]


def group_options(name):
    """Three groups' worth of different options."""
    own = {
        "Adam": [{"betas": (0.5, 0.9)}, {"eps": 1e-2}, {"weight_decay": 0.1}],
        "AdamW": [{"betas": (0.5, 0.9)}, {"weight_decay": 0.4}, {"maximize": True}],
        "SGD": [{"momentum": 0.5}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1}],
        "Adagrad": [{"lr_decay": 0.1}, {"eps": 1e-2}, {"initial_accumulator_value": 0.2}],
        "RMSprop": [{"alpha": 0.5}, {"eps": 1e-2}, {"maximize": True}],
    }[name]
    return [{"lr": 0.02 * (1 + number), **options} for number, options in enumerate(own)]


@pytest.mark.parametrize("name", PAIRS)
def test_groups_have_their_own_options(name):
    parameters = [numbered((4, 2), seed=seed) for seed in range(4)]
    built = []
    for optimizer in PAIRS[name]:
        copies = copy.deepcopy(parameters)
        groups = [
            {"params": [p], **options}
            for p, options in zip(copies, group_options(name), strict=False)
        ]
        built.append((copies, optimizer([*groups, {"params": copies[3:]}])))
    ours, theirs = built
    if name == "Adagrad":
        # torch.optim.Adagrad fills its sums when it is built, before a group's value is known.
        for parameter, group in zip(theirs[0], theirs[1].param_groups, strict=True):
            theirs[1].state[parameter]["sum"].fill_(group["initial_accumulator_value"])
    generator = torch.Generator().manual_seed(12)
    for _ in range(STEPS):
        step_both(ours, theirs, [random_like(p, generator) for p in parameters])
        check_same_bits(ours, theirs)
