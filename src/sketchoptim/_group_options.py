"""Options of parameter groups: their spelling, and the parameters to which `memory` applies."""

import difflib
from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args

from torch import Tensor

Compress = Literal["sparse", "tables", "all"]
COMPRESS: tuple[Compress, ...] = get_args(Compress)

# Tables with fewer rows are not worth compressing.
MIN_TABLE_ROWS = 1000
# By `compress="tables"`, a matrix with fewer rows for each of its columns is no table. Hidden
# layers, up to four times as wide as their input, are below.
_ROWS_PER_COLUMN = 8

KNOWN_OPTIONS: set[str] = set()
"""The options of all optimizers, those of a user's own subclasses too; they enter theirs."""


def is_shaped_like_table(shape: tuple[int, ...]) -> bool:
    """Whether `compress="tables"` takes a parameter of this shape for a table.

    >>> [is_shaped_like_table(it) for it in [(50_000, 512), (4096, 1024), (1000, 128), (5000,)]]
    [True, False, False, False]
    """
    return len(shape) == 2 and shape[0] >= max(MIN_TABLE_ROWS, _ROWS_PER_COLUMN * shape[1])


def compresses_dense(group: Mapping[str, Any], parameter: Tensor) -> bool:
    """Whether the memory of a group applies to a parameter also if its gradient is dense."""
    compress = group.get("compress", "sparse")
    return compress == "all" or (compress == "tables" and is_shaped_like_table(parameter.shape))


def misspelled_option(name: object, known: Collection[str]) -> str | None:
    """The known option that a name almost is; None for a known one, or for any other word.

    Schedulers and users add keys of their own to groups, such as "initial_lr" and "base_momentum",
    which torch.optim keeps.

    >>> [misspelled_option(name, ["memory", "lr"]) for name in ("memmory", "memory", "initial_lr")]
    ['memory', None, None]
    """
    if not isinstance(name, str) or name in known:
        return None
    close = difflib.get_close_matches(name.lower(), sorted(known), n=1, cutoff=0.7)
    return close[0] if close and f"_{close[0]}_" not in f"_{name}_" else None


def nearest_option(name: str, known: Collection[str]) -> str | None:
    """The known option that is most like a name; None if there is nothing alike."""
    close = difflib.get_close_matches(name.lower(), sorted(known), n=1)
    return close[0] if close else None
