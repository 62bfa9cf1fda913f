"""Optimizers that other code builds: from options, from flat parameters, from a module."""

import pickle
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import MEMORIES, OPTIMIZERS
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import sketchoptim as so
from sketchoptim.optim import Optimizer, Rule, _adam
from sketchoptim.optim._torch_step import torch_step_counts


class Signs(Optimizer):
    """An optimizer of one's own that has a rate and a memory, and no other option."""

    moment_names = ()

    def __init__(
        self, params: Any, lr: float = 1.0, memory: Any = "lean-0.1", **options: Any
    ) -> None:
        super().__init__(params, lr=lr, memory=memory, **options)

    def rule(self, group: Any, step: int, *, memory: so.Memory, is_sparse: bool) -> Rule:
        return Rule(lambda rows, gradient, *_: rows - group["lr"] * gradient.sign())


class PlainSigns(Signs):
    def __init__(self, params: Any, lr: float = 1.0, memory: Any = "lean-0.1") -> None:
        super().__init__(params, lr, memory)


KINDS: dict[str, type[Optimizer]] = {**OPTIMIZERS, "own": PlainSigns}
WITHOUT_PARAMETERS = {"params", "param_names"}


def a_parameter(*shape: int, is_sparse: bool = False) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(shape))
    gradient = torch.ones(shape)
    parameter.grad = gradient.to_sparse(1) if is_sparse else gradient
    return parameter


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: it for name, it in group.items() if name not in WITHOUT_PARAMETERS}


# -- rebuilt from its own options ------------------------------------------------------------------


@pytest.mark.parametrize("copied", [lambda it: it, lambda it: pickle.loads(pickle.dumps(it))])
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_is_rebuilt_from_its_defaults_or_its_group(
    kind: str, copied: Callable[[Optimizer], Optimizer]
) -> None:
    optimizer = copied(KINDS[kind]([a_parameter(3, 2)], lr=0.125))
    groups = (optimizer.param_groups[0], optimizer.state_dict()["param_groups"][0])
    for options in (optimizer.defaults, *map(options_of, groups)):
        rebuilt = type(optimizer)([a_parameter(3, 2)], **options)
        assert rebuilt.defaults == optimizer.defaults
        assert options_of(rebuilt.param_groups[0]) == options_of(optimizer.param_groups[0])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_group_with_its_own_memory_is_rebuilt(kind: str) -> None:
    """Its parameters are compressed whatever their gradients are, and still are."""
    group = {"params": [a_parameter(40, 2)], "memory": "row-wise", "lr": 0.5}
    optimizer = OPTIMIZERS[kind]([group])
    rebuilt = type(optimizer)([a_parameter(40, 2)], **options_of(optimizer.param_groups[0]))
    assert options_of(rebuilt.param_groups[0]) == options_of(optimizer.param_groups[0])
    for one in (optimizer, rebuilt):
        one.step()
    sizes = [so.memory_report(one).state_bytes for one in (optimizer, rebuilt)]
    assert sizes[0] == sizes[1] <= 40 * 4


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_defaults_of_the_optimizer_of_torch_are_taken(kind: str) -> None:
    theirs = getattr(torch.optim, kind)([a_parameter(3, 2)]).defaults
    ours = OPTIMIZERS[kind]([a_parameter(3, 2)], **theirs).defaults
    assert {name: ours[name] for name in theirs} == theirs


def test_a_subclass_needs_no_options_but_a_rate() -> None:
    parameter = a_parameter(3, 2)
    optimizer = PlainSigns([parameter])
    optimizer.step()
    assert parameter.tolist() == [[-1.0, -1.0]] * 3
    optimizer.load_state_dict(optimizer.state_dict())


# -- which parameters are compressed ---------------------------------------------------------------


def compressed(optimizer: Optimizer, *parameters: nn.Parameter) -> list[bool]:
    optimizer.step()
    return [optimizer.state[it]["is_compressed"] for it in parameters]


def test_flat_parameters_that_are_shaped_like_tables_are_compressed_on_request() -> None:
    """And no warning is issued for those that are not."""
    shapes = [(1000, 125), (1000, 126), (999, 2), (4000, 1000), (1000, 2, 2), (5000,)]
    parameters = [a_parameter(*shape) for shape in shapes]
    optimizer = so.Adam(parameters, compress="tables")
    assert compressed(optimizer, *parameters) == [True, False, False, False, False, False]


def test_sparse_gradients_are_compressed_whatever_the_shape() -> None:
    for compress in ("sparse", "tables", "all"):
        parameter = a_parameter(5, 3, is_sparse=True)
        assert compressed(so.Adam([parameter], compress=compress), parameter) == [True]


def test_a_group_decides_by_its_own_memory_and_compress() -> None:
    own, named, flat = (a_parameter(20, 2) for _ in range(3))
    groups = [
        {"params": [own], "memory": "lean-0.1"},
        {"params": [named], "memory": "lean-0.1", "compress": "sparse"},
        {"params": [flat]},
    ]
    assert compressed(so.Adam(groups, compress="tables"), own, named, flat) == [True, False, False]


