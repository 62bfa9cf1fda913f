"""What can go wrong between forward, backward and step: nothing is half changed."""

import contextlib
import copy
import math
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sketchoptim as so

WORDS, DIM = 1003, 8
TOKENS = torch.arange(24).reshape(2, 12) % 19


class LanguageModel(nn.Module):
    """An embedding that shares its weight with the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.hidden = nn.Embedding(WORDS, DIM), nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.hidden(self.embedding(tokens)).tanh())
        return F.cross_entropy(logits.flatten(0, 1), (tokens + 1).flatten())


def built(**options) -> tuple[LanguageModel, so.AdamW]:
    model = LanguageModel()
    so.defer_gradients(model)
    return model, so.AdamW(so.param_groups(model), lr=0.05, **options)


def bits(model: nn.Module, optimizer: so.AdamW) -> list[Tensor]:
    """All weights and all of the state."""
    states = (value for state in optimizer.state.values() for value in state.values())
    found = [*model.state_dict().values(), *(torch.as_tensor(it) for it in states)]
    return [it.clone() for it in found]


def check_unchanged(model: nn.Module, optimizer: so.AdamW, before: list[Tensor]) -> None:
    after = bits(model, optimizer)
    assert len(after) == len(before)
    assert all(torch.equal(*pair) for pair in zip(after, before, strict=True))


def trained(model: nn.Module, optimizer: so.AdamW, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(TOKENS).backward()
        optimizer.step()


def test_a_graph_from_before_a_step_is_refused():
    model, optimizer = built()
    stale = model(TOKENS)
    trained(model, optimizer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()
    trained(model, optimizer)


def test_a_gradient_is_used_once():
    model, optimizer = built()
    trained(model, optimizer)
    before = bits(model, optimizer)
    with pytest.raises(RuntimeError, match="the weight behind a deferred gradient"):
        optimizer.step()
    check_unchanged(model, optimizer, before)


def test_a_forward_pass_without_a_backward_pass_leaves_nothing():
    model, optimizer = built()
    other, other_optimizer = built()
    model(TOKENS)
    trained(model, optimizer)
    trained(other, other_optimizer)
    check_unchanged(model, optimizer, bits(other, other_optimizer))


def test_an_exception_after_the_backward_pass_leaves_a_gradient_that_can_be_dropped():
    model, optimizer = built()
    other, other_optimizer = built()
    with contextlib.suppress(KeyError):
        model(TOKENS + 3).backward()
        raise KeyError
    trained(model, optimizer)  # it begins with zero_grad()
    trained(other, other_optimizer)
    check_unchanged(model, optimizer, bits(other, other_optimizer))


def test_an_exception_within_the_backward_pass_leaves_the_gradients_so_far():
    model, optimizer = built()

    def fail(_: Tensor) -> None:
        raise KeyError

    handle = model.hidden.weight.register_hook(fail)
    before = bits(model, optimizer)
    with pytest.raises(KeyError):
        model(TOKENS).backward()
    check_unchanged(model, optimizer, before)
    handle.remove()
    other, other_optimizer = built()
    trained(model, optimizer)
    trained(other, other_optimizer)
    check_unchanged(model, optimizer, bits(other, other_optimizer))


@pytest.mark.parametrize("where", ["hidden", "weight"])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_nan_refuses_or_skips_the_step_before_anything_changes(nonfinite, where):
    model, optimizer = built(nonfinite=nonfinite)
    trained(model, optimizer)
    optimizer.zero_grad()
    with torch.no_grad():
        weight = model.hidden.weight if where == "hidden" else model.head.weight
        weight[3, 2] = math.nan
    model(TOKENS).backward()
    table = model.embedding.weight
    before = table.detach().clone(), copy.deepcopy(optimizer.state[table])
    if nonfinite == "raise":
        everything = bits(model, optimizer)
        with pytest.raises(ValueError, match="must be finite"):
            optimizer.step()
        after = bits(model, optimizer)
        for one, other in zip(everything, after, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        return
    optimizer.step()
    torch.testing.assert_close(table.detach(), before[0], rtol=0, atol=0, equal_nan=True)
    assert optimizer.state[table]["skipped"] == 1
    assert all(
        torch.equal(torch.as_tensor(optimizer.state[table][key]), torch.as_tensor(value))
        for key, value in before[1].items()
    )


@pytest.mark.parametrize("bad", [WORDS, -1])
def test_ids_and_labels_out_of_range_are_refused_in_the_forward_pass(bad):
    model, optimizer = built()
    before = bits(model, optimizer)
    tokens = TOKENS.clone()
    tokens[0, 0] = bad
    with pytest.raises(IndexError, match="out of range"):
        model(tokens)
    logits = model.head(torch.zeros(1, DIM))
    with pytest.raises(ValueError, match=r"target must lie in \[0, 1002\]"):
        F.cross_entropy(logits, torch.tensor([bad]))
    check_unchanged(model, optimizer, before)


@pytest.mark.parametrize("sparse", [True, False])
def test_batches_without_ids_and_bags_without_ids_move_no_row(sparse):
    layers = nn.ModuleList(
        [nn.Embedding(WORDS, DIM, sparse=sparse), nn.EmbeddingBag(WORDS, DIM, sparse=sparse)]
    )
    so.defer_gradients(layers)
    before = copy.deepcopy(layers.state_dict())
    optimizer = so.AdamW(so.param_groups(layers), lr=0.1, weight_decay=0.0)
    none = torch.empty(0, dtype=torch.int64)
    (layers[0](none).sum() + layers[1](none, torch.tensor([0, 0])).sum()).backward()
    assert so.clip_grad_norm_(layers.parameters(), 1.0) == 0
    optimizer.step()
    for name, value in layers.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_batch_of_ignored_labels_moves_nothing_by_its_head():
    model, _ = built()
    logits = model.head(torch.randn(5, DIM))
    F.cross_entropy(logits, torch.full((5,), -100), reduction="sum").backward()
    assert not model.head.weight.grad.to_dense().any()


def test_a_table_without_rows_takes_part():
    layer = nn.Embedding(0, DIM, sparse=True)
    so.defer_gradients(layer)
    optimizer = so.AdamW([{"params": list(layer.parameters()), "memory": "lean"}])
    layer(torch.empty(2, 0, dtype=torch.int64)).sum().backward()
    assert layer.weight.grad.shape == (0, DIM)
    so.clip_grad_norm_(layer.parameters(), 1.0)
    optimizer.step()


def test_threads_with_models_of_their_own_do_not_disturb_each_other():
    expected = built()
    trained(*expected, steps=5)
    runs = [built() for _ in range(4)]
    threads = [threading.Thread(target=trained, args=(*run, 5)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for run in runs:
        check_unchanged(*run, bits(*expected))


def test_backward_passes_in_threads_accumulate_in_one_gradient():
    model, _ = built()
    plain = LanguageModel()
    threads = [threading.Thread(target=lambda: model(TOKENS).backward()) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (4 * plain(TOKENS)).backward()
    torch.testing.assert_close(
        model.head.weight.grad.to_dense(), plain.head.weight.grad, rtol=1e-4, atol=1e-6
    )
