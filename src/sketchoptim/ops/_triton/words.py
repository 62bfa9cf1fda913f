"""Words and bits in Triton: the hash of `_hashing.py` and the rounding of `_rounding.py`."""

import triton
import triton.language as tl


@triton.jit
def mix(ids):
    """The ids after the fixed bijection of 64-bit words."""
    x = ids.to(tl.uint64)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def splitmix64(state):
    """The first output of the splitmix64 generator that starts from a uint64."""
    return mix(state + 0x9E3779B97F4A7C15)


@triton.jit
def bucket_of(words, row, mixed, width):
    """The bucket of mixed ids in one hash row, int64."""
    a = tl.load(words + 4 * row).to(tl.uint64, bitcast=True)
    b = tl.load(words + 4 * row + 1).to(tl.uint64, bitcast=True)
    u = (a * mixed + b) >> 32
    return ((u * width.to(tl.uint64)) >> 32).to(tl.int64)


@triton.jit
def sign_of(words, row, mixed):
    """+1 or -1 for mixed ids in one hash row, float32."""
    a = tl.load(words + 4 * row + 2).to(tl.uint64, bitcast=True)
    b = tl.load(words + 4 * row + 3).to(tl.uint64, bitcast=True)
    is_negative = ((a * mixed + b) >> 63).to(tl.int32)
    return (1 - 2 * is_negative).to(tl.float32)


@triton.jit
def finalise(x):
    """MurmurHash3's finaliser of uint32 words."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def noise(key, ids, columns):
    """16 random bits, uint32, for columns of rows; `ids` and `columns` broadcast."""
    row_keys = finalise(finalise(ids.to(tl.uint32)) + key)
    return finalise(columns.to(tl.uint32) * 0x9E3779B1 + row_keys) & 0xFFFF


@triton.jit
def _nearest_bfloat16(bits):
    """The upper halves of float32 bits, rounded to nearest, ties to even, as torch rounds."""
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)


@triton.jit
def store_nearest(pointers, x, mask):
    """Stores float32 numbers in the dtype of the pointers, rounded to nearest.

    By integers for bfloat16: Triton's interpreter would truncate.
    """
    if pointers.dtype.element_ty == tl.bfloat16:
        halves = _nearest_bfloat16(x.to(tl.uint32, bitcast=True)).to(tl.uint16)
        tl.store(pointers, halves.to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def stochastic_bfloat16(x, bits_of_noise):
    """The bfloat16 numbers that a sketch keeps of float32 ones, as float32."""
    rounded = (x.to(tl.uint32, bitcast=True) + bits_of_noise) & 0xFFFF0000
    return rounded.to(tl.float32, bitcast=True)


@triton.jit
def _stochastic_float16_bits(x, bits_of_noise):
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude - 0x38000000 + (bits_of_noise >> 3)) >> 13
    small = tl.minimum(tl.abs(x), 6.103515625e-05) * 1099511627776.0  # 2^-14 and 2^40
    small_bits = (small.to(tl.int32).to(tl.uint32) + bits_of_noise) >> 16
    return tl.where(magnitude < 0x38800000, small_bits, normal) | ((bits >> 16) & 0x8000)


@triton.jit
def store_weights(pointers, x, mask, key, ids, columns, IS_STOCHASTIC: tl.constexpr):
    """Stores new weights; half-precision ones may be rounded stochastically.

    Weights above the largest finite number of their dtype, and NaN, are rounded to nearest.
    """
    if IS_STOCHASTIC:
        bits = x.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        random_bits = noise(key, ids, columns)
        if pointers.dtype.element_ty == tl.bfloat16:
            halves = tl.where(
                magnitude > 0x7F7F0000, _nearest_bfloat16(bits), (bits + random_bits) >> 16
            )
            rounded = halves.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        else:
            halves = _stochastic_float16_bits(x, random_bits).to(tl.uint16)
            nearest = x.to(tl.float16)
            is_large = magnitude > 0x477FE000
            rounded = tl.where(is_large, nearest, halves.to(tl.float16, bitcast=True))
        tl.store(pointers, rounded, mask=mask)
    else:
        store_nearest(pointers, x, mask)
