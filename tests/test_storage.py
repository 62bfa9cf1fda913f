"""Where a moment lives: what each choice means in numbers, what is refused, and the presets."""

import dataclasses
import json
import re

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import sketchoptim as so
from sketchoptim.storage import PRESETS, Memory, Sketched

ELEMENT = Sketched(granularity="element")
FOLDING = dataclasses.replace(ELEMENT, fold_when=0.1)

# What Sketched refuses: options, error, message.
BAD_SKETCHED = [
    ({"granularity": "column"}, ValueError, "granularity must be one of ['row', 'element'], got"),
    ({"decay": "slow"}, ValueError, "decay must be one of ['linear', 'paper', 'bucket'], got"),
    ({"ratio": 0.1, "width": 8}, ValueError, "give ratio or width, not both"),
    ({"ratio": 0.0}, ValueError, "ratio must be finite and > 0, got 0.0"),
    ({"width": 0}, ValueError, "width must be in [1, 2147483648], got 0"),
    (
        {"width": 2**31 + 1},
        ValueError,
        "width must be in [1, 2147483648], got 2147483649; use more depth",
    ),
    ({"depth": 0}, ValueError, "depth must be >= 1, got 0"),
    ({"conservative": "no"}, TypeError, "conservative must be True or False, got 'no'"),
    ({"conservative": True, "decay": "paper"}, ValueError, 'conservative needs decay="linear"'),
    ({"clean_every": 5}, ValueError, "give clean_every and clean_by together"),
    ({"clean_every": 0, "clean_by": 0.5}, ValueError, "clean_every must be >= 1, got 0"),
    ({"clean_every": 5, "clean_by": 1.0}, ValueError, "clean_by must be in [0, 1), got 1.0"),
    ({"fold_at": 5}, TypeError, "fold_at must be a tuple of steps, got 5"),
    ({"fold_at": (0,)}, ValueError, "a step in fold_at must be >= 1, got 0"),
    ({"fold_at": (5, 5)}, ValueError, "fold_at must not repeat a step, got (5, 5)"),
    ({"fold_when": 0.0}, ValueError, "fold_when must be finite and > 0, got 0.0"),
    ({"fold_when": 0.1, "fold_at": (5,)}, ValueError, "give fold_at or fold_when, not both"),
    ({"fold_when": 0.1, "width": 100}, ValueError, "multiple of 64 to fold as its error allows"),
    ({"fold_at": (5, 9), "width": 6}, ValueError, "width must be a multiple of 4 to fold 2 times"),
    ({"dtype": torch.float16}, ValueError, "dtype must be torch.float32 or torch.bfloat16, got"),
    ({"seed": 0.5}, TypeError, "seed must be an int, got 0.5"),
    ({"array_below": -1}, ValueError, "array_below must be >= 0, got -1"),
    (
        {"array_below": 9, "granularity": "element"},
        ValueError,
        'array_below needs granularity="row", got granularity="element"',
    ),
    (
        {"array_below": 9, "clean_every": 5, "clean_by": 0.5},
        ValueError,
        "array_below needs clean_every=None, got clean_every=5",
    ),
]

# What Memory refuses: options, error, message.
BAD_MEMORY = [
    ({"first": "exact"}, TypeError, "first must be one of Exact, RowWise, RankOne, TopSingular"),
    ({"second": so.Exact}, TypeError, "second must be one of Exact, RowWise, RankOne"),
    ({"second": 0.1}, TypeError, "or None, got 0.1"),
    ({"first": so.RowWise()}, ValueError, "first must hold signed vectors, which RowWise cannot"),
    ({"first": so.RankOne()}, ValueError, "first must hold signed vectors, which RankOne cannot"),
    ({"first": Sketched()}, ValueError, "Sketched cannot: it keeps one number for a row"),
    (
        {"first": dataclasses.replace(ELEMENT, conservative=True)},
        ValueError,
        "Sketched cannot: a conservative sketch has no signs",
    ),
    ({"form": "quotient"}, ValueError, "form must be one of ['moments', 'ratio'], got 'quotient'"),
    ({"form": "ratio"}, ValueError, 'form="ratio" needs first and second to be Sketched'),
    (
        {"form": "ratio", "first": so.Exact(), "second": ELEMENT},
        ValueError,
        'form="ratio" needs first and second to be Sketched',
    ),
    (
        {"form": "ratio", "first": ELEMENT, "second": dataclasses.replace(ELEMENT, seed=1)},
        ValueError,
        'form="ratio" needs first and second to be the same Sketched',
    ),
    (
        {
            "form": "ratio",
            "first": dataclasses.replace(ELEMENT, decay="paper"),
            "second": dataclasses.replace(ELEMENT, decay="paper"),
        },
        ValueError,
        'the same Sketched, with decay="linear"',
    ),
    ({"clip": 0.0}, ValueError, "clip must be finite and > 0, got 0.0"),
    (
        {"form": "ratio", "first": FOLDING, "second": FOLDING},
        ValueError,
        'form="ratio" needs both sketches to have one width, which fold_when cannot promise',
    ),
]


