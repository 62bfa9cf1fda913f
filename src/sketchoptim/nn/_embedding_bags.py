"""The tables of a recommender in one layer: one call looks up and pools the ids of all of them."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Self, cast, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .. import _pages
from .._bag_ids import BagIds, TableIds
from .._validation import check_choice, check_positive_int, check_tensor
from ..deferred import DeferredGradient, SharedLookups, TableLookups
from ..ops import Mode, pool_bags

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_POOLING: dict[str, Mode] = {"SUM": "sum", "MEAN": "mean"}  # TorchRec's names

# What a user gives for all features: by name, in the order of the features, or flat.
PerFeature = Mapping[str, Tensor] | Sequence[Tensor] | Tensor


class EmbeddingBags(nn.Module):
    """Many `nn.EmbeddingBag`s in one: the pooled rows of all features as one matrix.

    One call reads the rows of all tables and writes the output ``[batch, sum of columns]``, in the
    order of the features. The parameters have the names of the tables, in `state_dict()` too. Large
    tables are in huge pages if the system has them. On a device without kernels, and where none
    were built, torch's operations do the same, table by table.

    Args:
        tables: rows and columns by the name of the table. A name is an attribute of the layer, so
            it has no dots and is none of the attributes of a module.
        mode: "sum" or "mean" of the rows of a bag. An empty bag gives zeros.
        features: the table of each feature, by the name of the feature. Without it, each table has
            one feature of its name.
        deferred: the gradient of a table is a `so.DeferredGradient`: the ids and the gradient of
            the output. The optimizers of this package sum and apply them in one call for all
            tables. For other optimizers use False: sparse gradients, with a row for each id.
        device: of the tables.
        dtype: of the tables and of the output: float32, bfloat16, float16 or float64.

    Shape:
        The ids and offsets of `forward` come in one of three forms.

        - A dict by feature, or a list in the order of the features. Each feature has int64 ids
          ``[count]`` with offsets ``[batch]``, as in `nn.EmbeddingBag`; or ids ``[batch, ids in a
          bag]`` without offsets; or ids ``[batch]`` without offsets, one for each bag.
        - One tensor of all ids, feature by feature, with offsets ``[features * batch + 1]``, as
          FBGEMM and TorchRec's `KeyedJaggedTensor` have them.
        - ``lengths`` in place of offsets: the number of ids of each bag, ``[batch]`` for each
          feature or ``[features * batch]``.

    Weights are drawn from a uniform distribution in ``(-rows ** -0.5, rows ** -0.5)``.

    Example:
        >>> bags = EmbeddingBags({"user": (1000, 8), "item": (200, 4)}, mode="sum")
        >>> ids = {"user": torch.tensor([5, 7, 7]), "item": torch.tensor([1, 2])}
        >>> offsets = {"user": torch.tensor([0, 1]), "item": torch.tensor([0, 0])}
        >>> bags(ids, offsets).shape
        torch.Size([2, 12])
        >>> list(bags.state_dict()), bags.columns
        (['user', 'item'], {'user': slice(0, 8, None), 'item': slice(8, 12, None)})
    """

    sparse = True
    """A step moves touched rows alone; `so.plan` reads this as it does of `nn.Embedding`."""

    def __init__(
        self,
        tables: Mapping[str, tuple[int, int]],
        mode: Mode = "sum",
        *,
        features: Mapping[str, str] | None = None,
        deferred: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("mode", mode, get_args(Mode))
        dtype = torch.get_default_dtype() if dtype is None else dtype
        check_choice("dtype", dtype, DTYPES)
        if not tables:
            raise ValueError("tables must have at least one table, got none")
        self.mode, self.deferred = mode, deferred
        device = torch.get_default_device() if device is None else torch.device(device)
        for name, (rows, dim) in tables.items():
            check_positive_int(f"rows of {name!r}", rows)
            check_positive_int(f"columns of {name!r}", dim)
            if hasattr(self, name) or "." in name or not name:
                raise ValueError(
                    f"a table's name must be a new attribute of the layer without dots, got "
                    f"{name!r}; rename it"
                )
            weight = _pages.empty((rows, dim), dtype=dtype, device=device)
            self.register_parameter(name, nn.Parameter(weight))
        self._tables = tuple(tables)
        self._features = dict(features) if features is not None else {it: it for it in tables}
        if not set(self._features.values()) == set(tables):
            raise ValueError(
                f"features must name each of the tables {list(tables)} and no others, got "
                f"{self._features}"
            )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws new weights."""
        for table in self.table_parameters():
            bound: float = table.shape[0] ** -0.5
            table.uniform_(-bound, bound)

    def read(self, table: str) -> Tensor:
        """The rows of a table, as `forward` reads them."""
        return cast("nn.Parameter", self._parameters[table])

    def table_parameters(self) -> list[nn.Parameter]:
        """The parameters with a row for each id, which `so.find_tables` looks for."""
        return [self._parameters[name] for name in self._tables]  # type: ignore[misc]

    @property
    def columns(self) -> dict[str, slice]:
        """The columns of the output by feature."""
        found, begin = {}, 0
        for feature, table in self._features.items():
            end = begin + self._parameters[table].shape[1]  # type: ignore[union-attr]
            found[feature] = slice(begin, end)
            begin = end
        return found

    def forward(
        self,
        ids: PerFeature,
        offsets: PerFeature | None = None,
        per_sample_weights: PerFeature | None = None,
        *,
        lengths: PerFeature | None = None,
    ) -> Tensor:
        """The sums or means of the rows of each bag, ``[batch, sum of columns]``.

        Args:
            ids: of all features.
            offsets: the begin of each bag; see "Shape".
            per_sample_weights: what the row of each id is multiplied by, in the form of the ids;
                for ``mode="sum"``.
            lengths: the number of ids of each bag, in place of offsets.
        """
        if offsets is not None and lengths is not None:
            raise ValueError(
                "offsets and lengths are two forms of the same numbers; give one of them"
            )
        if per_sample_weights is not None and self.mode != "sum":
            raise ValueError(f'per_sample_weights need mode="sum", got {self.mode!r}')
        given = ids, offsets, per_sample_weights, lengths
        lookups = (_flat if isinstance(ids, Tensor) else _joined)(list(self._features), *given)
        weights = [self.read(table) for table in self._features.values()]
        pooled: Tensor = _Pooled.apply(  # type: ignore[no-untyped-call]
            self, lookups, lookups.factors, *weights
        )
        return pooled

    def extra_repr(self) -> str:
        """The tables and how bags are pooled."""
        tables = [f"{it}={list(self._parameters[it].shape)}" for it in self._tables]  # type: ignore[union-attr]
        return f"{', '.join(tables)}, mode={self.mode!r}"

    @classmethod
    def from_modules(
        cls, modules: Mapping[str, nn.EmbeddingBag] | Iterable[nn.EmbeddingBag]
    ) -> Self:
        """The layer with the tables of some `nn.EmbeddingBag`s, whose parameters it shares.

        Modules without names are called "table_0", "table_1" and so on.

        Example:
            >>> modules = {"user": nn.EmbeddingBag(1000, 8), "item": nn.EmbeddingBag(200, 4)}
            >>> bags = EmbeddingBags.from_modules(modules)
            >>> bags.mode, bags.user is modules["user"].weight
            ('mean', True)
        """
        if not isinstance(modules, Mapping):
            modules = {f"table_{number}": module for number, module in enumerate(modules)}
        for name, module in modules.items():
            reason = _unsupported_option(module)
            if reason is not None:
                raise ValueError(f"the module {name!r} {reason}, which EmbeddingBags does not have")
        modes = {name: module.mode for name, module in modules.items()}
        if len(set(modes.values())) != 1:
            raise ValueError(f"all modules must have the same mode, got {modes}")
        shapes = {name: (it.num_embeddings, it.embedding_dim) for name, it in modules.items()}
        bags = cls(shapes, next(iter(modes.values())), device="meta")  # type: ignore[arg-type]
        for name, module in modules.items():
            bags._parameters[name] = cast("nn.Parameter", module.weight)
        return bags

    def to_modules(self) -> dict[str, nn.EmbeddingBag]:
        """One `nn.EmbeddingBag` for each feature, in their order; they share its parameters."""
        found = {}
        for feature, table in self._features.items():
            weight = cast("nn.Parameter", self._parameters[table])
            rows, dim = weight.shape
            module = nn.EmbeddingBag(rows, dim, mode=self.mode, sparse=True, device="meta")
            module.weight = weight
            found[feature] = module
        return found

    @classmethod
    def from_torchrec(cls, source: Any, *, device: torch.device | str | None = None) -> Self:
        """The layer of TorchRec's `EmbeddingBagCollection`, or of a list of `EmbeddingBagConfig`.

        A collection's weights are copied. Call the result with the values and offsets of a
        `KeyedJaggedTensor` that has its features in the order of `columns`:
        ``bags(features.values(), features.offsets())``.
        """
        has_weights = hasattr(source, "embedding_bag_configs")
        configs = source.embedding_bag_configs() if has_weights else list(source)
        tables = {it.name: (it.num_embeddings, it.embedding_dim) for it in configs}
        features = {feature: it.name for it in configs for feature in it.feature_names}
        pooling = {it.name: it.pooling.name for it in configs}
        dtypes = {it.name: _dtype_of(it) for it in configs}
        for what, found in (("pooling", pooling), ("data_type", dtypes)):
            if len(set(found.values())) != 1:
                raise ValueError(f"all tables must have the same {what}, got {found}")
        mode = next(iter(pooling.values()))
        check_choice("pooling", mode, _POOLING)
        dtype = next(iter(dtypes.values()))
        bags = cls(tables, _POOLING[mode], features=features, device=device, dtype=dtype)
        if has_weights:
            found = source.state_dict()
            bags.load_state_dict({it: found[f"embedding_bags.{it}.weight"] for it in tables})
        return bags

    def to_torchrec(self) -> list[Any]:
        """TorchRec's `EmbeddingBagConfig` of each table; needs torchrec."""
        from torchrec.modules import embedding_configs as torchrec

        names = {dtype: name for name, dtype in _TORCHREC_DTYPES.items()}
        pooling = {mode: name for name, mode in _POOLING.items()}
        return [
            torchrec.EmbeddingBagConfig(
                name=name,
                num_embeddings=table.shape[0],
                embedding_dim=table.shape[1],
                feature_names=[it for it, owner in self._features.items() if owner == name],
                pooling=torchrec.PoolingType[pooling[self.mode]],
                data_type=torchrec.DataType[names[table.dtype]],
            )
            for name, table in zip(self._tables, self.table_parameters(), strict=True)
        ]


