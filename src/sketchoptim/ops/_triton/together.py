"""The same kernels over several tables at once: the second axis of the grid is the table.

Arguments lie in a matrix of 64-bit words on the device, a row for each table, in the order of
`WORDS`. What a kernel is compiled for is the same for all tables.
"""

import triton
import triton.language as tl

from . import moves, prepare

# What a row of the matrix holds: arguments of kernels, and addresses of the ids and of their keys.
WORDS = (
    "ids", "order", "entries", "partials", "row_values", "count", "unsorted_ids", "keys",
    "expected_step", "weights_key", "step_size", "shrink", "second_root", "clip", "first_beta",
    "second_beta", "eps", "weight_decay", "nesterov", "first_weight", "first_decay",
    "second_weight", "second_decay", "parameter", "ledger", "flag", "report", "row_count",
    "first_row", "least_id", "first", "first_hash", "first_width", "first_units", "first_book",
    "first_borders", "first_size", "second", "second_hash", "second_width", "second_units",
    "second_book", "second_borders", "second_size", "columns", "factors", "shares",
)  # fmt: skip
(
    IDS, ORDER, ENTRIES, PARTIALS, ROW_VALUES, COUNT, UNSORTED_IDS, KEYS,
    EXPECTED_STEP, WEIGHTS_KEY, STEP_SIZE, SHRINK, SECOND_ROOT, CLIP, FIRST_BETA,
    SECOND_BETA, EPS, WEIGHT_DECAY, NESTEROV, FIRST_WEIGHT, FIRST_DECAY,
    SECOND_WEIGHT, SECOND_DECAY, PARAMETER, LEDGER, FLAG, REPORT, ROW_COUNT,
    FIRST_ROW, LEAST_ID, FIRST, FIRST_HASH, FIRST_WIDTH, FIRST_UNITS, FIRST_BOOK,
    FIRST_BORDERS, FIRST_SIZE, SECOND, SECOND_HASH, SECOND_WIDTH, SECOND_UNITS,
    SECOND_BOOK, SECOND_BORDERS, SECOND_SIZE, COLUMNS, FACTORS, SHARES,
) = map(tl.constexpr, range(len(WORDS)))  # fmt: skip
WIDTH = tl.constexpr(len(WORDS))


@triton.jit
def _row(words):
    return words + tl.program_id(1).to(tl.int64) * WIDTH


@triton.jit
def _pointer(row, word: tl.constexpr, dtype: tl.constexpr):
    """A pointer from its address."""
    return tl.load(row + word).to(tl.pointer_type(dtype))


@triton.jit
def _aligned(row, word: tl.constexpr, dtype: tl.constexpr):
    """A pointer from its address, which is a multiple of 16 bytes.

    The hint goes to the cast itself: that of a value which a function returns is lost.
    """
    return tl.multiple_of(tl.load(row + word).to(tl.pointer_type(dtype)), 16)


@triton.jit
def collect_keys(words, KEY: tl.constexpr, BLOCK: tl.constexpr):
    row = _row(words)
    prepare.collect_keys(
        _pointer(row, UNSORTED_IDS, tl.int64), _pointer(row, KEYS, KEY), tl.load(row + COUNT),
        tl.load(row + ROW_COUNT), tl.load(row + LEAST_ID), BLOCK,
    )  # fmt: skip


