"""Softmax over very many classes, trained on those that a hash of the hidden vector finds."""

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._checks import IGNORED, check_positive
from ._output_table import OutputTable, Reduction, token_factor
from ._pair_logits import pair_logits
from ._simhash import MAX_BITS, Found, SimHashIndex, meeting_probability

Schedule = int | Collection[int] | Callable[[int], bool]

# Rows that are hashed at once while building.
_BUILD_CHUNK = 8192


class LSHSoftmax(OutputTable):
    """Cross entropy over the classes whose logits are probably large, found by SimHash.

    An example's active classes are those in the buckets that its hidden vector falls into, up to
    `budget` of them, plus its label, plus `negatives` random ones. Its loss is

        loss = log(sum_{active c} exp(o(c)) / q(c)) - o(y)

    with logits o, label y and q = 1. When `corrected`, q(c) is the probability that c is active:
    one for the label; for others it follows from their angle, the budget and the random draw. The
    sum is then an unbiased estimate of the softmax's denominator, over the choice of planes, as
    long as no bucket holds more than `budget` classes. Without it, as in the paper, training is
    against the hardest classes only, and logits do not become log probabilities.
    Test: `tests/nn/test_lsh_softmax.py::test_corrected_denominators_are_right_in_the_mean`.

    What is hashed are (hidden, 1) and (weight[c], bias[c]), so a small angle counts, and not a
    long row as it does for logits. `recall` says how many of the largest logits are found: few
    with 15 bits unless angles are small; fewer bits find more and cost more.

    Tables are made of the weights as they are, with new random planes every time: in the first
    training step, and whenever `rebuild_every` says. They take 4 bytes a class and table and 8
    bytes a bucket, in memory and in `state_dict()`, so that a resumed run goes on bit for bit.
    Test: `tests/experiments/test_classifier.py::test_a_saved_run_goes_on_bit_for_bit`. Keep the
    layer out of activation checkpointing, which would count each step twice and may rebuild between
    the two: checkpoint what comes before it.

    Args:
        dim: length of a hidden vector.
        classes: number of classes.
        bits: planes of a table, K in the paper; a table has 2^bits buckets.
        tables: L in the paper.
        budget: most classes that an example takes from its buckets: those that it meets in most
            tables, or, when corrected, any.
        negatives: random classes for each example besides, drawn evenly.
        corrected: divides by the probability of being active.
        rebuild_every: steps between rebuilds, or the steps at which to rebuild, or a function that
            says so for a step. The paper's is 250.
        bias, weight, ignore_index: as in `SampledSoftmax`.
        seed: of the planes.

    An example that finds no class has a loss of zero; `negatives` prevents that. Gradients of the
    tables are sparse; NaN in `hidden` gives a NaN loss.

    Shapes: hidden [..., dim], labels [...] int64; the loss is a scalar unless reduction="none".

    Example:
        >>> head = LSHSoftmax(16, 1000, bits=6, tables=8, budget=64)
        >>> hidden, labels = torch.randn(8, 16), torch.arange(8)
        >>> head(hidden, labels).backward()
        >>> head.weight.grad.is_sparse
        True
        >>> 0 < head.recall(hidden, 10) <= 1
        True

    References: Charikar 2002, Similarity estimation techniques from rounding algorithms; Spring
    and Shrivastava 2017, Scalable and sustainable deep learning via randomized hashing.
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        bits: int = 15,
        tables: int = 16,
        budget: int = 256,
        negatives: int = 0,
        corrected: bool = False,
        rebuild_every: Schedule = 250,
        bias: bool = False,
        weight: nn.Parameter | None = None,
        ignore_index: int = IGNORED,
        seed: int = 0,
    ) -> None:
        super().__init__(dim, classes, bias=bias, weight=weight, ignore_index=ignore_index)
        check_positive(bits=bits, tables=tables, budget=budget)
        if bits > MAX_BITS:
            raise ValueError(f"bits must be <= {MAX_BITS}, got {bits}; a table has 2^bits buckets")
        if negatives < 0:
            raise ValueError(f"negatives must be >= 0, got {negatives}")
        if isinstance(rebuild_every, int):
            check_positive(rebuild_every=rebuild_every)
        if not 0 <= seed < 2**32:  # the other half of a generator's seed counts rebuilds
            raise ValueError(f"seed must be in [0, 2**32 - 1], got {seed}")
        self.bits, self.tables, self.budget = bits, tables, budget
        self.negatives, self.corrected = negatives, corrected
        self.rebuild_every, self.seed = rebuild_every, seed
        self.steps, self.builds = 0, 0
        self._index: SimHashIndex | None = None
        self.register_load_state_dict_pre_hook(_forget_index)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return (
            f"{self.dim}, {self.classes}, bits={self.bits}, tables={self.tables}, "
            f"budget={self.budget}, negatives={self.negatives}, corrected={self.corrected}, "
            f"bias={self.bias is not None}"
        )

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor,
        *,
        reduction: Reduction = "mean",
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The loss over active classes, for training; `generator` fixes what is left to chance."""
        tokens = self._tokens(hidden, labels)
        factor = token_factor(reduction, tokens.labels.numel())
        if self.training and torch.is_grad_enabled():
            self._take_step()
        active = self._active(tokens.hidden, tokens.labels, generator)
        ids, at = active.ids.unique(return_inverse=True)
        rows = F.embedding(ids, self.weight, sparse=True)
        logits = pair_logits(tokens.hidden, rows, active.token, at)
        if self.bias is not None:
            logits = logits + F.embedding(ids, self.bias, sparse=True)[at, 0]
        label_logits = logits[active.label_at]
        if self.corrected:
            logits = logits - self._log_probability(tokens.hidden, logits.detach(), active)
        sums = _log_sums_of_exp(logits, active.token, tokens.labels.numel())
        losses = sums - label_logits
        return tokens.in_place(losses) if factor is None else losses.sum() * factor

    @torch.no_grad()
    def candidates(self, hidden: Tensor, *, generator: torch.Generator | None = None) -> Found:
        """The classes that each hidden vector [queries, dim] finds within the budget."""
        return self._built_index().find(
            self._extended(self._checked_hidden(hidden)),
            budget=self.budget,
            by_chance=self.corrected,
            generator=generator,
        )

    @torch.no_grad()
    def recall(
        self,
        hidden: Tensor,
        k: int,
        *,
        chunk: int = 4096,
        generator: torch.Generator | None = None,
    ) -> float:
        """The share of the k largest logits of each hidden vector that are its candidates."""
        best = self.top_k(hidden, k, chunk=chunk).reshape(-1, k)
        found = self.candidates(hidden, generator=generator)
        wanted = best + self.classes * torch.arange(best.shape[0], device=best.device)[:, None]
        is_found = torch.isin(wanted, found.query * self.classes + found.ids)
        return is_found.double().mean().item()

    @torch.no_grad()
    def rebuild_(self) -> None:
        """Hashes all classes anew, by new planes; training does it when it is due."""
        normals = SimHashIndex.planes(
            self._extended_dim,
            bits=self.bits,
            tables=self.tables,
            seed=(self.seed << 32) + self.builds,
        )
        chunks = (
            self._extended_rows(slice(start, start + _BUILD_CHUNK))
            for start in range(0, self.classes, _BUILD_CHUNK)
        )
        self._index = SimHashIndex.build(chunks, normals.to(self.weight.device))
        self.builds += 1

    def get_extra_state(self) -> dict[str, Any]:
        """What `state_dict()` holds besides weight and bias: the schedule, and the tables."""
        state: dict[str, Any] = {"steps": self.steps, "builds": self.builds}
        if self._index is not None:
            state["index"] = dict(vars(self._index))
        return state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Takes up the schedule and the tables where the saved layer was.

        Tables of a layer with other sizes are left, and made anew when needed.
        """
        self.steps, self.builds = state["steps"], state["builds"]
        index = state.get("index")
        sizes = (self._extended_dim, self.tables, self.bits)
        if index is not None and index["normals"].shape == sizes:
            device = self.weight.device
            copies = {name: it.to(device, copy=True) for name, it in index.items()}
            self._index = SimHashIndex(**copies)

    def _take_step(self) -> None:
        """Counts a training step, and rebuilds where one is due."""
        due = self.rebuild_every
        if isinstance(due, int):
            is_due = self.steps % due == 0
        else:
            is_due = due(self.steps) if callable(due) else self.steps in due
        self.steps += 1
        if is_due:
            self.rebuild_()

    def _built_index(self) -> SimHashIndex:
        """The tables, made first where there are none, or none on this device."""
        if self._index is None or self._index.members.device != self.weight.device:
            self.rebuild_()
        assert self._index is not None
        return self._index

    def _active(
        self, hidden: Tensor, labels: Tensor, generator: torch.Generator | None
    ) -> "_Active":
        """Candidates, labels and random negatives, as distinct pairs of a token and a class."""
        found = self.candidates(hidden, generator=generator)
        first = self.classes * torch.arange(labels.numel(), device=labels.device)
        random = torch.rand(
            labels.numel(), self.negatives, generator=generator, device=labels.device
        )
        negatives = (random * self.classes).long().clamp_(max=self.classes - 1)
        keys = torch.cat(
            [
                found.query * self.classes + found.ids,
                first + labels,
                (first[:, None] + negatives).flatten(),
            ]
        ).unique()
        label_at = torch.searchsorted(keys, first + labels)
        return _Active(keys // self.classes, keys % self.classes, label_at, found.met)

    @torch.no_grad()
    def _log_probability(self, hidden: Tensor, logits: Tensor, active: "_Active") -> Tensor:
        """log of how probable each pair [pairs] was to be active; 0 for labels."""
        query_norm = self._extended(hidden).to(logits.dtype).norm(dim=1)
        ids, at = active.ids.unique(return_inverse=True)
        row_norm = self._extended_rows(ids).to(logits.dtype).norm(dim=1)
        cosine = logits / (query_norm[active.token] * row_norm[at])
        found = meeting_probability(cosine, bits=self.bits, tables=self.tables)
        found *= (self.budget / active.met.clamp(min=1)).clamp_(max=1)[active.token]
        drawn = 1 - (1 - 1 / self.classes) ** self.negatives
        probability = found + drawn - found * drawn
        probability[active.label_at] = 1
        return probability.log()

    @property
    def _extended_dim(self) -> int:
        return self.dim + (self.bias is not None)

    def _extended(self, hidden: Tensor) -> Tensor:
        """Hidden vectors as they are hashed: with a one for the bias."""
        if self.bias is None:
            return hidden
        return torch.cat([hidden, hidden.new_ones(hidden.shape[0], 1)], 1)

    def _extended_rows(self, at: slice | Tensor) -> Tensor:
        """Rows as they are hashed: with the bias."""
        if self.bias is None:
            return self.weight[at]
        return torch.cat([self.weight[at], self.bias[at]], 1)


class _Active(NamedTuple):
    """Pairs of a token and a class, ascending, where the labels are, and what tokens met."""

    token: Tensor
    ids: Tensor
    label_at: Tensor
    met: Tensor


def _log_sums_of_exp(logits: Tensor, segment: Tensor, segments: int) -> Tensor:
    """log of the sum of exp(logits) of each segment, [segments]."""
    highest = logits.new_full((segments,), -math.inf)
    highest.scatter_reduce_(0, segment, logits.detach(), "amax")
    sums = torch.zeros_like(highest).index_add(0, segment, (logits - highest[segment]).exp())
    return highest + sums.log()


def _forget_index(head: "LSHSoftmax", *_: Any) -> None:
    """Tables of other weights are worth nothing, in case the checkpoint brings none."""
    head._index = None
