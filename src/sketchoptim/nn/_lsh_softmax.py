"""Softmax over many classes, trained on the classes that a hash of the hidden vector finds."""

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._validation import check_flag, check_int, check_positive_int
from ._class_ids import IGNORE_INDEX
from ._output_table import OutputTable, Reduction, reduction_factor
from ._row_pairs import pair_logits
from ._simhash import MAX_BITS, Found, SimHashIndex, collision_probability

Schedule = int | Collection[int] | Callable[[int], bool]

# Rows that are hashed at once when the tables are built.
_BUILD_CHUNK = 8192

# By default a bucket holds at least this many classes on average.
_CLASSES_PER_BUCKET = 8
# The paper's bits, and the most that are the default.
_MOST_DEFAULT_BITS = 15


class LSHSoftmax(OutputTable):
    """Cross entropy over classes that SimHash finds, which are likely to have large logits.

    The active classes of an example are those in the buckets of its hidden vector, up to `budget`
    of them, its label, and `negatives` random ones. Its loss is

        loss = log(sum_{active c} exp(o(c)) / q(c)) - o(y)

    with logits o, label y and q = 1. With `corrected`, q(c) is the probability that c is active: 1
    for the label, and for other classes a function of their angle, the budget and the number of
    random classes. The sum is then an unbiased estimate of the denominator of the softmax, over the
    choice of planes, as long as no bucket holds more than `budget` classes. Without `corrected`, as
    in the paper, training uses the hardest classes only, and logits do not become log
    probabilities.
    Test: `tests/nn/test_lsh_softmax.py::test_corrected_denominators_are_unbiased`.

    The hashed vectors are (hidden, 1) and (weight[c], bias[c]). SimHash finds small angles, while a
    logit also grows with the norm of the row. `recall` measures the share of the largest logits
    that are found: it is small with 15 bits unless angles are small; fewer bits find more and cost
    more.

    With the default bits, a bucket holds 8 to 16 of up to half a million evenly spread classes. On
    clustered classes, with 15 examples of each of 20,000, the test accuracy was .933, that of 256
    uniform negatives .807 and that of the paper's 15 bits without negatives .790 (measured at
    commit 6c3dbaa). Uniform negatives were better with 5 examples of each, and as good for classes
    that are not close to one another.

    The hash tables are built from the current weights, with new random planes each time: in the
    first training step, and then as `rebuild_every` has it. They take 4 bytes per class and table,
    and 8 bytes per bucket. `state_dict()` holds them, so that a resumed run continues bit for bit.
    Test: `tests/experiments/test_classifier.py::test_a_saved_run_goes_on_bit_for_bit`. Do not apply
    activation checkpointing to this layer, but to the layers before it: the second forward pass
    would count as a training step, and could rebuild the tables.

    Args:
        dim: size of a hidden vector.
        classes: number of classes.
        bits: planes of a hash table, K in the paper; a table has 2^bits buckets. None takes the
            most bits, up to the paper's 15, with which a bucket holds at least 8 classes on
            average.
        tables: number of hash tables, L in the paper.
        budget: the largest number of classes that an example takes from its buckets: those that
            match in most tables, or random ones with `corrected`.
        negatives: further classes for each example, drawn uniformly.
        corrected: divides by the probability of being active.
        rebuild_every: steps between rebuilds, or the steps at which to rebuild, or a function that
            returns whether a step rebuilds. The paper uses 250.
        bias, weight, ignore_index: as in `SampledSoftmax`.
        seed: seed of the planes.

    An example that finds no class has a loss of zero; `negatives` prevents that. Gradients of
    weight and bias are sparse; NaN in `hidden` gives a NaN loss.

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
        bits: int | None = None,
        tables: int = 16,
        budget: int = 256,
        negatives: int = 16,
        corrected: bool = False,
        rebuild_every: Schedule = 250,
        bias: bool = False,
        weight: nn.Parameter | None = None,
        ignore_index: int = IGNORE_INDEX,
        seed: int = 0,
    ) -> None:
        super().__init__(dim, classes, bias=bias, weight=weight, ignore_index=ignore_index)
        if bits is None:
            bits = _default_bits(self.classes)
        self.bits = check_int(
            "bits", bits, least=1, most=MAX_BITS, remedy="a table has 2^bits buckets"
        )
        self.tables = check_positive_int("tables", tables)
        self.budget = check_positive_int("budget", budget)
        self.negatives = check_int("negatives", negatives, least=0)
        self.corrected = check_flag("corrected", corrected)
        if not callable(rebuild_every) and not isinstance(rebuild_every, Collection):
            check_positive_int("rebuild_every", rebuild_every)
        self.rebuild_every = rebuild_every
        # The other half of the generator's seed counts rebuilds.
        self.seed = check_int("seed", seed, least=0, most=2**32 - 1)
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
        """The loss over active classes, for training; `generator` fixes all random choices."""
        tokens = self._tokens(hidden, labels)
        factor = reduction_factor(reduction, tokens.labels.numel())
        if self.training and torch.is_grad_enabled():
            self._count_step()
        active = self._active(tokens.hidden, tokens.labels, generator)
        ids, at = active.ids.unique(return_inverse=True)
        rows = F.embedding(ids, self.table.read(), sparse=True)
        logits = pair_logits(tokens.hidden, rows, active.token, at)
        if self.bias_table is not None:
            logits = logits + F.embedding(ids, self.bias_table.read(), sparse=True)[at, 0]
        label_logits = logits[active.label_at]
        if self.corrected:
            logits = logits - self._log_probability(tokens.hidden, logits.detach(), active)
        sums = _log_sums_of_exp(logits, active.token, tokens.labels.numel())
        losses = sums - label_logits
        return tokens.scatter(losses) if factor is None else losses.sum() * factor

    @torch.no_grad()
    def candidates(self, hidden: Tensor, *, generator: torch.Generator | None = None) -> Found:
        """The classes that each hidden vector [queries, dim] finds within the budget."""
        return self._built_index().find(
            self._extended(self._checked_hidden(hidden)),
            budget=self.budget,
            at_random=self.corrected,
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
        """Builds the hash tables from the current weights, with new planes.

        Training does this as `rebuild_every` has it.
        """
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
        """The counts of steps and builds, and the hash tables, for `state_dict()`."""
        state: dict[str, Any] = {"steps": self.steps, "builds": self.builds}
        if self._index is not None:
            state["index"] = dict(vars(self._index))
        return state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restores the counts and the hash tables.

        Tables of a layer with other sizes are ignored; new ones are built when they are needed.
        """
        self.steps, self.builds = state["steps"], state["builds"]
        index = state.get("index")
        sizes = (self._extended_dim, self.tables, self.bits)
        if index is not None and index["normals"].shape == sizes:
            device = self.weight.device
            copies = {name: part.to(device, copy=True) for name, part in index.items()}
            self._index = SimHashIndex(**copies)

    def _count_step(self) -> None:
        """Counts a training step, and rebuilds the tables in a step that is due."""
        schedule = self.rebuild_every
        if callable(schedule):
            is_due = schedule(self.steps)
        elif isinstance(schedule, Collection):
            is_due = self.steps in schedule
        else:
            is_due = self.steps % schedule == 0
        self.steps += 1
        if is_due:
            self.rebuild_()

    def _built_index(self) -> SimHashIndex:
        """The hash tables, built first where there are none on this device."""
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
        return _Active(keys // self.classes, keys % self.classes, label_at, found.matches)

    @torch.no_grad()
    def _log_probability(self, hidden: Tensor, logits: Tensor, active: "_Active") -> Tensor:
        """The logarithm of the probability that each pair [pairs] is active; 0 for labels."""
        query_norm = self._extended(hidden).to(logits.dtype).norm(dim=1)
        ids, at = active.ids.unique(return_inverse=True)
        row_norm = self._extended_rows(ids).to(logits.dtype).norm(dim=1)
        cosine = logits / (query_norm[active.token] * row_norm[at])
        found = collision_probability(cosine, bits=self.bits, tables=self.tables)
        found *= (self.budget / active.matches.clamp(min=1)).clamp_(max=1)[active.token]
        drawn = 1 - (1 - 1 / self.classes) ** self.negatives
        probability = found + drawn - found * drawn
        probability[active.label_at] = 1
        return probability.log()

    @property
    def _extended_dim(self) -> int:
        return self.dim + (self.bias is not None)

    def _extended(self, hidden: Tensor) -> Tensor:
        """The hidden vectors to hash: with a one for the bias."""
        if self.bias is None:
            return hidden
        return torch.cat([hidden, hidden.new_ones(hidden.shape[0], 1)], 1)

    def _extended_rows(self, at: slice | Tensor) -> Tensor:
        """The rows to hash: with the bias."""
        if self.bias is None:
            return self.weight[at]
        return torch.cat([self.weight[at], self.bias[at]], 1)


def _default_bits(classes: int) -> int:
    """The most bits with which a bucket holds enough classes on average, within [1, 15]."""
    most = (classes // _CLASSES_PER_BUCKET).bit_length() - 1
    return min(max(1, most), _MOST_DEFAULT_BITS)


class _Active(NamedTuple):
    """Pairs of a token and an active class, in ascending order."""

    token: Tensor
    ids: Tensor
    label_at: Tensor
    """Positions of the labels among the pairs, int64 [tokens]."""
    matches: Tensor
    """How many classes each token matched, int64 [tokens]."""


def _log_sums_of_exp(logits: Tensor, segment: Tensor, segments: int) -> Tensor:
    """The logarithm of the sum of exp(logits) of each segment, [segments]."""
    highest = logits.new_full((segments,), -math.inf)
    highest.scatter_reduce_(0, segment, logits.detach(), "amax")
    sums = torch.zeros_like(highest).index_add(0, segment, (logits - highest[segment]).exp())
    return highest + sums.log()


def _forget_index(head: "LSHSoftmax", *_: Any) -> None:
    """Drops the tables before loading: they belong to other weights than those that are loaded."""
    head._index = None
