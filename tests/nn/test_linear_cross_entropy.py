"""The fused head is the cross entropy of a linear layer, but no gradient is written down."""

import copy
import itertools
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sketchoptim as so
from sketchoptim import ops
from sketchoptim.nn import _linear_cross_entropy, _softmax_head, linear_cross_entropy
from sketchoptim.ops import _logits

TOKENS, CLASSES, DIM = 24, 230, 9
# Relative to the norm of what is compared. In half precision, probabilities are rounded once.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 4e-3}
OPTIONS = {
    "bias": [False, True],
    "softcap": [None, 1.5],
    "label_smoothing": [0.0, 0.2],
    "ignore_index": [-100, 3],
    "reduction": ["mean", "sum", "none"],
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks of classes and of tokens, the last ones shorter."""
    size = _softmax_head.BlockSize(classes=64, tokens=10)
    monkeypatch.setattr(_softmax_head, "_ON_CPU", size)
    monkeypatch.setattr(_softmax_head, "_ON_CPU_IN_HALF", size)
    monkeypatch.setattr(_softmax_head, "_ON_DEVICE", size)


@pytest.fixture(params=["native", "torch"])
def backend(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(_logits, "_library", lambda _: None)


def tensors(dtype=torch.float32, *, seed=0, tokens=TOKENS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, a weight and a bias that are trained, and targets."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (tokens, DIM), (CLASSES, DIM), (CLASSES,)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes
    )
    return hidden, weight, bias, torch.randint(CLASSES, (tokens,), generator=generator)


def plain_loss(hidden, weight, target, *, bias=None, softcap=None, **options) -> Tensor:
    """The same by torch's operations, in the dtype of arithmetic after the product."""
    logits = F.linear(hidden, weight).to(torch.promote_types(hidden.dtype, torch.float32))
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return F.cross_entropy(logits, target, **options)


def dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if isinstance(gradient, so.DeferredGradient) else gradient


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    difference = (ours.double() - theirs.double()).norm()
    assert difference <= tolerance * theirs.double().norm() + 1e-30


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda it: str(it).split(".")[1])
def test_loss_and_gradients_are_those_of_a_linear_layer(backend, dtype):
    for values in itertools.product(*OPTIONS.values()):
        options = dict(zip(OPTIONS, values, strict=True))
        has_bias = options.pop("bias")
        *ours, target = tensors(dtype)
        *theirs, _ = tensors(dtype)
        losses = []
        for loss_of, (hidden, weight, bias) in (
            (linear_cross_entropy, ours),
            (plain_loss, theirs),
        ):
            loss = loss_of(hidden, weight, target, bias=bias if has_bias else None, **options)
            (loss * torch.linspace(0.5, 2.0, loss.numel()).view(loss.shape)).sum().backward()
            losses.append(loss)
        assert losses[0].shape == losses[1].shape
        assert_close(*losses, TOLERANCE[dtype])
        for one, other in zip(ours[: 2 + has_bias], theirs, strict=False):
            assert_close(dense(one.grad), other.grad, TOLERANCE[dtype])
        assert isinstance(ours[1].grad, so.DeferredGradient)
        assert theirs[1].grad.abs().max() <= 1.001 * ours[1].grad.bound()


def test_leading_dimensions_are_those_of_the_target():
    hidden, weight, _, target = tensors(tokens=24)
    flat = linear_cross_entropy(hidden, weight, target, reduction="none")
    folded = linear_cross_entropy(
        hidden.view(2, 3, 4, DIM), weight, target.view(2, 3, 4), reduction="none"
    )
    assert torch.equal(folded, flat.view(2, 3, 4))
    one = linear_cross_entropy(hidden[0], weight, target[0])
    torch.testing.assert_close(one, flat[0])


