"""A gradient that is not written down: a tensor whose rows are computed when they are read."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .._rows import Chunk, RowChunks, arithmetic_dtype, of_gradient, rows_in_a_chunk
from .._torch_private import entries, plain_torch_function, wrapper_tensor
from .._warning import warn
from ._parts import Part, PlainRows, Reader, Scale


class Term(NamedTuple):
    """A part with a factor of its own."""

    part: Part
    scale: Scale = 1.0


class Content:
    """What a gradient is: ``scale`` times the sum of its terms. A detached gradient shares it."""

    __slots__ = ("is_sparse", "scale", "terms")

    def __init__(self, terms: tuple[Term, ...], scale: Scale, *, is_sparse: bool) -> None:
        self.terms, self.scale, self.is_sparse = terms, scale, is_sparse

    @property
    def plain(self) -> PlainRows | None:
        """The rows, if all of them exist already; the scale is then 1."""
        part = self.terms[0].part if len(self.terms) == 1 else None
        return part if isinstance(part, PlainRows) else None

    def copied(self) -> "Content":
        """A content that changes independently: parts are shared, but rows that exist are not."""
        if self.plain is None:
            return Content(self.terms, self.scale, is_sparse=self.is_sparse)
        return Content((Term(self.plain.copied()),), 1.0, is_sparse=self.is_sparse)

    def scale_(self, factor: Scale) -> None:
        """Multiplies by a factor: when rows are read, unless they exist."""
        if self.plain is None:
            self.scale = self.scale * factor
        else:
            self.plain.scale_(factor)

    def scaled_terms(self, factor: float) -> tuple[Term, ...]:
        """The terms, each with the common scale and a factor in its own."""
        return tuple(Term(part, scale * self.scale * factor) for part, scale in self.terms)


Handler = Callable[..., Any]
HANDLERS: dict[Any, Handler] = {}
"""What operations do that need no rows (`_operations.py`)."""


class DeferredGradient(Tensor):
    """A gradient that stays what it is made of, until it is read block by block.

    It takes the place of a plain tensor in `parameter.grad`, with the parameter's shape, dtype and
    device but without storage. It is a sum of parts, such as the hidden states and targets of a
    softmax head, or the ids and output gradients of lookups. Adding gradients concatenates their
    parts, and multiplication by a number is deferred, so accumulation, tied weights, clipping and
    gradient scaling compute no row. The optimizers of this package read it in blocks of rows.

    Every other operation reads the plain gradient, which is then computed once, with one warning
    that names the operation and the bytes. In-place operations other than scaling, adding and
    zeroing raise. The tensors behind the parts, and a weight from which rows are computed, must not
    be modified in place before the gradient is used; reading it raises otherwise. A gradient whose
    parts would take more memory than the plain one becomes the plain one.

    >>> weight = torch.nn.Parameter(torch.zeros(1000, 2))
    >>> from sketchoptim.deferred import Lookups
    >>> lookups = Lookups(weight, torch.tensor([3, 5, 3]), torch.ones(3, 2), is_sparse=False)
    >>> weight.grad = DeferredGradient(weight, [lookups])
    >>> weight.grad.rows(3, 6)
    tensor([[2., 2.],
            [0., 0.],
            [1., 1.]])
    """

    _content: Content

    @staticmethod
    def __new__(
        cls, weight: Tensor, parts: Sequence[Part], *, collapses: bool = True
    ) -> "DeferredGradient":
        """The sum of parts, each of which is a gradient of `weight`.

        With ``collapses=False`` parts may take more memory than the plain gradient until another
        one is added: for a sparse gradient, and for parts that share their memory with others.
        """
        terms, is_sparse = tuple(map(Term, parts)), all(part.is_sparse for part in parts)
        gradient = wrapped(weight, Content(terms, 1.0, is_sparse=is_sparse))
        if collapses:
            gradient.collapse_if_larger_()
        return gradient

    # -- for readers of deferred gradients ------------------------------------------------------

    @property
    def terms(self) -> tuple[Term, ...]:
        """The parts with their own factors; the gradient is `scale` times their sum."""
        return self._content.terms

    @property
    def scale(self) -> Scale:
        """The factor of the sum of all terms."""
        return self._content.scale

    @property
    def is_row_sparse(self) -> bool:
        """Whether the plain gradient would be sparse, so that a step moves touched rows alone."""
        plain = self._content.plain
        return self._content.is_sparse and (plain is None or plain.touched is not None)

    @property
    def touched(self) -> Tensor | None:
        """The ids of the rows that a step moves, ascending and distinct; None for all rows."""
        if not self.is_row_sparse:
            return None
        found = [part.touched for part, _ in self.terms]
        if len(found) == 1:
            return found[0]
        ids = [touched for touched in found if touched is not None]
        return torch.cat(ids).unique() if ids else torch.empty(0, dtype=torch.int64)

    @property
    def exists(self) -> bool:
        """Whether all rows are written down already."""
        return self._content.plain is not None

    @property
    def plain(self) -> Tensor | None:
        """The plain gradient, if its rows exist already: dense, or sparse with touched rows."""
        part = self._content.plain
        if part is None or not self.is_row_sparse:
            return None if part is None else part.values
        return self.to_sparse_rows()

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes of the tensors that it keeps alive, which the plain gradient would not."""
        return sum(part.nbytes for part, _ in self.terms)

    def check_current(self) -> None:
        """Raises if the weight or a tensor behind a part was modified since the backward pass."""
        for part, _ in self.terms:
            part.check_current()

    @property
    def is_current(self) -> bool:
        """Whether it may be read: nothing behind its parts was modified since."""
        return all(part.is_current for part, _ in self.terms)

    def rows(self, begin: int, end: int) -> Tensor:
        """The rows ``begin <= i < end`` as a plain tensor."""
        if not 0 <= begin <= end <= self.shape[0]:
            raise ValueError(
                f"rows must be within 0 and {self.shape[0]}, got begin={begin}, end={end}"
            )
        self.check_current()
        block = _Pass(self).block(slice(begin, end), end - begin)
        return block.to(self.dtype).view(end - begin, *self.shape[1:])

    def to_dense(self, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        """The plain gradient, as a new dense tensor."""
        dense = torch.zeros(self.shape, dtype=dtype or self.dtype, device=self.device)
        for chunk in self.chunks():
            dense[chunk.at] = chunk.gradient.view(-1, *self.shape[1:]).to(dense.dtype)
        return dense

    def to_plain(self) -> Tensor:
        """The plain gradient: sparse with the touched rows, or dense."""
        return self.to_sparse_rows() if self.is_row_sparse else self.to_dense()

    @torch.no_grad()
    def to_sparse_rows(self) -> Tensor:
        """The plain gradient as a sparse tensor, uncoalesced, if `is_row_sparse`.

        It has a row for each lookup, and no copy of the output gradients of single lookups.
        """
        self.check_current()
        found = [(part.entries(), scale * self.scale) for part, scale in self.terms]
        ids = [ids for (ids, _), _ in found]
        values = [
            rows if _is_one(scale) else (rows * scale).to(self.dtype) for (_, rows), scale in found
        ]
        if len(found) != 1:
            ids = [torch.cat([torch.empty(0, dtype=torch.int64, device=self.device), *ids])]
            empty = torch.empty(0, *self.shape[1:], dtype=self.dtype, device=self.device)
            values = [torch.cat([empty, *values])]
        return torch.sparse_coo_tensor(
            ids[0][None], values[0], self.shape, check_invariants=False, device=self.device
        )

    def check_ids(self) -> None:
        """Raises unless the rows that were looked up are within the parameter; waits for a GPU."""
        for part, _ in self.terms:
            part.check_ids()

    @torch.no_grad()
    def chunks(self, touched: Tensor | None = None) -> Iterator[Chunk]:
        """The rows that a step moves, block by block in ascending order.

        Numbers are in float32 at least, and not rounded to the gradient's dtype. Earlier rows of
        the weight may be modified between two blocks. A block is overwritten by the next.
        """
        self.check_current()
        reading = _Pass(self)
        size = reading.block_rows
        ids = self.touched if touched is None else touched
        for start in range(0, self.shape[0] if ids is None else ids.numel(), size):
            if ids is None:
                stop = min(start + size, self.shape[0])
                at: slice | Tensor = slice(start, stop)
                numbers = torch.arange(start, stop, device=self.device)
            else:
                at = numbers = ids[start : start + size]
            yield Chunk(at, numbers, reading.block(at, numbers.numel()))

    @torch.no_grad()
    def norm_of(self, norm_type: float) -> Tensor:
        """The norm of all elements, in float32 at least, by one pass that keeps no row."""
        norms = [
            torch.linalg.vector_norm(chunk.gradient, norm_type)
            for chunk in self.chunks()
            if chunk.gradient.numel()
        ]
        if norm_type < 0 and self.is_row_sparse:
            norms.append(torch.zeros((), device=self.device))  # of the rows that are not touched
        if not norms:
            return torch.zeros((), dtype=arithmetic_dtype(self.dtype), device=self.device)
        # A norm of type 0 counts elements, and counts are added.
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type or 1)
        return norm

    @torch.no_grad()
    def bound(self) -> Tensor:
        """A number that no element exceeds in magnitude, from the parts alone.

        NaN or inf if an element may be that.
        """
        self.check_current()
        bound = torch.zeros((), device=self.device)
        for part, scale in self.terms:
            bound = bound + part.bound() * _magnitude(scale)
        return bound * _magnitude(self.scale)

    @torch.no_grad()
    def is_within(self, limit: float) -> Tensor:
        """Whether all elements are finite and at most `limit` in magnitude, as a tensor.

        A bound from the parts decides, and a pass over all rows only if the bound is too large.
        """
        is_within = self.bound() <= limit  # false for NaN
        if self.device.type == "cpu" and not is_within and self.terms:
            return self.norm_of(float("inf")) <= limit
        return is_within

    # -- what torch does with it ---------------------------------------------------------------

    __torch_function__ = plain_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = HANDLERS.get(func)
        if handler is not None:
            result = handler(*args, **kwargs) if kwargs else handler(*args)
            if result is not NotImplemented:
                return result
        kwargs = kwargs or {}
        for gradient in tree_leaves(_written_arguments(func, args, kwargs)):
            if isinstance(gradient, DeferredGradient) and not gradient.exists:
                raise NotImplementedError(
                    f"{func} is not possible in place on a deferred gradient of shape "
                    f"{list(gradient.shape)}; use parameter.grad = parameter.grad.to_dense() before"
                )

        def read(gradient: DeferredGradient) -> Tensor:
            return gradient._materialised_(func)

        found = [it for it in tree_leaves((args, kwargs)) if isinstance(it, DeferredGradient)]
        result = func(
            *tree_map_only(DeferredGradient, read, args),
            **tree_map_only(DeferredGradient, read, kwargs),
        )
        # An in-place operation returns the tensor that it was called on.
        wrappers = {id(read(gradient)): gradient for gradient in found}
        return tree_map_only(Tensor, lambda it: wrappers.get(id(it), it), result)

    def _materialised_(self, func: Any) -> Tensor:
        """The plain gradient, for an operation that reads it as a tensor."""
        plain = self._content.plain
        if plain is None:
            plain = self._collapse_()
            warn(
                f"{func} reads a deferred gradient of shape {list(self.shape)}, so all of its rows "
                f"were computed and take {plain.values.nbytes:,} bytes; call "
                "so.materialize_gradients(model) if every step needs the plain gradient"
            )
        return plain.values

    def _collapse_(self) -> PlainRows:
        """Writes all rows down, in place of the parts."""
        plain = PlainRows(self, self.to_dense(), self.touched)
        content = self._content
        content.terms, content.scale = (Term(plain),), 1.0
        return plain

    def collapse_if_larger_(self) -> None:
        """Writes all rows down if the parts take more memory than they would."""
        if self._content.plain is None and self.nbytes > self.numel() * self.dtype.itemsize:
            self._collapse_()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        parts = ", ".join(type(part).__name__ for part, _ in self.terms)
        return f"DeferredGradient({list(self.shape)}, {self.dtype}, parts=[{parts}])"

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeferredGradient":
        content = self._content
        terms = tuple(Term(part.__deepcopy__(memo), scale) for part, scale in content.terms)
        return wrapped(self, Content(terms, content.scale, is_sparse=content.is_sparse))

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        content = self._content
        like = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        arguments = (content.terms, content.scale, content.is_sparse)
        return _restored, (like, str(self.device), *arguments)


