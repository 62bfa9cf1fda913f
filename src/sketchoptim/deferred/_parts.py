"""What a deferred gradient is made of: the interface of a part, and rows that exist already."""

from typing import Any, ClassVar, Protocol, Self, TypeVar

import torch
from torch import Tensor

from .._torch_private import version_of

# On a CPU a number; elsewhere it may be a tensor of one element on the gradient's device, because
# reading it would wait for the device.
Scale = float | Tensor

_P = TypeVar("_P", bound="Part")


class Reader(Protocol):
    """One pass over the rows of a part; what all blocks have in common is computed once."""

    def add_(self, out: Tensor, at: slice | Tensor) -> None:
        """Adds rows to `out`, ``[k, dim]`` in float32 at least.

        `at` is a contiguous range of rows, or ascending distinct ids if the part is sparse.
        """


class Part:
    """One summand of a gradient, kept as the tensors from which its rows are computed.

    A part is immutable. It records the version of each of its tensors when it is made, and refuses
    to be read after one of them was modified.

    Args:
        weight: The parameter, for the shape, dtype and device of the gradient.
        is_sparse: Whether the plain gradient would be sparse: rows that are not touched then take
            no part in the step.
    """

    owned: ClassVar[tuple[str, ...]] = ()
    """Attributes that are tensors, or None, which the part keeps alive."""
    borrowed: ClassVar[tuple[str, ...]] = ()
    """Attributes that are tensors, or None, which belong to the model."""
    block_rows: int | None = None
    """How many rows are best read at once; None: any number."""
    is_shared: bool = False
    """Whether replicas of the parameter in other processes have it too."""
    is_collective: bool = False
    """Whether all processes must read it together."""

    def __init__(self, weight: Tensor, *, is_sparse: bool) -> None:
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self.is_sparse = is_sparse
        self._versions = self._current_versions()

    @property
    def dim(self) -> int:
        """Columns of a row."""
        return self.shape[1:].numel()

    @property
    def touched(self) -> Tensor | None:
        """The ids of all rows that may differ from zero, ascending and distinct; None: any may."""
        return None

    def reader(self) -> Reader:
        """A pass over the rows."""
        raise NotImplementedError

    def entries(self) -> tuple[Tensor, Tensor]:
        """Ids ``[k]`` and rows ``[k, ...]`` in the gradient's dtype, whose sum by id is the part.

        Only of a part that is sparse.
        """
        raise NotImplementedError

    def check_ids(self) -> None:
        """Raises unless the part has gradients of rows of the parameter alone."""

    def bound(self) -> Tensor:
        """A number that no element exceeds in magnitude; NaN or inf if an element may be that.

        It costs a pass over the tensors that the part owns. Shape [], float32 at least.
        """
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors that the part keeps alive."""
        return sum(tensor.nbytes for tensor in self._tensors(self.owned).values())

    @property
    def is_current(self) -> bool:
        """Whether no tensor of the part was modified in place since the part was made."""
        return self._versions == self._current_versions()

    def check_current(self) -> None:
        """Raises if a tensor of the part was modified in place since the part was made."""
        for name, version in self._current_versions().items():
            if version != self._versions[name]:
                raise RuntimeError(
                    f"the {name} behind a deferred gradient of shape {list(self.shape)} must stay "
                    "unchanged between backward() and the use of the gradient, but was modified "
                    f"in place (version {version}, expected {self._versions[name]}); discard the "
                    "gradient with zero_grad(), or store grad.to_dense() before the change"
                )

    def _tensors(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        found = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _current_versions(self) -> dict[str, int]:
        return {
            name: version_of(tensor)
            for name, tensor in self._tensors(self.owned + self.borrowed).items()
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A part with tensors of its own, for the same weight."""
        self.check_current()
        owned = self._tensors(self.owned)
        copied = {name: tensor.detach().clone() for name, tensor in owned.items()}
        return restored(type(self), {**self.__dict__, **copied})

    def __reduce__(self) -> tuple[Any, ...]:
        """The state for pickle, with a copy of the weight if rows are computed from it."""
        self.check_current()
        return restored, (type(self), self.__dict__)


def restored(kind: type[_P], attributes: dict[str, Any]) -> _P:
    """A part with these attributes, whose tensors are current now."""
    part = kind.__new__(kind)
    part.__dict__.update(attributes)
    part._versions = part._current_versions()
    return part


class PlainRows(Part):
    """Rows that exist already: a dense tensor that belongs to one gradient, which may modify it.

    Args:
        weight: The parameter.
        values: As large as the parameter, in its dtype.
        touched: The rows of a gradient that is sparse; the others are zero.
    """

    owned = ("values",)

    def __init__(self, weight: Tensor, values: Tensor, touched: Tensor | None = None) -> None:
        self.values, self._touched = values, touched
        super().__init__(weight, is_sparse=touched is not None)

    @property
    def touched(self) -> Tensor | None:
        """The rows that were touched, until the values are written to by way of a view."""
        return self._touched if self._versions == self._current_versions() else None

    @property
    def is_current(self) -> bool:
        """Always: the values are the gradient, whoever modifies them."""
        return True

    def check_current(self) -> None:
        """Does nothing: the values are the gradient, whoever modifies them."""

    def reader(self) -> Reader:
        return _PlainReader(self.values)

    def entries(self) -> tuple[Tensor, Tensor]:
        ids = self.touched
        assert ids is not None  # it is sparse
        return ids, self.values[ids]

    def bound(self) -> Tensor:
        if not self.values.numel():
            return self.values.new_zeros((), dtype=torch.float32)
        return torch.stack(torch.aminmax(self.values)).abs().amax().float()

    def copied(self) -> "PlainRows":
        """The same rows in memory of their own."""
        return PlainRows(self.values, self.values.clone(), self.touched)

    def scale_(self, factor: Scale) -> None:
        """Multiplies the values by a factor."""
        self.values.mul_(factor)
        self._versions = self._current_versions()


class _PlainReader:
    def __init__(self, values: Tensor) -> None:
        self.values = values

    def add_(self, out: Tensor, at: slice | Tensor) -> None:
        out.add_(self.values[at].reshape(out.shape))
