"""Scores of classes from the scores of their buckets in every member of a `MACH`.

A class is ranked by a sum, a minimum or a median over members (`Combination`), which is what
`sketchoptim.ops` computes. An aggregation is a function of logits before that, and a function of
the combined number after it that keeps the order.
"""

from typing import Literal, assert_never

import torch.nn.functional as F
from torch import Tensor

from ..ops import Combination

Aggregation = Literal["mean", "min", "median", "logits", "harmonic"]

# 1 / probability stays below this, so that a sum of 32 of them is finite.
_LARGEST_INVERSE = 1e30


def combination_of(aggregation: Aggregation) -> Combination:
    """How the bucket scores of a class are combined over members."""
    match aggregation:
        case "min":
            return "least"
        case "median":
            return "median"
        case "mean" | "logits" | "harmonic":
            return "sum"
        case _:
            assert_never(aggregation)


def bucket_scores(logits: Tensor, aggregation: Aggregation, *, multi_label: bool) -> Tensor:
    """The scores of buckets to combine, float32 [batch, buckets], from the logits of a member."""
    logits = logits.float()
    if aggregation == "logits":
        return logits
    logs = F.logsigmoid(logits) if multi_label else F.log_softmax(logits, dim=1)
    if aggregation == "harmonic":
        return -(-logs).exp().clamp(max=_LARGEST_INVERSE)
    return logs.exp()


def final_scores(
    combined: Tensor, aggregation: Aggregation, *, members: int, buckets: int, multi_label: bool
) -> Tensor:
    """The scores of classes from their combined bucket scores, in the same order."""
    if aggregation == "harmonic":
        return -members / combined
    if aggregation != "mean":
        return combined
    mean = combined / members
    if multi_label:  # the correction needs probabilities that sum to one
        return mean
    return buckets / (buckets - 1) * (mean - 1 / buckets)