class _Pooled(torch.autograd.Function):
    """The pooled rows of all features, from their per-sample weights and their tables."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: EmbeddingBags,
        lookups: TableIds,
        factors: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        ctx.mode, ctx.is_deferred, ctx.lookups = layer.mode, layer.deferred, lookups
        ctx.weights = weights  # their shapes alone, unless factors have a gradient
        if ctx.needs_input_grad[2]:
            ctx.save_for_backward(factors, *weights)
        return pool_bags(weights, lookups, layer.mode, list(layer._features))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        weights, lookups, needed = ctx.weights, ctx.lookups, ctx.needs_input_grad
        factors = None
        if needed[2]:
            factors = _factor_gradient(ctx.saved_tensors[1:], lookups, gradient)
        tables: list[Tensor | None] = [None] * len(weights)
        wanted = [table for table, is_needed in enumerate(needed[3:]) if is_needed]
        if ctx.is_deferred:
            shared = SharedLookups(weights, lookups, gradient, ctx.mode)
            for at in wanted:
                part = TableLookups(weights[at], shared, at)
                tables[at] = DeferredGradient(weights[at], [part], collapses=False)
        else:
            own = _split(gradient, weights)
            for at in wanted:
                tables[at] = _sparse_gradient(weights[at], lookups.of(at), own[at], ctx.mode)
        return None, None, factors, *tables


def _split(gradient: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """The columns of each table."""
    parts: Sequence[Tensor] = gradient.split([weight.shape[1] for weight in weights], dim=1)
    return parts


def _sparse_gradient(weight: Tensor, bags: BagIds, gradient: Tensor, mode: Mode) -> Tensor:
    values = gradient[bags.bag_of_each()]
    factors = bags.factor_of_each(is_mean=mode == "mean")
    if factors is not None:
        values *= factors.to(values.dtype).unsqueeze(1)
    return torch.sparse_coo_tensor(
        bags.ids[None], values, weight.shape, check_invariants=False, device=weight.device
    )


def _factor_gradient(weights: Sequence[Tensor], lookups: TableIds, gradient: Tensor) -> Tensor:
    """The product of each id's row and the gradient of its bag, without copies of rows."""
    return torch.cat(
        [
            torch.ops.aten._embedding_bag_per_sample_weights_backward(
                own, weight, bags.ids, bags.starts, bags.bag_of_each(), 0
            )
            for weight, bags, own in zip(
                weights, lookups.of_each(), _split(gradient, weights), strict=True
            )
        ]
    ).float()


