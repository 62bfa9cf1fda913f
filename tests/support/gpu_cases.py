"""Random runs that the GPU's kernels take, drawn from a seed."""

import random
from dataclasses import replace

import step_cases
import torch
from step_cases import DTYPES, Case

import sketchoptim as so
from sketchoptim.storage import PRESETS, Storage


def by_element(**options):
    return so.Sketched(width=64, granularity="element", **options)


def by_row(**options):
    return so.Sketched(width=64, granularity="row", **options)


HALF = torch.bfloat16
LINEAR = by_element()
# Each with the optimizer that it is compiled for.
MEMORIES = {
    "lean-0.1": ("Adam", PRESETS["lean-0.1"]),
    "lean by AdamW": ("AdamW", PRESETS["lean-0.1"]),
    "lean by Adagrad": ("Adagrad", PRESETS["lean-0.1"]),
    "lean by RMSprop": ("RMSprop", PRESETS["lean-0.1"]),
    "lean in bfloat16": ("Adam", so.Memory(None, by_row(conservative=True, dtype=HALF))),
    "exact": ("Adam", so.Memory(so.Exact(), so.Exact(), clip=1.0)),
    "exact by SGD": ("SGD", so.Memory(so.Exact(), None, clip=1.0)),
    "row-wise": ("Adam", PRESETS["row-wise"]),
    "columns": ("Adam", so.Memory(None, by_row(conservative=True, columns=True))),
    "row-wise x columns": ("Adam", so.Memory(None, so.RowWise(columns=True))),
    "linear by row x columns": ("Adam", so.Memory(None, by_row(columns=True))),
    "8-bit": ("Adam", PRESETS["8-bit"]),
    "8-bit, rows that share blocks": ("Adam", so.Memory(*[so.Quantized(block=1024)] * 2)),
    "linear": ("Adam", so.Memory(LINEAR, LINEAR)),
    "linear by row": ("Adam", so.Memory(None, by_row())),
    "paper": ("Adam", PRESETS["paper-mv"]),
    "paper by row": ("Adam", so.Memory(None, by_row(decay="paper"))),
    "bucket in bfloat16": ("Adam", so.Memory(*[by_element(decay="bucket", dtype=HALF)] * 2)),
    "ratio": ("Adam", so.Memory(LINEAR, LINEAR, form="ratio")),
}
OPTIMIZERS = ("Adam", "AdamW", "RMSprop", "Adagrad", "SGD")


def order_free(draw: random.Random) -> Case:
    """Storages whose rows move in any order."""
    first: Storage | None = draw.choice([None, None, so.Exact()])
    second = draw.choice(
        [
            so.Exact(),
            so.RowWise(),
            sketch(draw, "row", "conservative", dtype=torch.float32),
            sketch(draw, "row", "conservative", dtype=torch.float32),
        ]
    )
    memory = so.Memory(first, second)
    return random_case(draw, memory, rows=(1, 2, 5, 40, 200), entries=(1, 2, 10, 60))


def with_columns(draw: random.Random) -> Case:
    """A number for each row times a factor for each column."""
    first: Storage | None = draw.choice([None, None, so.Exact()])
    plain = draw.choice(
        [
            so.RowWise(),
            sketch(draw, "row", "conservative", dtype=torch.float32),
            sketch(draw, "row", "linear", "paper", "bucket", "conservative"),
        ]
    )
    memory = so.Memory(first, replace(plain, columns=True))
    patterns = tuple(pattern for pattern in step_cases.PATTERNS if pattern != "hot")
    dims = (1, 2, 17, 33)
    return random_case(
        draw, memory, rows=(1, 3, 5), entries=(1, 4, 10), dims=dims, patterns=patterns
    )


