"""A torch that lacks a private name which the library uses: an error names it, or a warning."""

import importlib.util
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d

import sketchoptim as so
from sketchoptim import _torch_private


def loaded_again() -> ModuleType:
    """The module as a fresh process would load it."""
    spec = importlib.util.spec_from_file_location("sketchoptim._probe", _torch_private.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["_disabled_torch_function_impl", "DisableTorchFunctionSubclass"])
def test_a_name_that_is_needed_at_once_is_missed_by_name(monkeypatch, name):
    monkeypatch.delattr(torch._C, name)
    with pytest.raises(
        RuntimeError, match=f"^torch {torch.__version__[0]}.* lacks .*{name}, which"
    ):
        loaded_again()


def test_an_attribute_that_is_missing_is_named_with_its_owner():
    with pytest.raises(
        RuntimeError, match=r"lacks Tensor\._rows, which sketchoptim needs; install"
    ):
        _torch_private.private(torch.Tensor, "_rows")


def test_dynamo_is_switched_off_by_its_public_name(monkeypatch):
    monkeypatch.delattr(torch._compile, "_disable_dynamo")
    assert loaded_again().disable_dynamo is torch.compiler.disable


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch.autograd.profiler, "_is_profiler_enabled"),
        (_torch_private._torch_optimizer, "_global_optimizer_pre_hooks"),
        (_torch_private._torch_optimizer, "_global_optimizer_post_hooks"),
    ],
)
def test_steps_go_through_the_wrapper_of_torch_with_a_warning(monkeypatch, owner, name):
    with monkeypatch.context() as context:
        context.delattr(owner, name)
        with pytest.warns(UserWarning, match="each step opens a profiler record"):
            wrapped = _torch_private.hooked_when_needed(lambda optimizer: "stepped")
    assert wrapped(so.SGD([nn.Parameter(torch.ones(2))])) == "stepped"


def test_a_head_multiplies_without_onednn_with_a_warning(monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    with pytest.warns(UserWarning, match="a vocabulary head takes longer"):
        assert _torch_private.linear_by_onednn(torch.ones(2, 2), torch.ones(2, 2)) is None


def test_products_in_half_precision_are_taken_to_be_fast_where_torch_does_not_tell(monkeypatch):
    assert isinstance(_torch_private.multiplies_fast(torch.bfloat16), bool)
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert _torch_private.multiplies_fast(torch.float16)


@pytest.mark.parametrize(
    ("kind", "when"), [("state_dict", "pre"), ("state_dict", "post"), ("load_state_dict", "pre")]
)
def test_a_checkpoint_without_the_hooks_of_torch_is_refused(kind, when, monkeypatch):
    optimizer = so.SGD([nn.Parameter(torch.ones(2))])
    saved = optimizer.state_dict()
    monkeypatch.delattr(optimizer, f"_optimizer_{kind}_{when}_hooks")
    arguments: tuple[Any, ...] = (saved,) if kind == "load_state_dict" else ()
    with pytest.raises(RuntimeError, match=rf"lacks SGD\._optimizer_{kind}_{when}_hooks"):
        getattr(optimizer, kind)(*arguments)


def test_names_of_distributed_training_are_missed_by_name(monkeypatch):
    monkeypatch.delattr(distributed_c10d, "_world")
    with pytest.raises(RuntimeError, match=r"lacks torch.distributed.distributed_c10d._world"):
        _torch_private.store_of(None)
    monkeypatch.delattr(nn.parallel.DistributedDataParallel, "_active_ddp_module")
    with pytest.raises(RuntimeError, match=r"lacks DistributedDataParallel._active_ddp_module"):
        _torch_private.active_ddp_module()
    monkeypatch.delattr(torch.autograd.Variable, "_execution_engine")
    with pytest.raises(RuntimeError, match=r"lacks Variable._execution_engine"):
        _torch_private.after_backward(print)