_TORCHREC_DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}


def _dtype_of(config: Any) -> torch.dtype:
    name = config.data_type.name
    check_choice(f"data_type of {config.name!r}", name, _TORCHREC_DTYPES)
    return _TORCHREC_DTYPES[name]


def _unsupported_option(module: nn.EmbeddingBag) -> str | None:
    if module.mode not in get_args(Mode):
        return f"has mode={module.mode!r}"
    for option in ("max_norm", "padding_idx"):
        if getattr(module, option) is not None:
            return f"has {option}={getattr(module, option)}"
    return "has scale_grad_by_freq" if module.scale_grad_by_freq else None


def _by_feature(
    what: str, features: Sequence[str], given: PerFeature | None
) -> Sequence[Tensor | None]:
    """What is given for each feature, in their order."""
    if given is None:
        return [None] * len(features)
    if isinstance(given, Tensor):
        raise TypeError(f"{what} must be a dict or a list, as the ids are, got one tensor")
    if isinstance(given, Mapping):
        if given.keys() != set(features):
            raise ValueError(f"{what} must be those of the features {features}, got {list(given)}")
        return [given[name] for name in features]
    if len(given) != len(features):
        raise ValueError(f"{what} must be those of {len(features)} features, got {len(given)}")
    return given


def _bags_of(
    name: str,
    ids: Tensor | None,
    offsets: Tensor | None,
    factors: Tensor | None,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor | None, int]:
    """The ids of one feature, where each bag begins, unless each has one id, and how many bags."""
    ids = check_tensor(f"ids of {name!r}", ids)
    if factors is not None and factors.shape != ids.shape:
        raise ValueError(
            f"per_sample_weights of {name!r} must have the shape of its ids, {list(ids.shape)}, "
            f"got {list(factors.shape)}"
        )
    if lengths is not None:
        offsets = lengths.cumsum(0).sub_(lengths)
        if int(lengths.sum()) != ids.numel():
            raise ValueError(
                f"lengths of {name!r} must have the sum {ids.numel()}, the number of its ids, got "
                f"{int(lengths.sum())}"
            )
    if ids.dim() not in (1, 2) or (ids.dim() == 2 and offsets is not None):
        raise ValueError(
            f"ids of {name!r} must have one dimension, or two without offsets, got the shape "
            f"{list(ids.shape)}"
        )
    bags = ids.shape[0] if offsets is None else offsets.shape[0]
    if offsets is not None:
        offsets = _int64(f"offsets of {name!r}", offsets)
    elif ids.numel() != bags:
        offsets = torch.arange(bags, device=ids.device) * ids.shape[1]
    return _int64(f"ids of {name!r}", ids).reshape(-1), offsets, bags


