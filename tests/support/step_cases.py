"""Random training runs of a few steps: what an optimizer, a memory and a gradient can be."""

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from gradients import sparse
from hypothesis import strategies as st
from torch import Tensor

import sketchoptim as so
from sketchoptim.optim._binding import bind
from sketchoptim.storage import Storage

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PATTERNS = ("distinct", "ascending", "many", "sorted", "hot", "ends", "none", "coalesced", "dense")
ROW_SHAPES = ((), (1,), (2,), (15,), (16,), (17,), (33,), (70,), (3, 5), (2, 8))


@dataclass(frozen=True)
class Case:
    """A run from a seed: the same numbers whoever takes the steps."""

    optimizer: str
    memory: so.Memory
    shape: tuple[int, ...] = (40, 12)
    dtype: torch.dtype = torch.float32
    pattern: str = "many"
    entries: int = 24
    steps: int = 2
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def storages(self) -> list[Storage]:
        """Where the moments that this optimizer keeps live."""
        names = {"SGD": ["first"], "Adagrad": ["second"], "RMSprop": ["second"]}
        if self.optimizer == "SGD" and not self.options.get("momentum", 0.0):
            return []
        kept = (
            getattr(self.memory, name) for name in names.get(self.optimizer, ["first", "second"])
        )
        return [storage for storage in kept if storage is not None]

    def with_tables_in(self, dtype: torch.dtype) -> "Case":
        """The same case over sketches of another dtype."""
        first, second = (
            replace(storage, dtype=dtype) if isinstance(storage, so.Sketched) else storage
            for storage in (self.memory.first, self.memory.second)
        )
        return replace(self, memory=replace(self.memory, first=first, second=second))

    @property
    def is_by_row(self) -> bool:
        """Whether a mean over a row is taken, whose sum the backends associate differently."""
        return any(
            isinstance(storage, so.RowWise) or getattr(storage, "granularity", None) == "row"
            for storage in self.storages
        )


@dataclass
class Outcome:
    """What a run leaves behind."""

    parameter: Tensor
    state: dict[str, Any]

    def tensors(self) -> dict[str, Tensor]:
        """The parameter and every tensor of the state."""
        kept = {key: value for key, value in self.state.items() if isinstance(value, Tensor)}
        return {"parameter": self.parameter, **kept}


def run(case: Case) -> Outcome:
    """The outcome of the case, by whichever backend is in force."""
    generator = torch.Generator().manual_seed(case.seed)
    start = _numbers(case.shape, generator)
    parameter = torch.nn.Parameter(start.to(case.dtype))
    group = {"params": [parameter], "memory": case.memory}
    optimizer = getattr(so, case.optimizer)([group], **{"lr": 0.125, **case.options})
    with warnings.catch_warnings():
        # Crowded tables are wanted here: collisions are what the backends could disagree in.
        warnings.filterwarnings("ignore", ".*active rows a bucket a step", UserWarning)
        for step in range(case.steps):
            parameter.grad = gradient(case, generator)
            if step == 0:
                state = bind(optimizer, parameter, optimizer.param_groups[0], (), 0, None).state
                optimizer.state[parameter] = state
                _scatter_(state, generator)
            optimizer.step()
    return Outcome(parameter.detach(), dict(optimizer.state[parameter]))


def _scatter_(state: dict[str, Any], generator: torch.Generator) -> None:
    """Makes fresh moments those of a long run: what the hash rows say of an id differs."""
    for name, tensor in state.items():
        if name.startswith("first_") and name.endswith(("_values", "_counters")):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        elif name.startswith("second_") and name.endswith(("_values", "_counters", "_rows")):
            tensor.copy_(torch.rand(tensor.shape, generator=generator))


def gradient(case: Case, generator: torch.Generator) -> Tensor:
    """The next gradient of the case's pattern."""
    if case.pattern == "dense":
        return _numbers(case.shape, generator).to(case.dtype)
    ids = _ids(case, generator)
    values = _numbers((ids.numel(), *case.shape[1:]), generator).to(case.dtype)
    uncoalesced = sparse(ids, values, case.shape)
    return uncoalesced.coalesce() if case.pattern == "coalesced" else uncoalesced


def _ids(case: Case, generator: torch.Generator) -> Tensor:
    n, entries = case.shape[0], case.entries
    if case.pattern == "none":
        return torch.zeros(0, dtype=torch.int64)
    drawn = torch.randint(n, (entries,), generator=generator)
    match case.pattern:
        case "distinct":
            return torch.randperm(n, generator=generator)[:entries]
        case "ascending":
            return torch.randperm(n, generator=generator)[:entries].sort().values
        case "sorted":
            return drawn.sort().values
        case "hot":
            hot = torch.full((300,), int(torch.randint(n, (), generator=generator)))
            mixed = torch.cat([hot, drawn])
            return mixed[torch.randperm(mixed.numel(), generator=generator)]
        case "ends":
            return torch.randint(2, (entries,), generator=generator) * (n - 1)
        case _:
            return drawn


