"""Same bits: for every number of threads, and for every SIMD level that this machine can run."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from backends import LEVELS, bits, needs_native, stepping_by
from step_cases import DTYPES, Case, Outcome, run

import sketchoptim as so
from sketchoptim.storage import PRESETS, Sketched

pytestmark = needs_native

CONSERVATIVE = Sketched(width=30, depth=3, conservative=True)
BY_ROW = [Sketched(width=30, depth=3, decay=decay) for decay in ("linear", "paper", "bucket")]
BY_ELEMENT = {
    (decay, depth): Sketched(width=20, depth=depth, granularity="element", decay=decay)
    for decay in ("linear", "paper", "bucket")
    for depth in (1, 3, 4)
}

MEMORIES = {
    "exact": PRESETS["exact"],
    "row-wise": PRESETS["row-wise"],
    "lean-0.1": so.Memory(None, CONSERVATIVE),
    "exact over lean": so.Memory(so.Exact(), CONSERVATIVE),
    "columns": so.Memory(None, replace(CONSERVATIVE, columns=True)),
    "row-wise columns": so.Memory(None, so.RowWise(columns=True)),
    **{f"{sketch.decay} by row": so.Memory(None, sketch) for sketch in BY_ROW},
    **{f"{decay} of {depth}": so.Memory(s, s) for (decay, depth), s in BY_ELEMENT.items()},
    "ratio": so.Memory(BY_ELEMENT["linear", 3], BY_ELEMENT["linear", 3], form="ratio"),
    "linear over paper": so.Memory(BY_ELEMENT["linear", 3], BY_ELEMENT["paper", 3]),
    "paper over lean": so.Memory(BY_ELEMENT["paper", 3], CONSERVATIVE),
}
# Enough rows that threads share them out unevenly, and a row that does not end with a vector.
CASE = Case("Adam", PRESETS["lean-0.1"], shape=(150, 69), pattern="hot", entries=101, steps=2)
OPTIONS = {"weight_decay": 0.01, "maximize": True}


@functools.cache
def by_one_thread_of_the_base_level(
    name: str, dtype: torch.dtype, counters: torch.dtype
) -> Outcome:
    with stepping_by("base"):
        return run(case_of(name, dtype, counters))


def case_of(name: str, dtype: torch.dtype, counters: torch.dtype) -> Case:
    memory = replace(MEMORIES[name], clip=9.0)  # float16 would overflow without
    return replace(CASE, memory=memory, dtype=dtype, options=OPTIONS).with_tables_in(counters)


def assert_same_bits(case: Case, found: Outcome, expected: Outcome) -> None:
    tensors = found.tensors()
    assert tensors.keys() == expected.tensors().keys()
    for part, tensor in expected.tensors().items():
        assert torch.equal(bits(tensors[part]), bits(tensor)), (part, case)


@pytest.mark.parametrize("counters", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_and_number_of_threads_gives_the_same_bits(
    level: str, name: str, counters: torch.dtype
) -> None:
    for dtype in DTYPES if counters == torch.float32 else (torch.float32,):
        expected = by_one_thread_of_the_base_level(name, dtype, counters)
        case = case_of(name, dtype, counters)
        for threads in (1, 2, 5):
            with stepping_by(level, threads=threads) as taken:
                found = run(case)
            assert taken.native == case.steps
            assert_same_bits(case, found, expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("optimizer", ["AdamW", "RMSprop", "Adagrad", "SGD"])
def test_every_optimizer_gives_the_same_bits_at_every_level(level: str, optimizer: str) -> None:
    options = {"weight_decay": 0.01}
    if optimizer == "SGD":
        options = {"momentum": 0.9, "nesterov": True}
    for memory, pattern in itertools.product(
        ("lean-0.1", "paper-mv"), ("dense", "coalesced", "ends")
    ):
        case = replace(
            CASE,
            optimizer=optimizer,
            memory=PRESETS[memory],
            pattern=pattern,
            options=options,
            steps=1,
        )
        with stepping_by("base"):
            expected = run(case)
        with stepping_by(level, threads=3) as taken:
            found = run(case)
        assert taken.native == case.steps
        assert_same_bits(case, found, expected)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_more_threads_than_rows_or_vectors_change_no_bit(rows: int) -> None:
    for name in ("lean-0.1", "paper of 3", "linear of 3", "exact"):
        case = replace(case_of(name, torch.float32, torch.float32), shape=(rows, 5))
        with stepping_by("base"):
            expected = run(case)
        with stepping_by(LEVELS[-1], threads=5):
            found = run(case)
        assert_same_bits(case, found, expected)