granularities = st.sampled_from(["row", "element"])


@st.composite
def sketched(draw, granularity=granularities) -> Sketched:
    """Any Sketched that there can be."""
    decay = draw(st.sampled_from(["linear", "paper", "bucket"]))
    fold_at = tuple(draw(st.lists(st.integers(1, 10**6), max_size=4, unique=True)))
    fold_when = None if fold_at else draw(st.none() | st.floats(1e-6, 10.0))
    folds = len(fold_at) if fold_when is None else 6
    size = draw(
        st.one_of(
            st.just({}),
            st.fixed_dictionaries({"ratio": st.floats(1e-6, 4.0)}),
            st.fixed_dictionaries({"width": st.integers(1, 1000).map(lambda w: w << folds)}),
        )
    )
    cleaning = draw(
        st.one_of(
            st.just({}),
            st.fixed_dictionaries(
                {
                    "clean_every": st.integers(1, 10**6),
                    "clean_by": st.floats(0, 1, exclude_max=True),
                }
            ),
        )
    )
    return Sketched(
        depth=draw(st.integers(1, 9)),
        granularity=draw(granularity),
        decay=decay,
        conservative=decay == "linear" and draw(st.booleans()),
        fold_at=fold_at,
        fold_when=fold_when,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=draw(st.integers(-(2**70), 2**70)),
        **size,
        **cleaning,
    )


