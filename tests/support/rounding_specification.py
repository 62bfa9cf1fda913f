"""The bits of stochastic rounding once more: in Python's integers, and as plain numbers.

Every backend has to give these numbers. The functions are written from the specification in
`sketchoptim._rounding`, not from its code.
"""

COLUMNS = (0, 1, 2, 15, 16, 17, 1000, 2**20)

# (key, id): the noise at each of COLUMNS.
NOISE = {
    (0x00000000, 0): (0x0000, 0x02EB, 0xAFDE, 0x7F78, 0x8FEE, 0x9995, 0x27CB, 0x74CF),
    (0x00000000, 1): (0xF995, 0xB062, 0x1593, 0xE6CB, 0xC136, 0xADF6, 0xC1BB, 0xADB6),
    (0x00000001, 0): (0x5C8F, 0xE7A1, 0x8BF1, 0x0A11, 0xC985, 0x11F6, 0xE02B, 0xCF0D),
    (0x9E3779B9, 1000003): (0x082B, 0xE3F1, 0x9EB1, 0x6EBD, 0x819F, 0xE29D, 0xF1FA, 0xD388),
    (0xFFFFFFFF, 2**32 - 1): (0xFB38, 0x1661, 0xD73A, 0x81F5, 0xEEAB, 0xA8E5, 0x0C8C, 0xE09D),
}


def finalise(word: int) -> int:
    """The finaliser of MurmurHash3 for 32-bit words."""
    word = (word ^ word >> 16) * 0x85EBCA6B % 2**32
    word = (word ^ word >> 13) * 0xC2B2AE35 % 2**32
    return word ^ word >> 16


def noise_of(key: int, row_id: int, column: int) -> int:
    """The 16 bits by which one number is rounded."""
    row_key = finalise((finalise(row_id) + key) % 2**32)
    return finalise((column * 0x9E3779B1 + row_key) % 2**32) % 2**16
