"""The ledger: float64 numbers of one parameter on the device, and the numbers of its next step.

The device counts steps by itself, because the host learns later which of them were refused. The
first slots hold what lasts from step to step; `begin` writes the others, which the kernels of the
step read, and `finish` makes the step count.
"""

import triton
import triton.language as tl

# What lasts.
REFUSED_VALUES = tl.constexpr(0)
REFUSED_IDS = tl.constexpr(1)
STEP = tl.constexpr(2)
FIRST_LASTING = tl.constexpr(3)
SECOND_LASTING = tl.constexpr(5)
# Of a moment, from FIRST_LASTING or SECOND_LASTING on.
LASTING_SCALE = tl.constexpr(0)
LASTING_WRITES = tl.constexpr(1)
LASTING = tl.constexpr(7)

# Numbers of the step.
STEP_SIZE = tl.constexpr(9)
SECOND_ROOT = tl.constexpr(10)
CLIP = tl.constexpr(11)
WEIGHTS_KEY = tl.constexpr(12)
EPS = tl.constexpr(13)
WEIGHT_DECAY = tl.constexpr(14)
SHRINK = tl.constexpr(15)
NESTEROV = tl.constexpr(16)
FIRST = tl.constexpr(17)
SECOND = tl.constexpr(24)
# Of a moment, from FIRST or SECOND on.
WEIGHT = tl.constexpr(0)
DECAY_LESS_ONE = tl.constexpr(1)
SCALE = tl.constexpr(2)
INVERSE_SCALE = tl.constexpr(3)
KEY = tl.constexpr(4)
NEXT_SCALE = tl.constexpr(5)
NEXT_SHIFT = tl.constexpr(6)
SIZE = tl.constexpr(32)

# Bits of the flag.
BAD_VALUES = tl.constexpr(1)
BAD_IDS = tl.constexpr(2)


@triton.jit
def number(ledger, slot: tl.constexpr):
    """A number of the step, as the float32 that arithmetic is done with."""
    return tl.load(ledger + slot).to(tl.float32)


@triton.jit
def key(ledger, slot: tl.constexpr):
    """A key of rounding, uint32."""
    return tl.load(ledger + slot).to(tl.int64).to(tl.uint32)
