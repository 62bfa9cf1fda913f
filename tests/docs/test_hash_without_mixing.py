"""What docs/results.md says of the hash that its tables were measured with."""

import pytest
import torch
from torch import Tensor

from sketchoptim import _hashing

WIKITEXT2, WIKIPEDIA, LM1B = 33_278, 309_749, 793_471


def unmixed_buckets(rows: int, width: int, parameter: int, seed: int = 0) -> Tensor:
    """The buckets ``[3, rows]`` of consecutive ids by the hash as it was, without `mix`."""
    words, ids = _hashing.seeded(seed, parameter, 3), torch.arange(rows)
    u = ((words[:, 0:1] * ids + words[:, 1:2]) >> 32) & (2**32 - 1)
    return (u * width) >> 32


def filled_shares(buckets: Tensor, width: int) -> list[float]:
    """The share of buckets that hold an id, for each hash row."""
    return [row.bincount(minlength=width).count_nonzero().item() / width for row in buckets]


# Rows of a table, and the numbers that its parameters had in their optimizer.
@pytest.mark.parametrize(
    ("rows", "parameters"),
    [(WIKITEXT2, 3), (WIKIPEDIA, 3), (32_000, 1), (80_000, 4), (51_534, 3)],
)
def test_lean_had_no_empty_bucket_where_quality_was_measured(rows, parameters):
    width = rows // 24
    for parameter in range(parameters):
        assert filled_shares(unmixed_buckets(rows, width, parameter), width) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("rows", "width", "empty"),
    [
        (WIKIPEDIA, int(0.2 * WIKIPEDIA / 3), 0.17),
        (WIKIPEDIA, WIKIPEDIA // 12, 0.32),
        (LM1B, LM1B // 24, 0.23),
        (LM1B, int(0.2 * LM1B / 3), 0.40),
    ],
)
def test_one_hash_row_of_some_embeddings_had_empty_buckets(rows, width, empty):
    shares = filled_shares(unmixed_buckets(rows, width, 0), width)
    assert [round(1 - share, 2) for share in shares] == [0.0, 0.0, pytest.approx(empty, abs=0.011)]


@pytest.mark.parametrize(
    ("parameter", "percent"), [(0, [81, 92, 69]), (1, [41, 72, 21])], ids=["embedding", "softmax"]
)
def test_the_most_frequent_words_of_wikitext_2_filled_other_shares_than_at_random(
    parameter, percent
):
    width = WIKITEXT2 // 24
    shares = filled_shares(unmixed_buckets(width, width, parameter), width)
    assert [round(100 * share) for share in shares] == pytest.approx(percent, abs=1)


def test_about_one_hash_row_in_forty_left_a_tenth_of_its_buckets_empty():
    width = WIKITEXT2 // 24
    shares = torch.tensor(
        [
            filled_shares(unmixed_buckets(WIKITEXT2, width, parameter=0, seed=seed), width)
            for seed in range(400)
        ]
    )
    assert (shares < 0.9).double().mean().item() == pytest.approx(1 / 40, abs=0.007)
    assert shares.min().item() < 0.3
