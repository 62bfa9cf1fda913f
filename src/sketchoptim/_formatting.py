"""Tables for people to read."""

from collections.abc import Sequence


def text_table(lines: Sequence[Sequence[str]], *, left: int) -> str:
    """The lines with their cells in columns: the first `left` columns to the left, the rest right.

    >>> print(text_table([("name", "bytes"), ("table", "1,024")], left=1))
    name   bytes
    table  1,024
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def readable_bytes(count: float) -> str:
    """A number of bytes in a suitable unit.

    >>> readable_bytes(56_100), readable_bytes(1_500_000_000)
    ('56.1 KB', '1.5 GB')
    """
    size = float(count)
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} GB"
