"""An embedding whose weights live in a file, for tables larger than memory."""

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import _hashing
from .._rows import CHUNK_ELEMENTS
from .._validation import (
    check_choice,
    check_flag,
    check_int,
    check_keys,
    check_number,
    check_positive_int,
    check_tensor,
)
from ._class_ids import id_range
from ._table_file import Shape, WriteLock, absolute_path, create, identify, map_file

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# The state of a module that is no tensor has this name in torch's state_dict().
_EXTRA_STATE = "_extra_state"
# What to do if an entry of a checkpoint differs; else, construct the table with the checkpoint's.
_REMEDIES = {
    "path": 'construct it with the checkpoint\'s path, or set ["path"] in the checkpoint to this '
    "path if you moved the file",
    "id": "the checkpoint is of another file: restore that one and its .id file from a copy",
}
# The least that a disk writes at once.
_SECTOR = 512
_GAMMA = 0x9E3779B97F4A7C15 - 2**64  # the increment of splitmix64, as an int64


class FileEmbedding(nn.Module):
    """An `nn.Embedding` with sparse gradients whose weights live in a file.

    The file is mapped into memory: forward and step read and write its pages, and the
    system moves pages between memory and disk. So a table larger than memory trains on one machine;
    the state of our optimizers is half a byte per row. The file holds the weights row by row,
    without a header. A file that does not exist is created with holes, which take no space on disk.

    **Initial weights.** A row counts as not written yet if it is zero, also in part, and otherwise
    has its initial weights, as a crash in the middle of writing it leaves it. The first forward
    pass whose gradient can reach a row writes its initial weights, uniform in
    ``(-init_bound, init_bound)``.
    They depend on the seed, the file's name and the row id only, so they are the same for any
    order of ids and for any number of runs; a forward pass without gradients returns them and
    writes nothing. Drawing all rows in advance would write the whole file, and a list of written
    rows would be a second file to keep consistent. The requirement: read rows by calling the
    module, since `weight` has zeros for rows without a gradient so far, and expect a row that you
    set to zeros to be drawn again. ``init_bound=0`` turns it off.

    **Identity.** A small file beside the table's, with ``.id`` after the name, has a random
    identity, the shape and the dtype. `state_dict()` has the same identity, so a checkpoint does
    not load with another file of the same size, or with a new one. A file that was replaced is
    refused when it is opened.

    **One writer.** The first forward pass with gradients locks the file for this process, until
    its tables are freed. Training it in a second process raises `BlockingIOError` before anything
    is written; reading does not. The lock is advisory (``flock``).

    **Crashes.** `flush()` returns once the disk has every weight. Flush, then save the checkpoint.
    `state_dict()` has the path, the sizes and the identity, not the weights.

    Args:
        path: of the file. Its directory must exist.
        rows: number of rows.
        dim: size of a row.
        dtype: of the weights: float32, bfloat16, float16 or float64.
        padding_idx: a row that gets no gradient and no initial weights, as in `nn.Embedding`.
        init_bound: the largest absolute initial weight; 0 for a table that starts at zeros.
        seed: of the initial weights.
        reserve: reserve the space of the whole file on disk now. Without it, the process dies by
            SIGBUS when a new page no longer fits on the disk; with it, a disk that is too small
            is an `OSError` here.
        copied: accept a file that was copied or moved to where its ``.id`` is. Without it, that is
            a `ValueError`, since the file may be that of another table.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> table = FileEmbedding(f"{folder.name}/words.bin", 1_000_000, 16)
        >>> table(torch.tensor([[5, 7, 5]])).sum().backward()
        >>> table.weight.grad.layout, table.path.stat().st_size
        (torch.sparse_coo, 64000000)
        >>> table.flush()
        >>> folder.cleanup()
    """

    sparse = True
    """Its table gets sparse gradients; `so.plan` reads this as it does of `nn.Embedding`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        rows: int,
        dim: int,
        dtype: torch.dtype = torch.float32,
        *,
        padding_idx: int | None = None,
        init_bound: float = 0.05,
        seed: int = 0,
        reserve: bool = False,
        copied: bool = False,
    ) -> None:
        super().__init__()
        self.rows = check_positive_int("rows", rows)
        self.dim = check_positive_int("dim", dim)
        check_choice("dtype", dtype, DTYPES)
        self.dtype = dtype
        if padding_idx is not None:
            padding_idx = check_int(
                "padding_idx", padding_idx, least=-self.rows, most=self.rows - 1
            )
            padding_idx %= self.rows
        self.padding_idx = padding_idx
        self.init_bound = check_number("init_bound", init_bound)
        self.seed = check_int("seed", seed)
        check_flag("reserve", reserve)
        check_flag("copied", copied)
        self.path = absolute_path(path)
        is_new = create(self.path, self.nbytes, self._shape, reserve=reserve)
        self._open(reserve=reserve and not is_new, copied=copied)

    @property
    def _shape(self) -> Shape:
        return self.rows, self.dim, str(self.dtype).removeprefix("torch.")

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return self.rows * self.dim * self.dtype.itemsize

    def _open(
        self, *, reserve: bool = False, copied: bool = False, is_trained: bool = True
    ) -> None:
        self._mapping = map_file(self.path, self.nbytes, reserve=reserve)
        self.id = identify(self.path, self._shape, copied=copied)
        self._lock: WriteLock | None = None
        weights = torch.frombuffer(self._mapping, dtype=self.dtype).view(self.rows, self.dim)
        self.weight = nn.Parameter(weights, requires_grad=is_trained)
        # An optimizer's deep copy would copy the parameter by itself. It stays a plain
        # nn.Parameter, which the kernels ask for, so the refusal is the object's own.
        refuse = functools.partial(_refuse_copy, self.path, self.nbytes)
        # `table_file` marks the weights for the planner: they are not in memory.
        vars(self.weight).update(__deepcopy__=refuse, __reduce_ex__=refuse, table_file=self.path)

    def table_parameters(self) -> list[nn.Parameter]:
        """The parameter with a row for each id, which `so.find_tables` looks for."""
        return [self.weight]

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of the ids, of shape ``(*ids.shape, dim)``."""
        self._check_ids(ids)
        if self.weight.requires_grad and torch.is_grad_enabled():
            self._become_writer()
        found = F.embedding(ids, self.weight, self.padding_idx, sparse=True)
        if not self.init_bound:
            return found
        flat_ids, flat = ids.reshape(-1), found.detach().view(-1, self.dim)
        places = (flat[:, self._probes()] == 0).any(1).nonzero()[:, 0]
        if self.padding_idx is not None and places.numel():
            places = places[flat_ids[places] != self.padding_idx]
        places = self._unwritten(flat, places, flat_ids)
        if places.numel():
            self._fill_(flat, places, flat_ids[places], is_written=found.requires_grad)
        return found

    def _become_writer(self) -> None:
        """Takes the lock of the file, unless this process has it."""
        if self._lock is None or self._lock.process != os.getpid():
            self._lock = WriteLock.of(self.path)

    def _probes(self) -> Tensor:
        """Columns of which one is zero if a row is not written in full.

        A process that is killed leaves the first column zero, which is written last. A disk that
        stops leaves out whole sectors.
        """
        columns = [*range(0, self.dim - 1, _SECTOR // self.dtype.itemsize), self.dim - 1]
        return torch.tensor(columns, device="cpu")

    def _unwritten(self, rows: Tensor, places: Tensor, ids: Tensor) -> Tensor:
        """The places of the rows in which every number is zero or the initial one."""
        chunk = max(1, CHUNK_ELEMENTS // self.dim)
        kept = [places[:0]]
        for part in places.split(chunk):
            found = rows[part]
            zero = found == 0
            is_unwritten = zero.all(1)
            torn = (~is_unwritten).nonzero()[:, 0]
            if torn.numel():
                initial = self.initial_rows(ids[part[torn]])
                is_unwritten[torn] = (zero[torn] | (found[torn] == initial)).all(1)
            kept.append(part[is_unwritten])
        return torch.cat(kept)

    @torch.no_grad()
    def _fill_(self, rows: Tensor, places: Tensor, ids: Tensor, *, is_written: bool) -> None:
        """Sets the rows at some places to the initial ones of the ids, and those of the file.

        The rows are those in autograd's graph already: looked up once more, they would be two
        lookups in a forward pass that gradient checkpointing repeats with one.
        """
        chunk = max(1, CHUNK_ELEMENTS // self.dim)
        if is_written:
            for part in ids.unique().split(chunk):
                initial = self.initial_rows(part)
                self.weight[part, 1:] = initial[:, 1:]
                self.weight[part, 0] = initial[:, 0]  # last, for `_probes`
        for at, part in zip(places.split(chunk), ids.split(chunk), strict=True):
            rows[at] = self.weight[part] if is_written else self.initial_rows(part)

    def initial_rows(self, ids: Tensor) -> Tensor:
        """What the rows of some ids ``[k]`` start from, ``[k, dim]``, whether written or not.

        Column ``c`` is word ``c`` of a splitmix64 generator that starts from the hashed id; the
        leading 24 bits of it, as an odd multiple of 2^-24, are never zero.
        """
        words = _hashing.seeded(self.seed, self.path.name, 1)[0]
        starts = _hashing.mix(words[0] * _hashing.mix(ids.long()) + words[1])
        columns = torch.arange(1, self.dim + 1, device="cpu") * _GAMMA
        leading = (_hashing.mix(starts[:, None] + columns) >> 40).bitwise_and_(2**24 - 1)
        odd = leading.mul_(2).add_(1 - 2**24).float()
        return odd.mul_(2.0**-24).mul_(self.init_bound).to(self.dtype)

    def flush(self) -> None:
        """Returns once the disk has every weight written so far; a failing disk is an `OSError`.

        Flush before saving the checkpoint of the other parameters and of the optimizer.
        """
        self._mapping.flush()

    def _check_ids(self, ids: Tensor) -> None:
        check_tensor("ids", ids)
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"ids must be int64 or int32, got {ids.dtype}; call ids.long()")
        if ids.device.type != "cpu":
            raise ValueError(
                f"ids must be on the CPU as the file's pages are, got {ids.device}; call "
                "ids.cpu(), and move the rows that come back"
            )
        lowest, highest = id_range(ids)
        if lowest < 0 or highest >= self.rows:
            raise ValueError(
                f"ids must lie in [0, {self.rows - 1}], got values from {lowest} to {highest}; "
                "map them, or construct FileEmbedding with more rows"
            )

    def extra_repr(self) -> str:
        return f"{str(self.path)!r}, {self.rows}, {self.dim}, dtype={self.dtype}"

    # -- state: sizes and path; the weights stay in the file. torch's own methods would add them.

    def get_extra_state(self) -> dict[str, Any]:
        """What `state_dict()` has of the table: enough to identify the file."""
        rows, dim, dtype = self._shape
        return {
            "path": str(self.path),
            "id": self.id,
            "rows": rows,
            "dim": dim,
            "dtype": dtype,
            "init_bound": self.init_bound,
            "seed": self.seed,
        }

    def set_extra_state(self, state: Any) -> None:
        """Refuses the state of another table; there is nothing to copy."""
        own = self.get_extra_state()
        name = "the state of a FileEmbedding"
        check_keys(name, state, required=own, remedy="load the state_dict() of one")
        for key, value in own.items():
            if state[key] != value:
                raise ValueError(
                    f"{key} of {name} must be {value!r}, got {state[key]!r}; "
                    + _REMEDIES.get(key, f"construct it with the checkpoint's {key}")
                )

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        destination[prefix + _EXTRA_STATE] = self.get_extra_state()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = prefix + _EXTRA_STATE
        if own in state_dict:
            self.set_extra_state(state_dict[own])
        elif strict:
            missing_keys.append(own)
        if strict:
            unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k != own]

    # -- copies: a pickle opens the same file again; a deep copy would need a file of its own

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["_mapping"], state["_lock"]
        parameters = dict(state["_parameters"])
        return {**state, "_parameters": {**parameters, "weight": self.weight.requires_grad}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_trained = state["_parameters"].pop("weight")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        pickled = self.id
        self._open(is_trained=is_trained)
        if self.id != pickled:
            raise ValueError(
                f"the pickle of a FileEmbedding is of the table {pickled}, but {self.path} has the "
                f"table {self.id}; restore the file and its .id file from a copy"
            )

    def __deepcopy__(self, memo: object) -> NoReturn:
        _refuse_copy(self.path, self.nbytes)

    def _apply(self, fn: Any, recurse: bool = True) -> "FileEmbedding":
        """Module.to() and its like may leave the table as it is, and nothing else."""
        like = torch.empty(0, dtype=self.dtype, device="cpu")
        result = fn(like)
        if result.dtype != like.dtype or result.device != like.device:
            raise ValueError(
                f"the table of FileEmbedding must stay {like.dtype} on the CPU, where its file is, "
                f"got {result.dtype} on {result.device}; convert or move the other modules of the "
                "model one by one"
            )
        return self


def _refuse_copy(path: Path, nbytes: int, *_: object) -> NoReturn:
    raise TypeError(
        f"the weights of a FileEmbedding are not copied: they are {nbytes} bytes in {path}; copy "
        "the file and open the copy, or pickle the module, which opens the same file again"
    )