def _joined(
    features: Sequence[str],
    ids: PerFeature,
    offsets: PerFeature | None,
    factors: PerFeature | None,
    lengths: PerFeature | None,
) -> TableIds:
    """The bags of all features from what is given for each."""
    weights = _by_feature("per_sample_weights", features, factors)
    given = zip(
        features,
        _by_feature("ids", features, ids),
        _by_feature("offsets", features, offsets),
        weights,
        _by_feature("lengths", features, lengths),
        strict=True,
    )
    each = [_bags_of(*it) for it in given]
    batches = {name: bags for name, (_, _, bags) in zip(features, each, strict=True)}
    if len(set(batches.values())) > 1:
        raise ValueError(f"all features must have the same number of bags, got {batches}")
    bags = each[0][2]
    joined = None
    if any(starts is not None for _, starts, _ in each):
        joined = torch.stack(
            [torch.arange(bags, device=ids.device) if it is None else it for ids, it, _ in each]
        )
        counts = [ids.numel() for ids, _, _ in each]
        for name, first, count in zip(features, joined[:, :1].tolist(), counts, strict=True):
            if first not in ([], [0]):
                raise ValueError(
                    f"offsets of {name!r} must ascend from 0 to at most {count}, its number of "
                    f"ids, got {first[0]} as the first"
                )
        begins = list(accumulate(counts, initial=0))[:-1]
        joined = (joined + joined.new_tensor(begins)[:, None]).reshape(-1)
    own = [it.reshape(-1) for it in weights if it is not None]
    return TableIds(
        torch.cat([ids for ids, _, _ in each]),
        joined,
        torch.cat(own).float() if own else None,
        len(features),
        bags,
    )


