"""MACH: an ensemble of small classifiers over hashed classes, for many classes.

Member ``r`` of the ensemble hashes the classes to ``buckets`` meta-classes by its own hash, and
learns to predict the meta-class. The score of a class combines the scores of its meta-classes in
all members. No weight, gradient or intermediate result grows with the number of classes.

Members are independent: each depends on the seed, its number and the data alone. So they can be
trained together, one at a time, or in processes that never communicate.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _hashing
from .._files import save_checkpoint
from .._validation import check_choice, check_flag, check_int, check_positive_int
from ..ops import TopClasses, class_scores, top_classes
from ._aggregation import Aggregation, bucket_scores, combination_of, final_scores
from ._class_ids import IGNORE_INDEX, check_int64, check_range, id_range

Inputs = Tensor | tuple[Tensor | None, ...]
# Separates this hash from other uses of the same seed.
_PARAMETER = 0x6D616368
_SHARED = "shared"
# Pads rows of several labels to the length of the longest.
_PADDING = -1


class MACH(nn.Module):
    """An ensemble of classifiers over hashed classes; calling it returns the training loss.

    Member r predicts the bucket h_r(c) of the true class c among `buckets`. Two classes share a
    bucket with probability at most 1 / buckets + 2^-32, except for about one pair in 2^32 (see
    `sketchoptim._hashing`). With P_r the probabilities that member r gives to buckets, and R
    members, classes are ranked by one of these aggregations:

    =============  =====================================================================
    "mean"         buckets / (buckets - 1) (1/R sum_r P_r[h_r(c)] - 1 / buckets): unbiased over the
                   choice of hashes where every P_r is true
                   (`tests/nn/test_mach.py::test_the_mean_is_unbiased_over_the_hashes`)
    "min"          the smallest P_r[h_r(c)]: the member with the fewest collisions decides
    "median"       the median of P_r[h_r(c)]; the mean of the middle two of an even number
    "logits"       the sum of logits: the ranking of the product of the probabilities
    "harmonic"     the harmonic mean of P_r[h_r(c)], between the product and the minimum
    =============  =====================================================================

    The loss is the sum over members of the mean cross entropy; with `multi_label`, of the mean over
    examples of the binary cross entropies, summed over buckets. It is a sum, so that the gradients
    of a member have the same bits whether it is trained alone or with others
    (`tests/nn/test_mach.py::test_members_trained_alone_are_those_trained_together`). The hash of a
    sketched optimizer depends on the parameter's name, or on its number where it has no name: for
    the same bits, give each member an optimizer of its own.

    Args:
        body: called without arguments, once for each body; returns a module that maps inputs to
            hidden vectors [batch, dim]. Its weights are drawn from a seed of the member.
        dim: size of a hidden vector.
        classes: number of classes, from 2 to 2^32.
        buckets: meta-classes of a member, from 2 to `classes`.
        members: number of members, or the numbers of the members to build, such as [3].
        shared: one body for all members instead of one for each.
        multi_label: an example has any number of classes.
        ignore_index: a label that the loss and its mean leave out, as in `F.cross_entropy`; rows of
            several labels may be padded with it, as with -1.
        seed: seed of hashes and weights.

    Shapes: inputs are what a body takes; a tuple holds several arguments, such as `Bags`. labels
    are int64 [batch]; with `multi_label` [batch, most], padded with -1.

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
        ignore_index: int = IGNORE_INDEX,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.dim = check_positive_int("dim", dim)
        self.classes = check_int("classes", classes, least=2, most=_hashing.MAX_ID + 1)
        self.buckets = check_int(
            "buckets",
            buckets,
            least=2,
            most=min(self.classes, _hashing.MAX_WIDTH),
            remedy="more buckets than classes save nothing",
        )
        self.members = _member_numbers(members)
        self.shared = check_flag("shared", shared)
        self.multi_label = check_flag("multi_label", multi_label)
        self.ignore_index = check_int("ignore_index", ignore_index)
        self.seed = check_int("seed", seed)
        self.bodies, self.heads = nn.ModuleDict(), nn.ModuleDict()
        with torch.random.fork_rng(devices=[]):  # keeps the caller's random state
            self._build_members(body)
        self.register_load_state_dict_pre_hook(_check_hashes)  # type: ignore[no-untyped-call]

    def _build_members(self, body: Callable[[], nn.Module]) -> None:
        words = _seeded_words(self.seed, self.members)
        for number, member_words in zip(self.members, words, strict=True):
            # The hash of classes uses the first two words of four; the third one is free as a seed.
            torch.manual_seed(int(member_words[2]))
            if not self.shared or not self.bodies:
                built = body()
                if not isinstance(built, nn.Module):
                    raise TypeError(
                        f"body must return an nn.Module, got {type(built).__name__}; pass a "
                        "function that builds one, such as lambda: nn.Linear(10, 16)"
                    )
                self.bodies[_SHARED if self.shared else str(number)] = built
            head = self.heads[str(number)] = nn.Linear(self.dim, self.buckets)
            # A buffer, in state_dict(): weights are useless without the hash of their training.
            head.register_buffer("words", member_words.clone())

    def table_parameters(self) -> list[nn.Parameter]:
        """The heads, with a row for each bucket, which `so.find_tables` looks for."""
        return [head.get_parameter("weight") for head in self.heads.values()]

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
        self._check_classes("classes", classes)
        return self._buckets_of(classes)

    def _buckets_of(self, classes: Tensor) -> Tensor:
        found = _hashing.buckets(self.words, classes.reshape(-1), self.buckets)
        return found.view(len(self.members), *classes.shape)

    def forward(self, inputs: Inputs, labels: Tensor) -> Tensor:
        """The loss of a batch: a scalar."""
        is_label = self._label_mask(labels)
        buckets = self._buckets_of(labels)
        loss = labels.new_zeros((), dtype=torch.float32)
        for logits, targets in zip(self._logits(inputs), buckets, strict=True):
            if len(logits) != len(labels):
                raise ValueError(
                    f"labels must be as many as the inputs, got {len(labels)} for {len(logits)}; "
                    "pass one label, or one row of labels, for each input"
                )
            if self.multi_label:
                marks = torch.zeros_like(logits).scatter_reduce_(
                    1, targets.where(is_label, 0), is_label.to(logits.dtype), "amax"
                )
                losses = F.binary_cross_entropy_with_logits(logits, marks, reduction="none")
                loss = loss + losses.sum(1).mean()
            else:
                targets = targets.where(is_label, IGNORE_INDEX)
                loss = loss + F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX)
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
        """The scores [batch, k] and ids [batch, k] of the `k` best classes of each example.

        The best class is first; equal scores are in ascending order of ids. It takes two copies of
        the members' scores of buckets [members, batch, buckets], and nothing of the size of
        `classes`. Queries are processed 32 at a time.

        Args:
            candidates: the classes to rank, int64 [n], where duplicates count once; all when None.
        """
        choices: int | Tensor = self.classes
        if candidates is not None:
            self._check_classes("candidates", candidates, dims=1)
            if not candidates.numel():
                raise ValueError(
                    "candidates must be at least one class, got none; pass None for all classes"
                )
            choices = candidates.unique()
        count = choices if isinstance(choices, int) else choices.numel()
        k = check_int("k", k, least=1, most=count, remedy="there are no more classes to rank")
        tables = self._tables(inputs, aggregation)
        found = top_classes(tables, self.words, choices, k, combination_of(aggregation))
        return TopClasses(self._final_scores(found.scores, aggregation), found.ids)

    @torch.no_grad()
    def scores(
        self, inputs: Inputs, classes: Tensor, *, aggregation: Aggregation = "mean"
    ) -> Tensor:
        """The scores of some classes, int64 [n], for each example, float32 [batch, n]."""
        self._check_classes("classes", classes, dims=1)
        tables = self._tables(inputs, aggregation)
        combined = class_scores(tables, self.words, classes, combination_of(aggregation))
        return self._final_scores(combined, aggregation)

    def save(self, path: str | Path) -> None:
        """Writes weights and settings to a file for `load`; the default torch.load reads it too."""
        save_checkpoint({"settings": self._settings(), "state": self.state_dict()}, path)

    @classmethod
    def load(cls, *paths: str | Path, body: Callable[[], nn.Module]) -> "MACH":
        """The ensemble of all members in the files, each of which holds one member or several.

        Members are in the order of their numbers, in whatever order the files are given.
        """
        saved = [torch.load(path, map_location="cpu") for path in paths]
        settings, state = _merged(saved)
        ensemble = cls(body, **settings)
        ensemble.load_state_dict(state)
        return ensemble

    def _settings(self) -> dict[str, Any]:
        names = ("dim", "classes", "buckets", "shared", "multi_label", "ignore_index", "seed")
        return {"members": list(self.members)} | {name: getattr(self, name) for name in names}

    def _logits(self, inputs: Inputs) -> Iterator[Tensor]:
        """The logits [batch, buckets] of each member in turn."""
        hidden = None
        for number in self.members:
            if hidden is None or not self.shared:
                body = self.bodies[_SHARED if self.shared else str(number)]
                hidden = body(*inputs) if isinstance(inputs, tuple) else body(inputs)
                self._check_hidden(hidden)
            yield self.heads[str(number)](hidden)

    def _check_hidden(self, hidden: Any) -> None:
        """Raises where the heads cannot take the result of a body."""
        if not isinstance(hidden, Tensor):
            raise TypeError(
                f"a body must return a tensor of hidden vectors [batch, {self.dim}], got "
                f"{type(hidden).__name__}; wrap it in a module that returns the vectors alone"
            )
        if hidden.dim() != 2 or hidden.shape[1] != self.dim:
            raise ValueError(
                f"a body must return hidden vectors [batch, {self.dim}], got {list(hidden.shape)}; "
                "check the shape of the inputs, or construct MACH with dim of the body"
            )
        # Autocast converts what the heads multiply.
        dtype = next(self.heads.parameters()).dtype
        if hidden.dtype != dtype and not torch.is_autocast_enabled(hidden.device.type):
            raise TypeError(
                f"a body must return {dtype} as the heads have it, got {hidden.dtype}; convert the "
                f"inputs, or the ensemble with MACH.to(dtype)"
            )

    def _tables(self, inputs: Inputs, aggregation: Aggregation) -> Tensor:
        """The scores of buckets to combine, float32 [members, batch, buckets]."""
        check_choice("aggregation", aggregation, get_args(Aggregation))
        tables = torch.stack(
            [
                bucket_scores(logits, aggregation, multi_label=self.multi_label)
                for logits in self._logits(inputs)
            ]
        )
        if not tables.isfinite().all():
            raise ValueError(
                "scores must be finite, got NaN or inf; look for them in the inputs and the weights"
            )
        return tables

    def _final_scores(self, combined: Tensor, aggregation: Aggregation) -> Tensor:
        return final_scores(
            combined,
            aggregation,
            members=len(self.members),
            buckets=self.buckets,
            multi_label=self.multi_label,
        )

    def _label_mask(self, labels: Tensor) -> Tensor:
        """A mask of the labels that count: neither padding nor ignored. All labels are checked."""
        check_int64("labels", labels)
        if labels.dim() != 1 + self.multi_label:
            shape = "[batch, most]" if self.multi_label else "[batch]"
            raise ValueError(
                f"labels must be {shape} with multi_label={self.multi_label}, got shape "
                f"{list(labels.shape)}; reshape them, or construct MACH with "
                f"multi_label={not self.multi_label}"
            )
        is_label = labels != self.ignore_index
        if self.multi_label:
            is_label &= labels != _PADDING
        self._check_classes("labels", labels[is_label])
        return is_label

    def _check_classes(self, name: str, ids: Tensor, *, dims: int | None = None) -> None:
        check_int64(name, ids)
        if dims is not None and ids.dim() != dims:
            raise ValueError(
                f"{name} must have shape [n], got {list(ids.shape)}; call {name}.flatten()"
            )
        check_range(name, id_range(ids), self.classes, layer=type(self).__name__)