def wrapped(like: Tensor, content: Content, device: torch.device | None = None) -> DeferredGradient:
    """A gradient with a given content, for a parameter like a given tensor."""
    gradient = wrapper_tensor(DeferredGradient, like, device or like.device)
    gradient._content = content
    return gradient


def _restored(
    like: Tensor, device: str, terms: tuple[Term, ...], scale: Scale, is_sparse: bool
) -> DeferredGradient:
    """What pickle calls."""
    return wrapped(like, Content(terms, scale, is_sparse=is_sparse), torch.device(device))


class _Pass:
    """One pass over the rows of a gradient."""

    def __init__(self, gradient: DeferredGradient) -> None:
        self.dtype, self.device = arithmetic_dtype(gradient.dtype), gradient.device
        self.scale = gradient.scale
        self.dim = gradient.shape[1:].numel()
        self.readers: list[tuple[Reader, Scale]] = [
            (part.reader(), scale) for part, scale in gradient.terms
        ]
        asked = [part.block_rows for part, _ in gradient.terms if part.block_rows]
        self.block_rows = max(asked, default=rows_in_a_chunk(self.dim, self.device))
        self._block: Tensor | None = None

    def block(self, at: slice | Tensor, count: int) -> Tensor:
        """The rows ``[count, dim]`` in the dtype of arithmetic, until the next block."""
        if self._block is None or len(self._block) < count:
            self._block = torch.empty(count, self.dim, dtype=self.dtype, device=self.device)
        out = self._block[:count].zero_()
        for reader, scale in self.readers:
            if _is_one(scale):
                reader.add_(out, at)
            else:
                rows = torch.zeros_like(out)
                reader.add_(rows, at)
                out.add_(rows.mul_(scale))
        if not _is_one(self.scale):
            out.mul_(self.scale)
        return out