@triton.jit
def begin(
    words, ELEMENT: tl.constexpr, KEY: tl.constexpr, CORRECTION: tl.constexpr,
    FIRST_DECAYS: tl.constexpr, FIRST_FORGETS: tl.constexpr, SECOND_DECAYS: tl.constexpr,
    SECOND_FORGETS: tl.constexpr, HAS_COLUMNS: tl.constexpr, HAS_PIECES: tl.constexpr,
    DIM: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = _row(words)
    prepare.begin(
        _aligned(row, LEDGER, tl.float64), _pointer(row, FLAG, tl.int32),
        _aligned(row, ENTRIES, ELEMENT), _pointer(row, IDS, KEY), _pointer(row, ORDER, tl.int64),
        _aligned(row, PARTIALS, tl.float32), tl.load(row + COUNT), tl.load(row + EXPECTED_STEP),
        tl.load(row + WEIGHTS_KEY), tl.load(row + STEP_SIZE), tl.load(row + SECOND_ROOT),
        tl.load(row + CLIP), tl.load(row + FIRST_BETA), tl.load(row + SECOND_BETA),
        tl.load(row + EPS), tl.load(row + WEIGHT_DECAY), tl.load(row + SHRINK),
        tl.load(row + NESTEROV), tl.load(row + FIRST_WEIGHT), tl.load(row + FIRST_DECAY),
        tl.load(row + SECOND_WEIGHT), tl.load(row + SECOND_DECAY),
        _aligned(row, COLUMNS, tl.float32), _aligned(row, FACTORS, tl.float32),
        _aligned(row, SHARES, tl.int64), CORRECTION, FIRST_DECAYS, FIRST_FORGETS, SECOND_DECAYS,
        SECOND_FORGETS, HAS_COLUMNS, HAS_PIECES, DIM, STRIDE, BLOCK, ROWS,
    )  # fmt: skip


@triton.jit
def inspect(
    words, ELEMENT: tl.constexpr, KEY: tl.constexpr, SECOND_NUMBER: tl.constexpr,
    DIM: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    LAYOUT: tl.constexpr, IS_MAXIMIZING: tl.constexpr, DECAYS: tl.constexpr,
    LARGEST: tl.constexpr, IS_CHECKED: tl.constexpr, SECOND_KIND: tl.constexpr,
    SECOND_FORM: tl.constexpr, SECOND_MODE: tl.constexpr, SECOND_DEPTH: tl.constexpr,
    SECOND_FORGETS: tl.constexpr, HAS_COLUMNS: tl.constexpr,
):  # fmt: skip
    row = _row(words)
    prepare.inspect(
        _aligned(row, ENTRIES, ELEMENT), _pointer(row, IDS, KEY), _pointer(row, ORDER, tl.int64),
        _aligned(row, PARTIALS, tl.float32), _aligned(row, PARAMETER, ELEMENT),
        _aligned(row, LEDGER, tl.float64), _pointer(row, FLAG, tl.int32),
        _pointer(row, ROW_VALUES, tl.float32), _aligned(row, FACTORS, tl.float32),
        _aligned(row, SHARES, tl.int64), _aligned(row, SECOND, SECOND_NUMBER),
        _aligned(row, SECOND_HASH, tl.int64), tl.load(row + SECOND_WIDTH), tl.load(row + COUNT),
        tl.load(row + ROW_COUNT), tl.load(row + FIRST_ROW), tl.load(row + LEAST_ID), DIM, STRIDE,
        BLOCK, ROWS, LAYOUT, IS_MAXIMIZING, DECAYS, LARGEST, IS_CHECKED, SECOND_KIND, SECOND_FORM,
        SECOND_MODE, SECOND_DEPTH, SECOND_FORGETS, HAS_COLUMNS,
    )  # fmt: skip


@triton.jit
def move_rows(
    words, ELEMENT: tl.constexpr, KEY: tl.constexpr, FIRST_NUMBER: tl.constexpr,
    SECOND_NUMBER: tl.constexpr, FIRST_KIND: tl.constexpr, FIRST_FORM: tl.constexpr,
    FIRST_MODE: tl.constexpr, FIRST_DEPTH: tl.constexpr, SECOND_KIND: tl.constexpr,
    SECOND_FORM: tl.constexpr, SECOND_MODE: tl.constexpr, SECOND_DEPTH: tl.constexpr,
    IS_RAISED: tl.constexpr, DIM: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, LAYOUT: tl.constexpr, IS_MAXIMIZING: tl.constexpr, DECAYS: tl.constexpr,
    HAS_NESTEROV: tl.constexpr, HAS_ROOT: tl.constexpr, HAS_CLIP: tl.constexpr,
    IS_RATIO: tl.constexpr, IS_STOCHASTIC: tl.constexpr, HAS_COLUMNS: tl.constexpr,
):  # fmt: skip
    row = _row(words)
    moves.move_rows(
        _aligned(row, ENTRIES, ELEMENT), _pointer(row, IDS, KEY), _pointer(row, ORDER, tl.int64),
        _aligned(row, PARTIALS, tl.float32), _aligned(row, PARAMETER, ELEMENT),
        _aligned(row, LEDGER, tl.float64), _pointer(row, FLAG, tl.int32),
        _pointer(row, ROW_VALUES, tl.float32), _aligned(row, FACTORS, tl.float32),
        _aligned(row, FIRST, FIRST_NUMBER),
        _aligned(row, FIRST_HASH, tl.int64), tl.load(row + FIRST_WIDTH),
        _pointer(row, FIRST_UNITS, tl.float32), _aligned(row, FIRST_BOOK, tl.float32),
        _aligned(row, FIRST_BORDERS, tl.float32), _aligned(row, SECOND, SECOND_NUMBER),
        _aligned(row, SECOND_HASH, tl.int64), tl.load(row + SECOND_WIDTH),
        _pointer(row, SECOND_UNITS, tl.float32), _aligned(row, SECOND_BOOK, tl.float32),
        _aligned(row, SECOND_BORDERS, tl.float32), tl.load(row + COUNT), tl.load(row + FIRST_ROW),
        FIRST_KIND, FIRST_FORM, FIRST_MODE, FIRST_DEPTH, SECOND_KIND, SECOND_FORM, SECOND_MODE,
        SECOND_DEPTH, IS_RAISED, DIM, STRIDE, BLOCK, ROWS, LAYOUT, IS_MAXIMIZING, DECAYS,
        HAS_NESTEROV, HAS_ROOT, HAS_CLIP, IS_RATIO, IS_STOCHASTIC, HAS_COLUMNS,
    )  # fmt: skip


@triton.jit
def finish(
    words, FIRST_NUMBER: tl.constexpr, SECOND_NUMBER: tl.constexpr, HAS_FIRST: tl.constexpr,
    HAS_SECOND: tl.constexpr, FIRST_DECAYS: tl.constexpr, SECOND_DECAYS: tl.constexpr,
    SECOND_MODE: tl.constexpr, HAS_COLUMNS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = _row(words)
    prepare.finish(
        _aligned(row, LEDGER, tl.float64), _pointer(row, FLAG, tl.int32),
        _pointer(row, REPORT, tl.float64), _aligned(row, FIRST, FIRST_NUMBER),
        _aligned(row, SECOND, SECOND_NUMBER), _aligned(row, COLUMNS, tl.float32),
        _aligned(row, SHARES, tl.int64), tl.load(row + FIRST_SIZE), tl.load(row + SECOND_SIZE),
        HAS_FIRST, HAS_SECOND, FIRST_DECAYS, SECOND_DECAYS, SECOND_MODE, HAS_COLUMNS, DIM, BLOCK,
    )  # fmt: skip