@st.composite
def memories(draw) -> Memory:
    """Any Memory that there can be."""
    plain = [None, so.Exact(), so.TopSingular()]
    first = draw(st.one_of(st.sampled_from(plain), sketched(st.just("element"))))
    second = draw(
        st.one_of(st.sampled_from([*plain, so.RowWise(), so.RankOne()]), sketched(), st.just(first))
    )
    if isinstance(first, Sketched):
        assume(not first.conservative)
    is_alike = isinstance(first, Sketched) and first == second and first.decay == "linear"
    return Memory(
        first=first,
        second=second,
        form=draw(st.sampled_from(["moments", "ratio"])) if is_alike else "moments",
        clip=draw(st.one_of(st.none(), st.floats(1e-3, 1e3))),
    )


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "error", "message"), BAD_SKETCHED)
def test_a_sketched_storage_that_makes_no_sense_is_refused(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Sketched(**options)


@pytest.mark.parametrize(("options", "error", "message"), BAD_MEMORY)
def test_a_memory_that_makes_no_sense_is_refused(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Memory(**options)


@pytest.mark.parametrize(
    ("choice", "error", "message"),
    [
        (
            "leen",
            ValueError,
            "memory must be a Memory or one of ['lean', 'lean-0.1', 'exact', '8-bit'",
        ),
        ("", ValueError, "got ''"),
        (None, TypeError, "memory must be a preset's name or a Memory, got None"),
        (Sketched(), TypeError, "memory must be a preset's name or a Memory, got Sketched("),
    ],
)
def test_a_memory_that_does_not_exist_is_refused(choice, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Memory.of(choice)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kind": "Hashed"}, "second.kind must be one of ['Exact', 'RowWise', 'RankOne'"),
        ({"novel": 1}, "got ['novel']; use the version of sketchoptim that wrote it"),
        ({"dtype": "int8"}, "dtype must be one of ['float32', 'bfloat16'], got 'int8'"),
        ({"depth": 0}, "depth must be >= 1, got 0"),
    ],
)
def test_a_dict_that_describes_no_memory_is_refused(changed, message):
    plain = PRESETS["lean"].to_dict()
    plain["second"] |= changed
    with pytest.raises(ValueError, match=re.escape(message)):
        Memory.from_dict(plain)


def test_a_key_that_no_memory_has_is_named_with_those_it_has():
    plain = {**PRESETS["lean"].to_dict(), "third": None, "warmup": 3}
    message = "no keys but ['clip', 'first', 'form', 'second'], got ['third', 'warmup']; use the"
    with pytest.raises(ValueError, match=re.escape(message)):
        Memory.from_dict(plain)


def test_a_storage_without_a_kind_is_refused():
    with pytest.raises(ValueError, match=r"first.kind must be one of .*, got None"):
        Memory.from_dict({"first": {"depth": 3}})


def test_what_a_dict_leaves_out_is_as_in_the_constructor():
    """So that an option added later does not part a user from an older checkpoint."""
    assert Memory.from_dict({"second": {"kind": "Sketched"}}) == Memory(second=Sketched())
    assert Memory.from_dict({}) == Memory()


@pytest.mark.parametrize(
    ("thing", "field"),
    [(Sketched(), "ratio"), (PRESETS["lean"], "second"), (so.Exact(), "dtype")],
)
def test_a_storage_cannot_be_changed(thing, field):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(thing, field, None)


# -- presets -------------------------------------------------------------------------------------

PAPER = Sketched(granularity="element", ratio=0.2, depth=3, decay="paper")
EIGHTH = Sketched(granularity="row", ratio=1 / 8, depth=3, decay="linear", conservative=True)
EXPECTED_PRESETS = {
    "lean": Memory(first=None, second=dataclasses.replace(EIGHTH, columns=True, array_below=4096)),
    "lean-0.1": Memory(first=None, second=EIGHTH),
    "exact": Memory(first=so.Exact(), second=so.Exact()),
    "8-bit": Memory(first=so.Quantized(), second=so.Quantized()),
    "paper-mv": Memory(first=PAPER, second=PAPER),
    "paper-v": Memory(first=so.Exact(), second=PAPER),
    "paper-v-only": Memory(first=None, second=PAPER),
    "row-wise": Memory(first=None, second=so.RowWise()),
    "rank-one": Memory(first=None, second=so.RankOne()),
}


def test_the_presets_are_these():
    assert PRESETS == EXPECTED_PRESETS


def test_a_memory_stands_for_itself():
    memory = Memory(second=so.RowWise(), clip=2.0)
    assert Memory.of(memory) is memory


# -- plain dicts ---------------------------------------------------------------------------------


@given(memories())
def test_any_memory_survives_json(memory):
    assert Memory.from_dict(json.loads(json.dumps(memory.to_dict()))) == memory


@given(memories())
def test_equal_memories_have_equal_hashes(memory):
    assert hash(Memory.from_dict(memory.to_dict())) == hash(memory)


# -- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("storage", "rows", "dim", "shape"),
    [
        (PRESETS["lean"].second, 793_471, 256, (3, 33_061, 1)),
        (PRESETS["lean"].second, 33_278, 672, (3, 1_386, 1)),
        (PAPER, 793_471, 256, (3, 52_898, 256)),  # the paper's own tables
        (PAPER, 267_735, 256, (3, 17_849, 256)),
        (Sketched(ratio=0.5, depth=4), 100, 7, (4, 12, 1)),
        (Sketched(ratio=2.0, depth=1), 100, 7, (1, 200, 1)),
        (Sketched(width=16, granularity="element"), 33_278, 672, (3, 16, 672)),
        (Sketched(width=16), 1, 1, (3, 16, 1)),
        (Sketched(ratio=0.125), 1, 1, (3, 1, 1)),  # a bucket at least
        (Sketched(ratio=0.125), 0, 4, (3, 1, 1)),
        (Sketched(ratio=0.125, fold_at=(5, 9, 11)), 1, 1, (3, 8, 1)),
        (Sketched(ratio=0.5, depth=1, fold_at=(5, 9)), 100, 1, (1, 48, 1)),
        (Sketched(ratio=0.5, depth=1, fold_when=0.1), 1000, 1, (1, 448, 1)),
        (Sketched(ratio=0.5, depth=1, fold_when=0.1), 10, 1, (1, 64, 1)),
    ],
)
def test_a_table_has_this_shape(storage, rows, dim, shape):
    assert storage.counters_shape(rows, dim) == shape


@pytest.mark.parametrize("rows", [793_471, 33_278, 50_000_000, 2**31])
@pytest.mark.parametrize("dim", [1, 256, 4096])
def test_lean_takes_half_a_byte_a_row_at_most(rows, dim):
    depth, width, columns = PRESETS["lean"].second.counters_shape(rows, dim)
    assert 0.499 * rows < 4 * depth * width * columns <= 0.5 * rows


@given(sketched(), st.integers(1, 10**7), st.integers(1, 4096))
def test_a_table_stays_within_its_ratio_and_close_to_it(storage, rows, dim):
    assume(storage.ratio is not None)
    depth, width, columns = storage.counters_shape(rows, dim)
    exact = rows * (dim if storage.granularity == "element" else 1)
    smallest, step = (
        depth * storage.width_multiple * columns,
        depth * storage.width_multiple * columns,
    )
    assert depth * width * columns <= max(storage.ratio * exact * (1 + 1e-12), smallest)
    assert depth * width * columns > storage.ratio * exact * (1 - 1e-12) - step


@given(sketched(), st.integers(0, 10**6), st.integers(1, 64))
def test_a_table_folds_as_often_as_asked(storage, rows, dim):
    _, width, _ = storage.counters_shape(rows, dim)
    assert width >= storage.width_multiple
    assert width % storage.width_multiple == 0
    widths = storage.widths(width)
    assert len(widths) > (len(storage.fold_at) if storage.fold_when is None else 6)
    assert max(widths) == width
    assert all(width % allowed == 0 for allowed in widths)


@pytest.mark.parametrize(("granularity", "ratio"), [("row", 1 / 8), ("element", 1 / 5)])
def test_the_ratio_defaults_by_granularity(granularity, ratio):
    assert Sketched(granularity=granularity).ratio == ratio


def test_fold_at_may_be_any_sequence():
    assert Sketched(fold_at=[5, 9]) == Sketched(fold_at=(5, 9))