def _numbers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    sizes = 10.0 ** torch.empty(shape[:1]).uniform_(-3, 1, generator=generator)
    numbers = torch.randn(shape, generator=generator)
    numbers *= sizes.reshape(shape[:1] + (1,) * (len(shape) - 1))
    # Columns that are zero in a gradient are common, and a zero's sign is easily lost.
    return numbers.masked_fill_(torch.rand(shape, generator=generator) < 0.1, 0.0)


# -- strategies ----------------------------------------------------------------------------------

widths = st.sampled_from([1, 2, 3, 7, 64, 1000])
depths = st.sampled_from([1, 2, 3, 3, 3, 4, 5, 32])
seeds = st.integers(0, 2**32 - 1)


@st.composite
def sketches(draw: st.DrawFn, granularity: str, dtype: torch.dtype) -> so.Sketched:
    """A sketch that has a kernel."""
    decay = draw(st.sampled_from(["linear", "paper", "bucket"]))
    is_conservative = granularity == "row" and decay == "linear" and draw(st.booleans())
    return so.Sketched(
        width=draw(widths),
        depth=draw(depths),
        granularity=granularity,  # type: ignore[arg-type]
        decay=decay,
        conservative=is_conservative,
        dtype=dtype,
        seed=draw(st.integers(0, 3)),
    )


@st.composite
def memories(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> so.Memory:
    """A memory all of whose storages have a kernel."""
    clip = draw(st.sampled_from([None, None, 0.5]))
    if draw(st.integers(0, 7)) == 0:
        linear = so.Sketched(
            width=draw(widths), depth=draw(depths), granularity="element", dtype=dtype
        )
        return so.Memory(linear, linear, form="ratio", clip=clip)
    exact, by_element = st.just(so.Exact()), sketches("element", dtype)
    first = draw(st.one_of(st.none(), exact, by_element))
    second = draw(st.one_of(exact, st.just(so.RowWise()), sketches("row", dtype), by_element))
    return so.Memory(first, second, clip=clip)


@st.composite
def options(draw: st.DrawFn, optimizer: str) -> dict[str, Any]:
    """Hyper-parameters that change what the kernel does."""
    chosen: dict[str, Any] = {
        "maximize": draw(st.booleans()),
        "weight_decay": draw(st.sampled_from([0.0, 0.0, 0.125])),
        "nonfinite": draw(st.sampled_from(["raise", "unchecked"])),
        "rounding": draw(st.sampled_from([None, None, "nearest"])),
    }
    match optimizer:
        case "Adam" | "AdamW":
            chosen["betas"] = draw(st.sampled_from([(0.9, 0.999), (0.5, 0.75), (0.0, 0.0)]))
        case "RMSprop":
            chosen["alpha"] = draw(st.sampled_from([0.99, 0.0]))
        case "Adagrad":
            chosen["lr_decay"] = draw(st.sampled_from([0.0, 0.5]))
            chosen["initial_accumulator_value"] = draw(st.sampled_from([0.0, 1.0]))
        case "SGD":
            chosen["momentum"] = draw(st.sampled_from([0.0, 0.5, 0.9]))
            chosen["nesterov"] = chosen["momentum"] > 0 and draw(st.booleans())
            if not chosen["nesterov"]:
                chosen["dampening"] = draw(st.sampled_from([0.0, 0.5, 0.9]))
    return chosen


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    table_dtype: torch.dtype = torch.float32,
    patterns: tuple[str, ...] = PATTERNS,
    rows: tuple[int, ...] = (1, 2, 5, 40, 200),
    row_shapes: tuple[tuple[int, ...], ...] = ROW_SHAPES,
) -> Case:
    """Any run that the kernels take."""
    optimizer = draw(st.sampled_from(["Adam", "AdamW", "RMSprop", "Adagrad", "SGD"]))
    memory = draw(memories(table_dtype))
    if memory.form == "ratio":
        optimizer = draw(st.sampled_from(["Adam", "AdamW"]))
    pattern = draw(st.sampled_from(patterns))
    shape = (draw(st.sampled_from(rows)), *draw(st.sampled_from(row_shapes)))
    if pattern == "dense" and shape == (1,):
        shape = ()
    dtype = draw(st.sampled_from(DTYPES))
    if memory.clip is None and (pattern == "dense" or dtype == torch.float16):
        # Without a clip torch.optim's own function would step what is kept exactly, and float16
        # could overflow where a sketched first moment is divided by a small second one.
        memory = replace(memory, clip=10.0)
    return Case(
        optimizer=optimizer,
        memory=memory,
        shape=shape,
        dtype=dtype,
        pattern=pattern,
        entries=draw(st.sampled_from([1, 2, 10, 60])),
        steps=draw(st.integers(1, 3)),
        seed=draw(seeds),
        options=draw(options(optimizer)),
    )
