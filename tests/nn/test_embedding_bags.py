"""EmbeddingBags against one nn.EmbeddingBag for each table."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sketchoptim.nn import EmbeddingBags
from sketchoptim.ops import _native

ROWS = {"user": 500, "item": 40, "day": 7}
BATCH = 70


def modules(
    mode: str = "sum", dims: tuple[int, ...] = (64, 20, 7), dtype: torch.dtype = torch.float32
) -> dict[str, nn.EmbeddingBag]:
    torch.manual_seed(0)
    return {
        name: nn.EmbeddingBag(rows, dim, mode=mode, sparse=True, dtype=dtype)
        for (name, rows), dim in zip(ROWS.items(), dims, strict=True)
    }


def ragged(seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Ids and offsets of each table; some bags are empty, the first and the last among them."""
    generator = torch.Generator().manual_seed(seed)
    ids, offsets = {}, {}
    for name, rows in ROWS.items():
        lengths = torch.randint(0, 5, (BATCH,), generator=generator)
        lengths[[0, -1]] = 0
        ids[name] = torch.randint(rows, (int(lengths.sum()),), generator=generator)
        offsets[name] = lengths.cumsum(0) - lengths
    return ids, offsets


def flat(ids: dict[str, Tensor], offsets: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The same as FBGEMM has them."""
    begins = torch.tensor([0, *(it.numel() for it in ids.values())]).cumsum(0)
    shifted = [it + begin for it, begin in zip(offsets.values(), begins[:-1], strict=True)]
    return torch.cat(list(ids.values())), torch.cat([*shifted, begins[-1:]])


def expected(tables: dict[str, nn.EmbeddingBag], ids: Any, offsets: Any) -> Tensor:
    return torch.cat([tables[name](ids[name], offsets[name]) for name in tables], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_pooled_rows_are_those_of_embedding_bag(mode, dtype):
    tables = modules(mode, dtype=dtype)
    ids, offsets = ragged()
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-12}.get(dtype, 2e-2)
    found = EmbeddingBags.from_modules(tables)(ids, offsets)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found, expected(tables, ids, offsets), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dims", [(64, 16, 128), (64, 20, 7), (1, 65, 256)])
def test_float32_sums_have_the_bits_of_embedding_bag(dims):
    tables = modules(dims=dims)
    ids, offsets = ragged()
    found = EmbeddingBags.from_modules(tables)(ids, offsets)
    assert torch.equal(found, expected(tables, ids, offsets))


def test_all_forms_of_ids_give_the_same_bits():
    bags = EmbeddingBags.from_modules(modules())
    ids, offsets = ragged()
    found = bags(ids, offsets)
    all_ids, all_offsets = flat(ids, offsets)
    lengths = {
        name: torch.diff(it, append=torch.tensor([ids[name].numel()]))
        for name, it in offsets.items()
    }
    assert torch.equal(bags(list(ids.values()), list(offsets.values())), found)
    assert torch.equal(bags(ids, lengths=lengths), found)
    assert torch.equal(bags(all_ids, all_offsets), found)
    assert torch.equal(bags(all_ids, lengths=torch.cat(list(lengths.values()))), found)
    assert torch.equal(bags(all_ids.int(), all_offsets.int()), found)


def test_ids_without_offsets_are_bags_of_one_size():
    tables = modules()
    pairs = {name: torch.randint(rows, (BATCH, 2)) for name, rows in ROWS.items()}
    bags = EmbeddingBags.from_modules(tables)
    assert torch.equal(bags(pairs), expected(tables, pairs, dict.fromkeys(pairs)))
    single = {name: it[:, 0] for name, it in pairs.items()}
    starts = dict.fromkeys(pairs, torch.arange(BATCH))
    assert torch.equal(bags(single), expected(tables, single, starts))


def test_per_sample_weights_multiply_rows_and_get_gradients():
    tables = modules()
    ids, offsets = ragged()
    weights = {name: torch.randn(it.shape, requires_grad=True) for name, it in ids.items()}
    twins = {name: it.detach().clone().requires_grad_() for name, it in weights.items()}
    found = EmbeddingBags.from_modules(tables)(ids, offsets, weights)
    wanted = torch.cat([tables[name](ids[name], offsets[name], twins[name]) for name in tables], 1)
    torch.testing.assert_close(found, wanted)
    upstream = torch.randn_like(found)
    found.backward(upstream)
    gradients = [it.weight.grad.to_dense() for it in tables.values()]
    for it in tables.values():
        it.weight.grad = None
    wanted.backward(upstream)
    for gradient, it in zip(gradients, tables.values(), strict=True):
        torch.testing.assert_close(gradient, it.weight.grad.to_dense())
    for name in weights:
        torch.testing.assert_close(weights[name].grad, twins[name].grad)


def test_every_number_of_threads_gives_the_same_bits():
    bags = EmbeddingBags.from_modules(modules(dims=(256, 128, 65)))
    ids = {name: torch.randint(rows, (1500, 3)) for name, rows in ROWS.items()}
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(bags(ids))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_the_plain_form_equals_the_kernel(monkeypatch):
    bags = EmbeddingBags.from_modules(modules())
    ids, offsets = ragged()
    found = bags(ids, offsets)
    monkeypatch.setattr(_native, "library", lambda: None)
    assert torch.equal(bags(ids, offsets), found)


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("bad", [-1, 40, 2**40])
def test_ids_outside_a_table_are_refused_by_name(monkeypatch, bad, is_native):
    bags = EmbeddingBags.from_modules(modules())
    ids, offsets = ragged()
    ids["item"][3] = bad
    if not is_native:
        monkeypatch.setattr(_native, "library", lambda: None)
    with pytest.raises(ValueError, match=r"ids of 'item' must lie in \[0, 39\], .*" + str(bad)):
        bags(ids, offsets)


@pytest.mark.parametrize(
    "change",
    [
        lambda it: it.roll(1),
        lambda it: it + 1,
        lambda it: it.index_fill(0, torch.tensor([4]), -5),
        lambda it: it.index_fill(0, torch.tensor([BATCH - 1]), 10**6),
    ],
)
def test_offsets_that_do_not_ascend_over_the_ids_are_refused_by_name(change):
    bags = EmbeddingBags.from_modules(modules())
    ids, offsets = ragged()
    offsets["day"] = change(offsets["day"])
    with pytest.raises(ValueError, match="offsets of 'day' must ascend from 0"):
        bags(ids, offsets)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda b, i, o: b(i, o, lengths=o), "offsets and lengths"),
        (lambda b, i, o: b(list(i.values())[:2], list(o.values())), "those of 3 features"),
        (lambda b, i, o: b({"user": i["user"]}, o), "must be those of the features"),
        (lambda b, i, o: b(i, torch.zeros(3)), "must be a dict or a list"),
        (lambda b, i, o: b(torch.cat(list(i.values())), o), "one tensor of ids needs"),
        (lambda b, i, o: b(torch.arange(7), torch.arange(6)), "a number for each bag"),
        (lambda b, i, o: b(torch.arange(7), torch.arange(7)), "must ascend from 0 to 7"),
        (lambda b, i, o: b(i, lengths=o), "must have the sum"),
        (lambda b, i, o: b({**i, "day": i["day"].float()}, o), "ids of 'day' must be int64"),
        (lambda b, i, o: b(i, {**o, "day": o["day"][:5]}), "the same number of bags"),
        (lambda b, i, o: b(i, o, i["day"]), "must be a dict or a list"),
        (lambda b, i, o: b(i, o, {**i, "day": i["day"][:2]}), "must have the shape of its ids"),
    ],
)
def test_bad_arguments_are_refused(call, error):
    ids, offsets = ragged()
    with pytest.raises((ValueError, TypeError), match=error):
        call(EmbeddingBags.from_modules(modules()), ids, offsets)


@pytest.mark.parametrize("name", ["mode", "a.b", "", "forward"])
def test_a_table_needs_a_name_of_its_own(name):
    with pytest.raises(ValueError, match="a table's name must be a new attribute"):
        EmbeddingBags({name: (5, 4)})


def test_state_dict_has_the_tables_by_name():
    bags, other = EmbeddingBags({"user": (9, 4)}), EmbeddingBags({"user": (9, 4)})
    assert list(bags.state_dict()) == ["user"]
    other.load_state_dict(bags.state_dict())
    assert torch.equal(other.user, bags.user)


def test_modules_and_back_share_the_parameters():
    tables = modules("mean")
    bags = EmbeddingBags.from_modules(list(tables.values()))
    assert [name for name, _ in bags.named_parameters()] == ["table_0", "table_1", "table_2"]
    back = bags.to_modules()
    for it, twin in zip(tables.values(), back.values(), strict=True):
        assert it.weight is twin.weight
        assert (twin.mode, twin.sparse) == ("mean", True)


@pytest.mark.parametrize(
    "option", [{"mode": "max"}, {"padding_idx": 0}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}]
)
def test_a_module_with_an_option_that_is_missing_here_is_refused(option):
    with pytest.raises(ValueError, match="the module 'user' has"):
        EmbeddingBags.from_modules({"user": nn.EmbeddingBag(5, 4, **option)})


def torchrec_config(
    name: str, rows: int, dim: int, features: list[str], pooling: str = "MEAN"
) -> Any:
    return SimpleNamespace(
        name=name,
        num_embeddings=rows,
        embedding_dim=dim,
        feature_names=features,
        pooling=SimpleNamespace(name=pooling),
        data_type=SimpleNamespace(name="BF16"),
    )


def test_a_torchrec_configuration_keeps_its_features():
    """With stand-ins that have the fields of TorchRec's configuration; see tests/clients."""
    configs = [
        torchrec_config("page", 30, 8, ["from", "to"]),
        torchrec_config("day", 7, 4, ["day"]),
    ]
    bags = EmbeddingBags.from_torchrec(configs)
    assert bags.columns == {"from": slice(0, 8), "to": slice(8, 16), "day": slice(16, 20)}
    assert (bags.mode, bags.page.dtype, len(list(bags.parameters()))) == ("mean", torch.bfloat16, 2)
    ids = torch.tensor([[1], [2]])
    out = bags({"from": ids, "to": ids + 1, "day": ids})
    assert torch.equal(out[:, 8:16], bags.page[[2, 3]])


def test_torchrec_tables_of_two_poolings_are_refused():
    configs = [torchrec_config("a", 3, 4, ["a"]), torchrec_config("b", 3, 4, ["b"], pooling="SUM")]
    with pytest.raises(ValueError, match="the same pooling"):
        EmbeddingBags.from_torchrec(configs)
