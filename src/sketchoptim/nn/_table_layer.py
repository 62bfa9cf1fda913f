"""Layers whose tables get sparse gradients, in a form that DistributedDataParallel supports."""

from typing import Any, ClassVar

from torch import Tensor, nn


class TableLayer(nn.Module):
    """A layer whose parameters belong to submodules, and are attributes of the layer too.

    DistributedDataParallel prepares for sparse gradients only of parameters that belong to an
    `nn.Embedding` or `nn.EmbeddingBag`, so each table is the weight of such a submodule. A subclass
    declares a property for each parameter, with a setter, by which weights are tied.
    """

    renamed_keys: ClassVar[dict[str, str]]
    """Keys of `state_dict()` by those of version 0.1.0, where tables belonged to the layer."""

    sparse: ClassVar[bool] = True
    """Whether its tables get sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(_rename_keys_)  # type: ignore[no-untyped-call]

    def __setattr__(self, name: str, value: Any) -> None:
        # nn.Module would register a parameter that is assigned to a property under its name.
        if isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def as_table(self, weight: nn.Parameter) -> "Table":
        """A submodule whose weight is this very parameter."""
        rows, dim = weight.shape
        table = Table(rows, dim, sparse=self.sparse, device="meta")
        table.weight = weight
        return table


class Table(nn.Embedding):
    """The rows of a layer, which looks them up itself."""

    weight: nn.Parameter

    def read(self) -> Tensor:
        """The rows, for a computation that autograd follows."""
        return self.weight


def _rename_keys_(layer: TableLayer, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for old, new in layer.renamed_keys.items():
        if prefix + old in state:
            state.setdefault(prefix + new, state.pop(prefix + old))
