"""Axes that several pictures share."""

from matplotlib.axis import Axis
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter


def plain_numbers(axis: Axis) -> None:
    """Puts ticks at 1, 2 and 5 times each power of ten, in decimals: 0.05, not 5 x 10^-2."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FormatStrFormatter("%g"))
    axis.set_minor_formatter(NullFormatter())