def in_order(draw: random.Random) -> Case:
    """Sketches whose rows, or whose sums, come in ascending order."""
    forms = ("linear", "paper", "bucket")
    first = draw.choice([None, so.Exact(), sketch(draw, "element", *forms)])
    second = draw.choice(
        [sketch(draw, "row", *forms, "conservative"), sketch(draw, "element", *forms)]
    )
    if draw.random() < 0.2:
        linear = sketch(draw, "element", "linear")
        memory = so.Memory(linear, linear, form="ratio")
    else:
        memory = so.Memory(first, second)
    # Without hundreds of equal ids: the interpreter takes a millisecond for each of them.
    patterns = tuple(pattern for pattern in step_cases.PATTERNS if pattern != "hot")
    return random_case(
        draw, memory, rows=(1, 3, 5), entries=(1, 4), dims=(1, 2, 17), patterns=patterns
    )


def coded(draw: random.Random) -> Case:
    """8-bit moments, whose rows share blocks or not."""
    block = so.Quantized(block=draw.choice([64, 100, 256]))
    first = draw.choice([None, block, so.Exact()])
    second = block if first is not block else draw.choice([block, so.Exact()])
    dim = draw.choice([1, 3, 20, 64, 70, 300])
    shape_rows = (draw.choice([2, 4200 // dim]),)
    memory = so.Memory(first, second)
    return random_case(draw, memory, rows=shape_rows, entries=(1, 8), dims=(dim,))


def sketch(
    draw: random.Random, granularity: str, *forms: str, dtype: torch.dtype | None = None
) -> so.Sketched:
    form = draw.choice(forms)
    return so.Sketched(
        width=draw.choice([1, 3, 64]),
        depth=draw.choice([1, 2, 3, 3, 3, 4, 5]),
        granularity=granularity,  # type: ignore[arg-type]
        decay="linear" if form == "conservative" else form,  # type: ignore[arg-type]
        conservative=form == "conservative",
        dtype=dtype or draw.choice([torch.float32, torch.bfloat16]),
    )


def options(draw: random.Random, optimizer: str) -> dict[str, object]:
    chosen: dict[str, object] = {
        "maximize": draw.random() < 0.3,
        "weight_decay": draw.choice([0.0, 0.0, 0.125]),
    }
    match optimizer:
        case "Adam" | "AdamW":
            chosen["betas"] = draw.choice([(0.9, 0.999), (0.5, 0.75), (0.0, 0.0)])
        case "RMSprop":
            chosen["alpha"] = draw.choice([0.99, 0.0])
        case "Adagrad":
            chosen["lr_decay"] = draw.choice([0.0, 0.5])
            chosen["initial_accumulator_value"] = draw.choice([0.0, 1.0])
        case "SGD":
            momentum = draw.choice([0.0, 0.5, 0.9])
            is_nesterov = momentum > 0 and draw.random() < 0.5
            chosen |= {"momentum": momentum, "nesterov": is_nesterov}
            chosen["dampening"] = 0.0 if is_nesterov else draw.choice([0.0, 0.5])
    return chosen


def random_case(
    draw: random.Random,
    memory: so.Memory,
    *,
    rows: tuple[int, ...],
    entries: tuple[int, ...],
    dims: tuple[int, ...] = (1, 2, 15, 16, 33),
    patterns: tuple[str, ...] = step_cases.PATTERNS,
) -> Case:
    """A run of two steps with this memory, by an optimizer that has such moments."""
    optimizer = draw.choice(("Adam", "AdamW") if memory.form == "ratio" else OPTIMIZERS)
    return Case(
        optimizer=optimizer,
        # A clip: else torch.optim would step what is exact and dense, and float16 could overflow.
        memory=replace(memory, clip=draw.choice([0.5, 10.0])),
        shape=(draw.choice(rows), draw.choice(dims)),
        dtype=draw.choice(DTYPES),
        pattern=draw.choice(patterns),
        entries=draw.choice(entries),
        steps=2,
        seed=draw.randrange(2**32),
        options=options(draw, optimizer),
    )