def test_a_cpu_without_bfloat16_multiplies_in_float32(monkeypatch):
    monkeypatch.setattr(_linear_cross_entropy, "multiplies_fast", lambda dtype: False)
    *ours, _, target = tensors(torch.bfloat16)
    theirs = [it.detach().float().requires_grad_() for it in ours]
    loss = linear_cross_entropy(*ours, target)
    expected = plain_loss(*theirs, target)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    loss.backward()
    expected.backward()
    assert ours[0].grad.dtype == ours[1].grad.dtype == torch.bfloat16
    assert_close(ours[0].grad, theirs[0].grad, TOLERANCE[torch.bfloat16])
    block = next(ours[1].grad.chunks()).gradient
    assert_close(block, theirs[1].grad[: len(block)], 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_multiplies_in_its_dtype(dtype):
    *ours, _, target = tensors()
    *theirs, _, _ = tensors()
    for loss_of, (hidden, weight) in ((linear_cross_entropy, ours), (plain_loss, theirs)):
        with torch.autocast("cpu", dtype):
            loss = loss_of(hidden, weight, target)
            assert loss.dtype == torch.float32
            loss.backward()
    with torch.autocast("cpu", dtype):  # as does a step within it
        assert_close(dense(ours[1].grad), theirs[1].grad, TOLERANCE[dtype])
    assert_close(ours[0].grad, theirs[0].grad, TOLERANCE[dtype])


def test_probabilities_of_zero_and_huge_logits_are_exact(backend):
    hidden, weight, bias, target = tensors()
    with torch.no_grad():
        bias[:70] = -math.inf  # all classes of the first block
        weight[100] *= 1e4
    target = target.clamp(min=70)
    theirs = [it.detach().clone().requires_grad_() for it in (hidden, weight, bias)]
    linear_cross_entropy(hidden, weight, target, bias=bias).backward()
    plain_loss(*theirs[:2], target, bias=theirs[2]).backward()
    for one, other in zip((hidden, weight, bias), theirs, strict=True):
        assert_close(dense(one.grad), other.grad, 1e-5)
    assert not weight.grad.rows(0, 70).any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_without_targets_the_loss_is_that_of_torch_and_gradients_are_zero(backend, reduction):
    for tokens in (0, 5):
        hidden, weight, bias, target = tensors(tokens=tokens)
        target = torch.full_like(target, -100)
        loss = linear_cross_entropy(hidden, weight, target, bias=bias, reduction=reduction)
        theirs = plain_loss(hidden, weight, target, bias=bias, reduction=reduction)
        torch.testing.assert_close(loss, theirs, equal_nan=True)
        loss.sum().backward()
        for parameter in (hidden, weight, bias):
            assert not dense(parameter.grad).any()


def test_a_weight_that_is_used_twice_gets_both_gradients():
    *ours, _, target = tensors()
    *theirs, _, _ = tensors()
    for loss_of, (hidden, weight) in ((linear_cross_entropy, ours), (plain_loss, theirs)):
        tied = F.embedding(target, weight).tanh()
        loss = loss_of(hidden, weight, target) * 3 + loss_of(tied, weight, target.flip(0))
        loss.backward()
    assert_close(dense(ours[1].grad), theirs[1].grad, 3e-6)


def test_activations_targets_and_bias_may_change_after_the_backward_pass():
    hidden, weight, bias, target = tensors()
    linear_cross_entropy(hidden, weight, target, bias=bias).backward()
    expected = weight.grad.to_dense()
    with torch.no_grad():
        hidden.zero_()
        target.zero_()
        bias.zero_()
    assert torch.equal(weight.grad.to_dense(), expected)


def test_a_weight_that_changed_is_refused():
    hidden, weight, _, target = tensors()
    loss = linear_cross_entropy(hidden, weight, target)
    loss.backward(retain_graph=True)
    before = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="the weight behind a deferred gradient"):
        so.Adam([{"params": [weight], "memory": "lean-0.1"}]).step()
    assert torch.equal(weight, before * 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_gradient_may_be_asked_for_again():
    hidden, weight, _, target = tensors()
    loss = linear_cross_entropy(hidden, weight, target)
    loss.backward(retain_graph=True)
    once = weight.grad.to_dense(), hidden.grad.clone()
    (loss * 2).backward()
    torch.testing.assert_close(weight.grad.to_dense(), once[0] * 3)
    torch.testing.assert_close(hidden.grad, once[1] * 3)


def test_differentiating_twice_is_refused():
    hidden, weight, _, target = tensors()
    loss = linear_cross_entropy(hidden, weight, target)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(loss, [hidden], create_graph=True)
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda it: linear_cross_entropy(it, weight, target))(hidden)


def test_frozen_tensors_get_no_gradient():
    hidden, weight, bias, target = tensors()
    linear_cross_entropy(hidden.detach(), weight, target, bias=bias.detach()).backward()
    assert isinstance(weight.grad, so.DeferredGradient)
    linear_cross_entropy(hidden, weight.detach(), target, bias=bias.detach()).backward()
    assert hidden.grad is not None
    assert bias.grad is None
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, target).requires_grad


def test_a_compiled_model_breaks_its_graph_here():
    hidden, weight, _, target = tensors()
    theirs = [it.detach().clone().requires_grad_() for it in (hidden, weight)]
    compiled = torch.compile(
        lambda h, w: linear_cross_entropy(h.tanh(), w, target), backend="aot_eager"
    )
    compiled(hidden, weight).backward()
    plain_loss(theirs[0].tanh(), theirs[1], target).backward()
    torch.testing.assert_close(hidden.grad, theirs[0].grad)
    torch.testing.assert_close(dense(weight.grad), theirs[1].grad)


COLUMNS = {
    "lean with columns": so.Memory(second=so.Sketched(conservative=True, columns=True)),
    "row-wise with columns": so.Memory(second=so.RowWise(columns=True)),
}