def test_the_report_names_the_parameters_that_are_shaped_like_tables() -> None:
    parameters = [("words", a_parameter(1000, 4)), ("hidden", a_parameter(8, 4))]
    *_, last = str(so.memory_report(so.Adam(parameters, compress="tables"))).splitlines()
    assert last == 'compress="tables" compresses by shape: words'
    assert "compress" not in str(so.memory_report(so.Adam(parameters)))


def test_a_module_stands_for_its_groups() -> None:
    model = nn.Sequential(nn.Embedding(1000, 4), nn.Linear(4, 4))
    built = (
        so.AdamW(model, lr=0.5, memory="row-wise"),
        so.AdamW(so.param_groups(model, "row-wise"), lr=0.5, memory="row-wise"),
    )
    assert repr(built[0]) == repr(built[1])
    assert built[0].param_groups == built[1].param_groups


# -- torch.optim's implementations -----------------------------------------------------------------


@pytest.mark.parametrize("flag", ["foreach", "fused"])
def test_a_flag_chooses_the_implementation_of_torch(flag: str, monkeypatch: Any) -> None:
    chosen = []
    function = _adam.torch_adam.adam
    monkeypatch.setattr(
        _adam.torch_adam, "adam", lambda *a, **k: (chosen.append(k[flag]), function(*a, **k))
    )
    so.Adam([a_parameter(3, 2)], **{flag: True}).step()
    assert chosen == [True]


def test_a_fused_step_counts_on_the_device_of_the_parameters() -> None:
    """With a device that is not the CPU, where the fused functions read float32."""
    counts = [torch.tensor(3.0, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)]
    parameters: Any = [
        SimpleNamespace(state={"step": count}, local=torch.ones(2, device="meta"))
        for count in counts
    ]
    with torch_step_counts({"fused": True}, parameters) as given:
        assert [(it.dtype, it.device.type) for it in given] == [(torch.float32, "meta")] * 2
    assert [it.item() for it in counts] == [4.0, 1.0]


# -- warnings, and state of others -----------------------------------------------------------------


@pytest.mark.filterwarnings("default:momentum=:UserWarning")
def test_momentum_that_the_memory_drops_warns_once() -> None:
    parameters = [a_parameter(5, 3, is_sparse=True) for _ in range(2)]
    optimizer = so.SGD(parameters, lr=0.1, momentum=0.75)
    with pytest.warns(UserWarning, match=r"momentum=0.75 is dropped .* 4 times as large"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    kept = a_parameter(5, 3, is_sparse=True)
    so.SGD([kept], lr=0.1, momentum=0.75, memory=MEMORIES["paper-mv"]).step()


def test_a_step_along_zeros_with_a_rate_of_zero_counts_as_in_torch() -> None:
    """It is how torch.distributed.checkpoint makes state. Later steps then follow torch.optim."""
    for kind, options in (("Adam", {}), ("SGD", {"momentum": 0.5, "dampening": 0.5})):
        pairs = []
        for module in (so, torch.optim):
            model = nn.Linear(3, 2).double()
            nn.init.constant_(model.weight, 0.5)
            nn.init.constant_(model.bias, 0.5)
            optimizer = getattr(module, kind)(model.parameters(), lr=0.1, **options)
            get_optimizer_state_dict(model, optimizer)
            for size in (1.0, -2.0, 0.5):
                for it in model.parameters():
                    it.grad = torch.full_like(it, size)
                optimizer.step()
            pairs.append((model, optimizer))
        (ours, optimizer), (theirs, _) = pairs
        assert optimizer.state[ours.weight]["step"] == 4
        assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


def test_a_table_is_compressed_after_a_step_along_zeros_and_goes_on_counting() -> None:
    parameter = a_parameter(40, 2)
    parameter.grad.zero_()
    optimizer = so.Adagrad([parameter], lr=0.0, initial_accumulator_value=0.5)
    optimizer.step()
    assert not optimizer.state[parameter]["is_compressed"]
    parameter.grad = torch.ones(40, 2).to_sparse(1)
    optimizer.step()
    assert optimizer.state[parameter]["is_compressed"]
    assert optimizer.state[parameter]["step"] == 2


def test_state_of_others_survives_a_checkpoint() -> None:
    optimizer = so.Adam([a_parameter(3, 2)])
    optimizer.step()
    optimizer.state["ema"] = {"decay": 0.5, "values": torch.ones(2)}
    loaded = so.Adam([a_parameter(3, 2)])
    loaded.load_state_dict(optimizer.state_dict())
    assert loaded.state["ema"]["values"].tolist() == [1.0, 1.0]
    loaded.step()
    assert loaded.state_dict()["state"]["ema"]["decay"] == 0.5


def test_keys_that_schedulers_and_users_add_to_a_group_are_kept() -> None:
    added = {"initial_lr": 0.1, "base_momentum": 0.8, "lr_scale": 0.5, "name": "body"}
    (group,) = so.SGD([{"params": [a_parameter(3)], **added}]).param_groups
    assert {name: group[name] for name in added} == added


def test_options_of_an_own_subclass_are_options_of_groups() -> None:
    class Own(Signs):
        def __init__(self, params: Any, xi: float = 0.5, **options: Any) -> None:
            super().__init__(params, xi=xi, **options)

    (group,) = so.param_groups(nn.Embedding(1000, 4), xi=0.25)
    assert Own([group]).param_groups[0]["xi"] == 0.25