def _flat(
    features: Sequence[str],
    ids: PerFeature,
    offsets: PerFeature | None,
    factors: PerFeature | None,
    lengths: PerFeature | None,
) -> TableIds:
    """The bags of all features from tensors of all features."""
    given = [it for it in (offsets, factors, lengths) if it is not None]
    if not all(isinstance(it, Tensor) for it in given) or (offsets is None) == (lengths is None):
        raise TypeError("one tensor of ids needs one tensor of offsets or lengths, as FBGEMM has")
    assert factors is None or isinstance(factors, Tensor)
    ids = _int64("ids", ids)
    count = len(features)
    if lengths is not None:
        assert isinstance(lengths, Tensor)
        offsets = torch.cat([lengths.new_zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    offsets = _int64("offsets", offsets)
    if offsets.dim() != 1 or offsets.numel() % count != 1 % count:
        raise ValueError(
            f"offsets must have a number for each bag of {count} features and one more, got the "
            f"shape {list(offsets.shape)}"
        )
    if int(offsets[-1]) != ids.numel():
        raise ValueError(
            f"offsets must ascend from 0 to {ids.numel()}, the number of ids, got "
            f"{int(offsets[-1])} as the last"
        )
    if factors is not None and factors.shape != ids.shape:
        raise ValueError(
            f"per_sample_weights must have the shape of the ids, {list(ids.shape)}, got "
            f"{list(factors.shape)}"
        )
    bags = (offsets.numel() - 1) // count
    weights = None if factors is None else factors.reshape(-1).float().contiguous()
    return TableIds(ids, offsets, weights, count, bags)


def _int64(name: str, ids: Any) -> Tensor:
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be int64 or int32, got {ids.dtype}; call long()")
    return cast("Tensor", ids).long().contiguous()