@pytest.mark.parametrize(
    "memory", ["lean-0.1", "exact", "row-wise", "8-bit", "paper-mv", *COLUMNS.values()], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:.*active rows a bucket a step:UserWarning")
def test_a_step_is_that_of_the_gradient_when_it_is_written_down(memory, dtype):
    weights = []
    for is_deferred in (True, False):
        _, weight, _, _ = tensors(dtype)
        optimizer = so.AdamW([{"params": [weight], "memory": memory}], lr=0.1, rounding="nearest")
        for seed in range(3):
            hidden, _, _, target = tensors(dtype, seed=seed)
            for _ in range(2):  # micro-batches
                loss = linear_cross_entropy(hidden, weight, target, softcap=3.0)
                (loss + weight[target].square().sum() * 1e-3).backward()
            nn.utils.clip_grad_norm_([weight], 0.01)
            if not is_deferred:
                weight.grad = dense(weight.grad)
            optimizer.step()
            optimizer.zero_grad()
        weights.append(weight.detach())
    assert_close(*weights, 1e-6 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_from_hidden_states_that_are_not_finite_changes_nothing(value):
    for nonfinite in ("raise", "skip"):
        hidden, weight, _, target = tensors()
        before = weight.detach().clone()
        options = {"memory": "lean-0.1", "nonfinite": nonfinite}
        optimizer = so.Adam([{"params": [weight], **options}])
        with torch.no_grad():
            hidden[3, 4] = value
        linear_cross_entropy(hidden, weight, target).backward()
        if nonfinite == "raise":
            with pytest.raises(ValueError, match="must be finite"):
                optimizer.step()
            assert not optimizer.state
        else:
            optimizer.step()
            assert optimizer.state[weight]["skipped"] == 1
        assert torch.equal(weight, before)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"target": torch.tensor([0, CLASSES])}, ValueError, r"target must lie in \[0, 229\]"),
        ({"target": torch.tensor([0, -1])}, ValueError, "ignore_index"),
        ({"target": torch.tensor([0.0, 1.0])}, TypeError, "target must be int64"),
        ({"target": torch.tensor([0])}, ValueError, "target must have the shape of input"),
        ({"input": torch.ones(2, DIM + 1)}, ValueError, r"input must have shape \[..., 9\]"),
        ({"input": torch.ones(2, DIM).long()}, TypeError, "input must be floating point"),
        ({"weight": torch.ones(DIM)}, ValueError, "weight must have shape"),
        ({"bias": torch.ones(3)}, ValueError, r"bias must have shape \[230\]"),
        ({"bias": torch.ones(CLASSES, device="meta")}, ValueError, "bias must be on cpu"),
        ({"reduction": "max"}, ValueError, "reduction"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing"),
        ({"softcap": 0.0}, ValueError, "softcap"),
    ],
)
def test_bad_arguments_are_refused(changes, error, message):
    arguments = {
        "input": torch.ones(2, DIM),
        "weight": torch.ones(CLASSES, DIM),
        "target": torch.tensor([0, 1]),
    }
    with pytest.raises(error, match=message):
        linear_cross_entropy(**{**arguments, **changes})


def test_on_other_devices_nothing_waits(monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)  # it refuses "meta"
    hidden, weight, bias, target = (
        it.detach().to("meta").requires_grad_(it.is_floating_point()) for it in tensors()
    )  # a tensor without numbers cannot be waited for
    for reduction in ("mean", "none"):
        loss = linear_cross_entropy(
            hidden, weight, target, bias=bias, softcap=2.0, label_smoothing=0.1, reduction=reduction
        )
        loss.sum().backward()
    assert not weight.grad.exists
    nn.utils.clip_grad_norm_([weight], 1.0)
    assert weight.grad.rows(30, 200).shape == (170, DIM)
    assert weight.grad.bound().shape == ()


def test_the_module_loads_a_linear_layer_and_ranks_as_it():
    linear = nn.Linear(DIM, CLASSES)
    head = so.nn.LinearCrossEntropy(DIM, CLASSES, bias=True, softcap=2.0, label_smoothing=0.1)
    head.load_state_dict(linear.state_dict())
    hidden, _, _, target = tensors(tokens=12)
    logits = torch.tanh(linear(hidden) / 2.0) * 2.0
    torch.testing.assert_close(head.logits(hidden), logits)
    torch.testing.assert_close(
        head(hidden, target), F.cross_entropy(logits, target, label_smoothing=0.1)
    )
    best = head.top_k(hidden.view(3, 4, DIM), 7, chunk=20)
    assert torch.equal(best.view(12, 7), logits.topk(7).indices)
    assert list(so.find_tables(head, min_rows=1)) == ["weight"]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["deepcopy", "pickle"]
)
def test_a_copy_is_the_same_gradient(copied):
    hidden, weight, bias, target = tensors()
    linear_cross_entropy(hidden, weight, target, bias=bias, softcap=2.0).backward()
    assert torch.equal(copied(weight.grad).to_dense(), weight.grad.to_dense())


def test_the_reference_steps_as_the_kernels():
    weights = []
    for context in (ops.reference_only, None):
        hidden, weight, _, target = tensors()
        optimizer = so.Adam([{"params": [weight], "memory": "lean-0.1"}])
        linear_cross_entropy(hidden, weight, target).backward()
        if context is None:
            optimizer.step()
        else:
            with context():
                optimizer.step()
        weights.append(weight.detach())
    assert_close(*weights, 1e-6)
