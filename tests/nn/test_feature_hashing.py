"""Texts -> bags of hashed features: against a naive reading of the definition, and golden ones."""

import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sketchoptim import _hashing
from sketchoptim.nn import BagEncoder, Bags, FeatureHashing

TEXTS = st.lists(st.text(max_size=12), max_size=6)


def naive_units(text: str, unit: str) -> list[int]:
    """The units of a text as numbers below 2^32, read off the documentation."""
    data = text.encode("utf-8", "surrogatepass")
    if unit == "trigrams":
        padded = b"\0" + data + b"\0"
        return [int.from_bytes(padded[i : i + 3], "big") for i in range(len(data))]
    words = re.findall(rb"[0-9A-Za-z\x80-\xff]+", data)
    base, size = 0x9E3779B97F4A7C15, 2**64
    polynomials = [
        sum(byte * pow(base, k + 1, size) for k, byte in enumerate(word)) for word in words
    ]
    return [value % size >> 32 for value in polynomials]


def listed(bags: Bags) -> list[list[int]]:
    """The ids of each bag."""
    cuts = [*bags.offsets.tolist(), bags.ids.numel()]
    return [bags.ids[start:end].tolist() for start, end in pairwise(cuts)]


@pytest.mark.parametrize("unit", ["trigrams", "words"])
@given(texts=TEXTS, features=st.sampled_from([1, 7, 80_000, 2**31]), seed=st.integers(0, 2**40))
def test_features_are_the_hashed_units_of_each_text(unit, texts, features, seed):
    bags = FeatureHashing(features=features, unit=unit, signed=True, seed=seed)(texts)
    words = _hashing.seeded(seed, 0x66656174, 1)
    units = [torch.tensor(naive_units(text, unit), dtype=torch.int64) for text in texts]
    expected = [_hashing.buckets(words, ids, features)[0].tolist() for ids in units]
    assert listed(bags) == expected
    signs = torch.cat([torch.empty(0), *(_hashing.signs(words, ids)[0] for ids in units)])
    assert torch.equal(bags.weights, signs)


@given(texts=TEXTS, cut=st.integers(0, 6))
def test_a_text_has_the_same_features_in_any_batch(texts, cut):
    make = FeatureHashing(signed=True)
    whole = make(texts)
    parts = Bags.concatenate([make(texts[:cut]), make(texts[cut:])])
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a, b)


def test_more_texts_than_a_chunk_are_all_there():
    texts = [f"usr/share/{number}" for number in range(10_000)]
    bags = FeatureHashing()(texts)
    assert bags.offsets.numel() == len(texts)
    assert bags.ids.numel() == sum(map(len, texts))
    assert listed(FeatureHashing()(texts[9_000:9_001])) == [listed(bags)[9_000]]


# Other processes, machines and versions have to give these.
GOLDEN = {
    "trigrams": (
        [
            [22947, 32723, 40601, 50046, 31038, 66128, 13279, 61219, 18509, 1231],
            [],
            [
                *(29986, 14170, 73785, 71321, 38532, 24784, 76571),
                *(66372, 3230, 60565, 77480, 58241, 45651, 55775),
            ],
        ],
        "++--+-++-+-------++-++-+",
    ),
    "words": ([[47082, 68531, 6651], [], [47497, 59859, 27445]], "+-+---"),
}


@pytest.mark.parametrize("unit", ["trigrams", "words"])
def test_features_are_the_golden_ones(unit):
    bags = FeatureHashing(unit=unit, signed=True)(["usr/bin/ls", "", "naïve café 7"])
    ids, signs = GOLDEN[unit]
    assert listed(bags) == ids
    assert "".join("+" if weight > 0 else "-" for weight in bags.weights) == signs


@pytest.mark.parametrize("unit", ["trigrams", "words"])
@pytest.mark.parametrize("texts", [[""], ["", ""], ["", "a", ""], []])
def test_an_empty_text_is_an_empty_bag_and_gives_zeros(unit, texts):
    bags = FeatureHashing(features=50, unit=unit)(texts)
    assert [len(bag) for bag in listed(bags)] == [len(text) for text in texts]
    rows = nn.EmbeddingBag(50, 4, mode="sum", sparse=True)(*bags)
    assert rows.shape == (len(texts), 4)
    for text, row in zip(texts, rows, strict=True):
        assert bool(row.any()) == bool(text)


def test_a_text_of_separators_has_no_words():
    assert listed(FeatureHashing(unit="words")(["-- /", "a-b"]))[0] == []


def test_characters_beyond_ascii_are_parts_of_words():
    one, two, parts = listed(FeatureHashing(unit="words")(["naïve", "na ve", "日本 語"]))
    assert (len(one), len(two), len(parts)) == (1, 2, 2)


def test_a_lone_surrogate_is_hashed_like_any_character():
    assert len(listed(FeatureHashing()(["a\udcff"]))[0]) == 4


def test_inner_products_of_signed_features_are_unbiased():
    texts = ["usr/lib/python3/dist-packages", "usr/lib/python3.11/os.py"]
    exact = sum(
        naive_units(texts[0], "trigrams").count(unit) for unit in naive_units(texts[1], "trigrams")
    )
    products = []
    for seed in range(600):
        bags = FeatureHashing(features=20, signed=True, seed=seed)(texts)
        one, two = torch.nn.functional.embedding_bag(
            bags.ids, torch.eye(20), bags.offsets, mode="sum", per_sample_weights=bags.weights
        )
        products.append(float(one @ two))
    found = torch.tensor(products)
    standard_error = float(found.std()) / len(products) ** 0.5
    assert abs(float(found.mean()) - exact) < 4 * standard_error
    assert float(found.std()) > 1  # things do collide