def _member_numbers(members: int | Iterable[int]) -> tuple[int, ...]:
    """The numbers of the members to build."""
    if not isinstance(members, Iterable):
        return tuple(range(check_positive_int("members", members)))
    numbers = tuple(check_int("a number in members", number, least=0) for number in members)
    if not numbers or len(set(numbers)) != len(numbers):
        raise ValueError(f"members must be distinct numbers, at least one, got {list(numbers)}")
    return numbers


def _seeded_words(seed: int, members: Sequence[int]) -> Tensor:
    """The hash words of members, int64 [members, 4]."""
    return _hashing.seeded(seed, _PARAMETER, max(members) + 1)[list(members)]


def _check_hashes(mach: MACH, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Raises, before anything is loaded, where the weights were trained with other hashes."""
    # Compared with new words: on the meta device the buffers have no values.
    for number, words in zip(mach.members, _seeded_words(mach.seed, mach.members), strict=True):
        saved = state.get(f"{prefix}heads.{number}.words", words)
        if not saved.is_meta and not torch.equal(saved.to(words.device), words):
            raise ValueError(
                f"member {number} must have the hash of seed = {mach.seed}, got the state of a "
                "MACH of another seed; construct it with that seed, or read a file of MACH.save() "
                "by MACH.load()"
            )


def _merged(saved: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and weights of one ensemble, from the contents of its files."""
    if not saved:
        raise ValueError("paths must be at least one file, got none; pass what save() wrote")
    settings = {name: value for name, value in saved[0]["settings"].items() if name != "members"}
    members: list[int] = []
    state: dict[str, Tensor] = {}
    for file in saved:
        other = dict(file["settings"])
        members += other.pop("members")
        if other != settings:
            raise ValueError(
                f"files must be of one ensemble, got {settings} and {other}; load each by itself"
            )
        state |= file["state"]
    if settings["shared"] and len(saved) > 1:
        raise ValueError(
            "an ensemble with one shared body is in one file, got several; load one of them"
        )
    return settings | {"members": sorted(members)}, state
