"""Buckets, signs and noise of the GPU's kernels against the specifications' golden vectors."""

import pytest
import torch
from gpu_steps import needs_execution  # skips where triton is not installed
from hash_specification import IDS, WIDTHS, WORDS
from rounding_specification import COLUMNS, NOISE

from sketchoptim import _hashing

triton, tl = pytest.importorskip("triton"), pytest.importorskip("triton.language")
from sketchoptim.ops._gpu_launches import Launch  # noqa: E402
from sketchoptim.ops._triton.words import bucket_of, mix, noise, sign_of  # noqa: E402

pytestmark = needs_execution


@triton.jit
def find(words, ids, width: tl.int64, buckets, signs, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    mixed = mix(tl.load(ids + at))
    tl.store(buckets + at, bucket_of(words, 0, mixed, width))
    tl.store(signs + at, sign_of(words, 0, mixed))


@triton.jit
def draw(keys, id, columns, bits, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    key = tl.load(keys).to(tl.uint32)
    tl.store(bits + at, noise(key, tl.load(id), tl.load(columns + at)).to(tl.int64))


def signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


@pytest.mark.parametrize("words", WORDS.values(), ids=map(str, WORDS))
def test_buckets_and_signs_are_those_of_the_specification(words):
    own = torch.tensor([[signed(word) for word in words]])
    ids = torch.tensor([*IDS, 7, 8])
    buckets, signs = torch.zeros(8, dtype=torch.int64), torch.zeros(8)
    for width in WIDTHS:
        arguments = {"words": own, "ids": ids, "width": width, "buckets": buckets, "signs": signs}
        Launch(find, (1,), {**arguments, "COUNT": 8}, {}).run_()
        assert torch.equal(buckets, _hashing.buckets(own, ids, width)[0])
        assert torch.equal(signs, _hashing.signs(own, ids)[0])


@pytest.mark.parametrize(("key", "row_id"), NOISE)
def test_noise_is_that_of_the_specification(key, row_id):
    bits = torch.zeros(len(COLUMNS), dtype=torch.int64)
    columns = torch.tensor(COLUMNS)
    arguments = {"keys": torch.tensor([key]), "id": torch.tensor([row_id]), "columns": columns}
    Launch(draw, (1,), {**arguments, "bits": bits, "COUNT": len(COLUMNS)}, {}).run_()
    assert tuple(bits.tolist()) == NOISE[key, row_id]