@pytest.mark.parametrize(
    ("texts", "error"),
    [
        ("usr/bin", "got a single text"),
        (b"usr/bin", "got a single text"),
        (["a", b"b"], "got bytes at 1"),
        (["a", None], "got NoneType at 1"),
        ([3], "got int at 0"),
    ],
)
def test_what_is_not_text_is_refused(texts, error):
    with pytest.raises(TypeError, match=error):
        FeatureHashing()(texts)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"features": 0}, r"features must be in \[1, 2147483648\], got 0"),
        ({"features": 2**31 + 1}, "features must be"),
        ({"features": 8.0}, "features must be an int, got 8.0"),
        ({"unit": "letters"}, "unit must be one of"),
        ({"signed": 1}, "signed must be True or False, got 1"),
        ({"seed": "0"}, "seed must be an int, got '0'"),
    ],
)
def test_bad_settings_are_refused(options, error):
    with pytest.raises((ValueError, TypeError), match=error):
        FeatureHashing(**options)


@given(
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    data=st.data(),
    is_signed=st.booleans(),
)
def test_taken_bags_are_those_asked_for(lengths, data, is_signed):
    total = sum(lengths)
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    bags = Bags(torch.arange(total), starts, torch.arange(total) * 2.0 if is_signed else None)
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8))
    taken = bags.take(torch.tensor(rows, dtype=torch.int64))
    assert listed(taken) == [listed(bags)[row] for row in rows]
    if is_signed:
        assert torch.equal(taken.weights, taken.ids * 2.0)


@pytest.mark.parametrize("signed", [False, True])
def test_bags_move_to_a_device_whole(signed):
    bags = FeatureHashing(features=50, signed=signed)(["a text", "another"])
    moved = bags.to("meta")
    parts = [part for part in moved if part is not None]
    assert [part.device.type for part in parts] == ["meta"] * (3 if signed else 2)
    assert [part.shape for part in parts] == [part.shape for part in bags if part is not None]


# The encoder


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_the_encoder_is_an_embedding_bag_a_bias_and_a_relu(signed, dtype):
    torch.manual_seed(0)
    bags = FeatureHashing(features=30, signed=signed)(["usr/bin", "", "etc", "usr/bin"])
    encoder, plain = BagEncoder(30, 5), nn.EmbeddingBag(30, 5, mode="sum", sparse=True)
    nn.init.normal_(encoder.bias)
    plain.weight.data.copy_(encoder.weight.data)
    expected = torch.relu(plain(*bags) + encoder.bias)
    found = encoder(*(bags.as_int32() if dtype == "int32" else bags))
    torch.testing.assert_close(found, expected)
    slope = torch.randn_like(found)
    found.backward(slope)
    expected.backward(slope)
    torch.testing.assert_close(encoder.weight.grad.to_dense(), plain.weight.grad.to_dense())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_an_encoder_of_another_dtype_takes_signed_bags(dtype):
    encoder = BagEncoder(30, 5).to(dtype)
    hidden = encoder(*FeatureHashing(features=30, signed=True)(["usr/bin"]))
    hidden.sum().backward()
    assert hidden.dtype == encoder.weight.grad.dtype == dtype


def test_the_encoders_gradient_has_each_row_once():
    encoder = BagEncoder(30, 5)
    bags = FeatureHashing(features=30)(["usr/bin/ls"] * 10)
    encoder(*bags).sum().backward()
    ids = encoder.weight.grad._indices()[0]
    assert encoder.weight.grad.is_sparse
    assert torch.equal(ids, bags.ids.unique())


def test_the_encoder_starts_with_numbers_near_one():
    torch.manual_seed(0)
    bags = Bags(torch.randint(1000, (20_000,)), torch.arange(0, 20_000, 50))
    sums = nn.functional.embedding_bag(
        bags.ids, BagEncoder(1000, 64).weight.detach(), bags.offsets, mode="sum"
    )
    assert 0.9 < float(sums.std()) < 1.1


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(wrong):
    bags = FeatureHashing(features=10, signed=True)(["abc"])
    bags.weights[1] = wrong
    with pytest.raises(ValueError, match="weights must be finite"):
        BagEncoder(10, 4)(*bags)


@pytest.mark.parametrize(
    ("ids", "offsets", "error"),
    [
        (torch.zeros(3), torch.zeros(1).long(), "ids must be int64 or int32 .*got torch.float32"),
        (
            torch.zeros(2, 2).long(),
            torch.zeros(1).long(),
            r"ids must be .* of shape \[2, 2\]; pass",
        ),
        (torch.zeros(3).long(), torch.zeros(1), "offsets must be int64 or int32"),
        ([1, 2], torch.zeros(1).long(), "ids must be a tensor, got"),
    ],
)
def test_bags_of_another_form_are_refused(ids, offsets, error):
    with pytest.raises(TypeError, match=error):
        BagEncoder(10, 4)(ids, offsets)


def test_features_beyond_the_rows_of_the_encoder_are_refused():
    bags = FeatureHashing(features=1000)(["usr/bin"])
    with pytest.raises(ValueError, match=r"ids must be in \[0, 9\], got .*; give the Feature"):
        BagEncoder(10, 4)(*bags)


@pytest.mark.parametrize("name", ["features", "dim", "expected"])
def test_the_encoders_sizes_must_be_positive(name):
    sizes = {"features": 4, "dim": 4, "expected": 4} | {name: 0}
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
        BagEncoder(sizes["features"], sizes["dim"], expected=sizes["expected"])