@dataclass(frozen=True)
class DeferredRows:
    """The rows that a step along a deferred gradient moves."""

    gradient: DeferredGradient
    ids: Tensor | None
    """The touched rows; None for all rows."""

    @classmethod
    def of(cls, gradient: DeferredGradient) -> "DeferredRows":
        """The rows of a gradient, whose ids are found once."""
        return cls(gradient, gradient.touched)

    def __len__(self) -> int:
        return self.gradient.shape[0] if self.ids is None else self.ids.numel()

    def chunks(self) -> Iterator[Chunk]:
        """The rows in ascending order; a chunk is overwritten by the next."""
        return self.gradient.chunks(self.ids)


def is_row_sparse(gradient: Tensor) -> bool:
    """Whether a step along a gradient, deferred or not, moves touched rows alone."""
    return gradient.is_row_sparse if type(gradient) is DeferredGradient else gradient.is_sparse


def rows_of(gradient: Tensor) -> RowChunks:
    """The rows that a step along a gradient moves, deferred or not."""
    return (
        DeferredRows.of(gradient) if type(gradient) is DeferredGradient else of_gradient(gradient)
    )


def gradient_bytes(gradient: Tensor | None) -> int:
    """The bytes that a gradient keeps alive."""
    if gradient is None:
        return 0
    if gradient.is_sparse:
        return sum(part.nbytes for part in entries(gradient))
    return gradient.nbytes


def plain_if_it_exists(gradient: Tensor) -> Tensor:
    """The plain gradient of a deferred one whose rows exist; any other gradient as it is."""
    plain = gradient.plain if isinstance(gradient, DeferredGradient) else None
    return gradient if plain is None else plain


def _is_one(scale: Scale) -> bool:
    return isinstance(scale, float) and scale == 1.0


def _magnitude(scale: Scale) -> Scale:
    return scale.abs() if isinstance(scale, Tensor) else abs(scale)


def _written_arguments(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation modifies, by its schema."""
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name)
            written.append(args[position] if position < len(args) else given)
    return written
