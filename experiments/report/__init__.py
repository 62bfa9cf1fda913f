"""The report of a reproduction: a table for the terminal, a page and pictures."""

from .page import write_report
from .table import comparison_table

__all__ = ["comparison_table", "write_report"]
