"""The table of the page on capacity is what its command prints."""

from pathlib import Path

from experiments.studies.capacity import capacity_table

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "capacity.md"


def test_the_table_of_the_page_is_the_one_that_the_command_prints():
    assert "\n".join(capacity_table(64)) in PAGE.read_text("utf-8")
