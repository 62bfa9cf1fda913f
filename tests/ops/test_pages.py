"""Huge pages: large tables lie in them, and nothing but that has changed."""

from pathlib import Path

import pytest
import torch
from backends import needs_native
from torch import Tensor

import sketchoptim as so
from sketchoptim.ops import pages

needs_huge_pages = pytest.mark.skipif(
    pages.setting() not in ("always", "madvise"), reason="needs huge pages"
)
LARGE = 4 << 20  # elements of float32: 16 MiB


def huge_bytes(tensor: Tensor) -> int:
    """Bytes in huge pages of the mappings that the tensor's memory is in."""
    begin, end, total, is_within = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if not head.endswith(":"):
            low, high = (int(address, 16) for address in head.split("-"))
            is_within = low < end and begin < high
        elif is_within and head == "AnonHugePages:":
            total += int(line.split()[1]) << 10
    return total


@needs_huge_pages
def test_a_large_tensor_moves_and_keeps_its_numbers_and_address():
    tensor = torch.arange(LARGE, dtype=torch.float32)
    before = tensor.clone(), tensor.data_ptr()
    pages.use_huge_pages(tensor)
    assert huge_bytes(tensor) >= tensor.nbytes // 2  # all but the ends, and what is scarce
    assert torch.equal(tensor, before[0])
    assert tensor.data_ptr() == before[1]


@needs_native
@needs_huge_pages
def test_a_step_moves_the_parameter_and_its_moments():
    table = torch.nn.Embedding(LARGE // 64, 64, sparse=True)
    optimizer = so.Adam(table.parameters(), memory="exact")
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    state = optimizer.state[table.weight]
    for tensor in (table.weight, state["first_values"], state["second_values"]):
        assert huge_bytes(tensor) >= tensor.nbytes // 2


@pytest.mark.parametrize("setting", ["never", "absent"])
def test_nothing_is_asked_of_a_system_without_them(setting, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("the system was asked")

    monkeypatch.setattr(pages, "setting", lambda: setting)
    monkeypatch.setattr(pages.ctypes, "CDLL", refuse)
    pages.use_huge_pages(torch.zeros(LARGE))


def test_a_small_tensor_stays_where_it_is(monkeypatch):
    monkeypatch.setattr(pages, "setting", lambda: "always")
    monkeypatch.setattr(pages.ctypes, "CDLL", None)  # calling it would fail
    pages.use_huge_pages(torch.zeros(1000))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("always [madvise] never\n", "madvise"), ("[always] madvise never\n", "always")],
)
def test_the_setting_is_the_word_in_brackets(text, expected, tmp_path, monkeypatch):
    (tmp_path / "enabled").write_text(text)
    monkeypatch.setattr(pages, "_SETTING", tmp_path / "enabled")
    assert pages.setting.__wrapped__() == expected


def test_without_the_file_huge_pages_are_absent(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "_SETTING", tmp_path / "enabled")
    assert pages.setting.__wrapped__() == "absent"
