"""MACH: many classes told apart by a few small classifiers over hashed classes.

Member ``r`` of an ensemble hashes the classes to ``buckets`` meta-classes by a hash of its own and
learns which meta-class is right. A class is scored by its meta-class in every member. No weight,
gradient or table has the size of the number of classes, and neither does anything at prediction.

Members know nothing of each other: each is a function of the seed, its number and the data alone,
so they can be trained together, one at a time, or in processes that never communicate.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _hashing
from ..ops._top_classes import Combination, TopClasses, class_scores, top_classes
from ._checks import IGNORED, check_int64, check_positive, check_span, span

Inputs = Tensor | tuple[Tensor | None, ...]
Aggregation = Literal["mean", "min", "median", "logits", "harmonic"]

_COMBINATIONS: dict[Aggregation, Combination] = {
    "mean": "sum", "min": "least", "median": "median", "logits": "sum", "harmonic": "sum",
}  # fmt: skip
# sets the hashes of classes apart from those of other users of one seed
_PARAMETER = 0x6D616368
_SHARED = "shared"
# of rows of several labels, up to the longest
_FILLING = -1
# 1 / probability stays below this, so that a sum of 32 of them is finite
_LARGEST_INVERSE = 1e30


class MACH(nn.Module):
    """An ensemble of classifiers over hashed classes; called, it gives the loss to train with.

    Member r predicts the bucket h_r(c) of the right class c among `buckets`, h_r being 2-universal:
    two classes share a bucket with probability at most 1 / buckets + 2^-32. With P_r the members'
    probabilities of buckets and R members, the classes are ranked by one of these aggregations:

    =============  =====================================================================
    "mean"         buckets / (buckets - 1) (1/R sum_r P_r[h_r(c)] - 1 / buckets): right in the
                   mean over the hashes where every P_r is
                   (`tests/nn/test_mach.py::test_the_mean_is_right_in_the_mean_over_the_hashes`)
    "min"          the least P_r[h_r(c)]: what another class adds is left out where any hash can
    "median"       the median of P_r[h_r(c)]; the mean of the middle two of an even number
    "logits"       the sum of logits: ranks as the product of the probabilities does
    "harmonic"     the harmonic mean of P_r[h_r(c)], between the product and the minimum
    =============  =====================================================================

    The loss is the sum over members of the mean cross entropy, or with `multi_label` of the mean
    over examples of the binary cross entropies, summed over buckets. A sum, so that a member's
    gradients are the same bits alone and in company
    (`tests/nn/test_mach.py::test_members_trained_alone_are_those_trained_together`). An optimizer
    with sketches hashes by a parameter's place in it: give each member its own for that.

    Args:
        body: called without arguments for each body there is; gives a module from inputs to hidden
            vectors [batch, dim]. Weights are drawn from a seed of the member's own.
        dim: length of a hidden vector.
        classes: how many there are, up to 2^32.
        buckets: meta-classes of a member, from 2 to `classes`.
        members: how many there are, or the numbers of those to have here, such as [3].
        shared: one body for all members instead of one for each.
        multi_label: classes are independent of each other, and an example has any number of them.
        ignore_index: the label of an example that is left out of the loss and its mean, as in
            `F.cross_entropy`; rows of several labels may be filled up with it, as with -1.
        seed: of hashes and weights.

    Shapes: inputs are what a body takes, a tuple for several tensors, such as `Bags`. labels are
    int64 [batch]; with `multi_label` [batch, most], filled up with -1.

    Example:
        >>> from sketchoptim.nn import BagEncoder, FeatureHashing
        >>> hashing = FeatureHashing(features=1000)
        >>> mach = MACH(lambda: BagEncoder(1000, 16), 16, 5000, 100, members=3)
        >>> bags, labels = hashing(["usr/bin/env", "etc/passwd"]), torch.tensor([17, 4999])
        >>> mach(bags, labels).backward()
        >>> mach.bodies["0"].weight.grad.is_sparse
        True
        >>> mach.top_k(bags, 10).ids.shape
        torch.Size([2, 10])

    Reference: Medini et al. 2019, Extreme Classification in Log Memory using Count-Min Sketch: A
    Case Study of Amazon Search with 50M Products.
    """

    def __init__(
        self,
        body: Callable[[], nn.Module],
        dim: int,
        classes: int,
        buckets: int,
        *,
        members: int | Iterable[int] = 4,
        shared: bool = False,
        multi_label: bool = False,
        ignore_index: int = IGNORED,
        seed: int = 0,
    ) -> None:
        super().__init__()
        numbers = list(range(members) if isinstance(members, int) else members)
        _check_sizes(dim, classes, buckets, numbers)
        self.dim, self.classes, self.buckets, self.seed = dim, classes, buckets, seed
        self.members, self.shared, self.multi_label = tuple(numbers), shared, multi_label
        self.ignore_index = ignore_index
        words = _seeded_words(seed, numbers)
        self.bodies, self.heads = nn.ModuleDict(), nn.ModuleDict()
        with torch.random.fork_rng(devices=[]):  # leaves the caller's random numbers alone
            # the hash of classes takes two words of four: another one is free to be a seed
            for number, its_words in zip(numbers, words, strict=True):
                torch.manual_seed(int(its_words[2]))
                if not shared or not self.bodies:
                    self.bodies[_SHARED if shared else str(number)] = body()
                head = self.heads[str(number)] = nn.Linear(dim, buckets)
                # in state_dict(): weights mean nothing without the hash that they were trained by
                head.register_buffer("words", its_words.clone())
        self.register_load_state_dict_pre_hook(_check_hashes)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return (
            f"{self.dim}, {self.classes}, {self.buckets}, members={list(self.members)}, "
            f"shared={self.shared}, multi_label={self.multi_label}, seed={self.seed}"
        )

    @property
    def words(self) -> Tensor:
        """The hash words of the members, int64 [members, 4] (`sketchoptim._hashing`)."""
        return torch.stack([head.get_buffer("words") for head in self.heads.values()])

    def buckets_of(self, classes: Tensor) -> Tensor:
        """The bucket of each class in each member, int64 [members, ...]."""
        found = _hashing.buckets(self.words, classes.reshape(-1), self.buckets)
        return found.view(len(self.members), *classes.shape)

    def forward(self, inputs: Inputs, labels: Tensor) -> Tensor:
        """The loss of a batch: a scalar."""
        is_label = self._checked(labels)
        buckets = self.buckets_of(labels)
        loss = labels.new_zeros((), dtype=torch.float32)
        for logits, targets in zip(self._each(inputs), buckets, strict=True):
            if len(logits) != len(labels):
                raise ValueError(
                    f"labels must be as many as the inputs, got {len(labels)} for {len(logits)}"
                )
            if self.multi_label:
                marks = torch.zeros_like(logits).scatter_reduce_(
                    1, targets.where(is_label, 0), is_label.to(logits.dtype), "amax"
                )
                losses = F.binary_cross_entropy_with_logits(logits, marks, reduction="none")
                loss = loss + losses.sum(1).mean()
            else:
                targets = targets.where(is_label, IGNORED)
                loss = loss + F.cross_entropy(logits, targets, ignore_index=IGNORED)
        return loss

    @torch.no_grad()
    def top_k(
        self,
        inputs: Inputs,
        k: int,
        *,
        aggregation: Aggregation = "mean",
        candidates: Tensor | None = None,
    ) -> TopClasses:
        """The `k` best classes of each example, as scores [batch, k] and ids [batch, k].

        Best first, and the lower class first among equal scores. Needs the members' scores of
        buckets [members, batch, buckets] twice and nothing of the size of `classes`. Queries are
        answered 32 at a time.

        Args:
            candidates: classes to choose from, int64 [n]; all of them when None. One that is there
                twice counts once.
        """
        choices: int | Tensor = self.classes
        if candidates is not None:
            self._check_classes("candidates", candidates)
            choices = candidates.reshape(-1).unique()
        count = choices if isinstance(choices, int) else choices.numel()
        if not 1 <= k <= count:
            raise ValueError(
                f"k must be in [1, {count}], the number of classes to choose from, got {k}"
            )
        tables = self._tables(inputs, aggregation)
        found = top_classes(tables, self.words, choices, k, _COMBINATIONS[aggregation])
        return TopClasses(self._estimates(found.scores, aggregation), found.ids)

    @torch.no_grad()
    def scores(
        self, inputs: Inputs, classes: Tensor, *, aggregation: Aggregation = "mean"
    ) -> Tensor:
        """The scores of some classes [n] for each example, float32 [batch, n]."""
        self._check_classes("classes", classes)
        tables = self._tables(inputs, aggregation)
        combined = class_scores(tables, self.words, classes, _COMBINATIONS[aggregation])
        return self._estimates(combined, aggregation)

    def save(self, path: str | Path) -> None:
        """Writes weights and settings to a file that `load` reads, as does torch.load."""
        torch.save({"settings": self._settings(), "state": self.state_dict()}, path)

    @classmethod
    def load(cls, *paths: str | Path, body: Callable[[], nn.Module]) -> "MACH":
        """The ensemble of all members in some files: one file of several, or several of one each.

        The members are in the order of their numbers, whatever that of the files.
        """
        saved = [torch.load(path, map_location="cpu") for path in paths]
        settings, state = _merged(saved)
        ensemble = cls(body, **settings)
        ensemble.load_state_dict(state)
        return ensemble

    def _settings(self) -> dict[str, Any]:
        names = ("dim", "classes", "buckets", "shared", "multi_label", "ignore_index", "seed")
        return {"members": list(self.members)} | {name: getattr(self, name) for name in names}

    def _each(self, inputs: Inputs) -> Iterator[Tensor]:
        """Logits [batch, buckets], member by member."""
        hidden = None
        for number in self.members:
            if hidden is None or not self.shared:
                body = self.bodies[_SHARED if self.shared else str(number)]
                hidden = body(*inputs) if isinstance(inputs, tuple) else body(inputs)
                if hidden.dim() != 2 or hidden.shape[1] != self.dim:
                    raise ValueError(
                        f"a body must give hidden vectors [batch, {self.dim}], got "
                        f"{list(hidden.shape)}"
                    )
            yield self.heads[str(number)](hidden)

    def _tables(self, inputs: Inputs, aggregation: Aggregation) -> Tensor:
        """What is combined, float32 [members, batch, buckets]."""
        if aggregation not in get_args(Aggregation):
            allowed = list(get_args(Aggregation))
            raise ValueError(f"aggregation must be one of {allowed}, got {aggregation!r}")
        tables = torch.stack([self._table(logits, aggregation) for logits in self._each(inputs)])
        if not tables.isfinite().all():
            raise ValueError(
                "scores must be finite, got NaN or inf; look for them in the inputs and the weights"
            )
        return tables

    def _table(self, logits: Tensor, aggregation: Aggregation) -> Tensor:
        logits = logits.float()
        if aggregation == "logits":
            return logits
        logs = F.logsigmoid(logits) if self.multi_label else F.log_softmax(logits, dim=1)
        if aggregation == "harmonic":
            return -(-logs).exp().clamp(max=_LARGEST_INVERSE)
        return logs.exp()

    def _estimates(self, combined: Tensor, aggregation: Aggregation) -> Tensor:
        """Scores from what was combined, in the same order."""
        if aggregation == "harmonic":
            return -len(self.members) / combined
        if aggregation != "mean":
            return combined
        mean = combined / len(self.members)
        if self.multi_label:  # there is no sum to one that the correction could rest on
            return mean
        return self.buckets / (self.buckets - 1) * (mean - 1 / self.buckets)

    def _checked(self, labels: Tensor) -> Tensor:
        """Which of the labels are labels and not to be ignored, after a look at all of them."""
        if labels.dim() != 1 + self.multi_label:
            shape = "[batch, most]" if self.multi_label else "[batch]"
            raise ValueError(
                f"labels must be {shape} with multi_label={self.multi_label}, "
                f"got shape {list(labels.shape)}"
            )
        is_label = labels != self.ignore_index
        if self.multi_label:
            is_label &= labels != _FILLING
        self._check_classes("labels", labels[is_label])
        return is_label

    def _check_classes(self, name: str, ids: Tensor) -> None:
        check_int64(name, ids)
        check_span(name, span(ids), self.classes, layer=type(self).__name__)
        if name == "candidates" and not ids.numel():
            raise ValueError("candidates must be at least one class, got none; None takes all")


def recall(found: Tensor | TopClasses, labels: Tensor) -> float:
    """Recall@k: which part of the labels is among the classes found, [batch, k], in the mean.

    found is what `top_k` of any layer gives.
    labels are [batch], or [batch, most] filled up with -1; what is negative is no label, examples
    without labels are left out, and where none has any, the recall is NaN.

    Example:
        >>> recall(torch.tensor([[3, 1], [2, 0]]), torch.tensor([1, 7]))
        0.5
    """
    if isinstance(found, TopClasses):
        found = found.ids
    if found.dim() != 2 or labels.shape[:1] != found.shape[:1]:
        raise ValueError(
            f"found must be [batch, k] and labels [batch] or [batch, most], got "
            f"{list(found.shape)} and {list(labels.shape)}"
        )
    labels = labels.reshape(len(found), -1)
    is_label = labels >= 0
    is_found = (labels[:, :, None] == found[:, None, :]).any(2) & is_label
    has_any = is_label.any(1)
    return (is_found.sum(1)[has_any] / is_label.sum(1)[has_any]).mean().item()


def _check_sizes(dim: int, classes: int, buckets: int, members: list[int]) -> None:
    check_positive(dim=dim)
    if not 2 <= classes <= _hashing.MAX_ID + 1:
        raise ValueError(f"classes must be in [2, 2**32], got {classes}")
    if not 2 <= buckets <= min(classes, _hashing.MAX_WIDTH):
        raise ValueError(
            f"buckets must be in [2, classes = {classes}], got {buckets}; "
            "hashing to more buckets than there are classes saves nothing"
        )
    if not members or min(members) < 0 or len(set(members)) != len(members):
        raise ValueError(f"members must be distinct numbers >= 0, at least one, got {members}")


def _seeded_words(seed: int, members: Sequence[int]) -> Tensor:
    """The hash words of members, int64 [members, 4]."""
    return _hashing.seeded(seed, _PARAMETER, max(members) + 1)[list(members)]


def _check_hashes(mach: MACH, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Raises before anything is loaded where the weights were trained with other hashes."""
    # not those of the buffers, which on the meta device have no values
    for number, words in zip(mach.members, _seeded_words(mach.seed, mach.members), strict=True):
        saved = state.get(f"{prefix}heads.{number}.words", words)
        if not saved.is_meta and not torch.equal(saved.to(words.device), words):
            raise ValueError(
                f"member {number} must have the hash of seed = {mach.seed}, got the state of a "
                "MACH of another seed; construct it with that seed, or read a file of MACH.save() "
                "by MACH.load()"
            )


def _merged(saved: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and weights of one ensemble, out of what several files hold."""
    if not saved:
        raise ValueError("paths must be at least one file, got none")
    settings = {name: value for name, value in saved[0]["settings"].items() if name != "members"}
    members: list[int] = []
    state: dict[str, Tensor] = {}
    for file in saved:
        other = dict(file["settings"])
        members += other.pop("members")
        if other != settings:
            raise ValueError(f"files must be of one ensemble, got {settings} and {other}")
        state |= file["state"]
    if settings["shared"] and len(saved) > 1:
        raise ValueError("an ensemble with one shared body is in one file, got several")
    return settings | {"members": sorted(members)}, state
