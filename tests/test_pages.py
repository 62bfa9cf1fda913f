"""Huge pages: large tables lie in them from the beginning, and nothing else is different."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

import sketchoptim as so
from sketchoptim import pages

CPU = torch.device("cpu")
LARGE = 8 << 20  # elements of float32: 32 MiB
needs_huge_pages = pytest.mark.skipif(
    pages.setting() not in ("always", "madvise"), reason="needs huge pages"
)


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
def test_a_large_tensor_lies_in_huge_pages():
    tensor = pages.empty((LARGE,), dtype=torch.float32, device=CPU).fill_(1.0)
    assert huge_bytes(tensor) >= tensor.nbytes // 2  # all but the ends, and what is scarce


@needs_huge_pages
def test_fresh_and_loaded_sketches_lie_in_huge_pages():
    table = torch.nn.Embedding(LARGE // 64, 64, sparse=True)
    memory = so.Memory(second=so.Sketched(granularity="element", ratio=1.0))
    optimizer = so.Adam(table.parameters(), memory=memory)
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    optimizers = [optimizer, so.Adam(table.parameters(), memory=memory)]
    optimizers[1].load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for state in (it.state[table.weight] for it in optimizers):
        assert huge_bytes(state["second_table"]) >= state["second_table"].nbytes // 2


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (LARGE // 8, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_tensor_is_what_was_asked_for(shape, dtype):
    tensor = pages.empty(shape, dtype=dtype, device=CPU)
    assert (tensor.shape, tensor.dtype, tensor.device) == (shape, dtype, CPU)
    assert tensor.is_contiguous()
    tensor.fill_(7)
    assert (tensor == 7).all()


def test_no_memory_is_asked_for_on_other_devices():
    assert pages.empty((LARGE,), dtype=torch.float32, device=torch.device("meta")).is_meta


@pytest.mark.parametrize(
    ("text", "expected"),
    [("always [madvise] never\n", "madvise"), ("[always] madvise never\n", "always")],
)
def test_the_setting_is_the_word_in_brackets(text, expected, tmp_path, monkeypatch):
    (tmp_path / "enabled").write_text(text)
    monkeypatch.setattr(pages, "_SETTING", tmp_path / "enabled")
    assert pages.setting() == expected


def test_without_the_file_huge_pages_are_absent(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "_SETTING", tmp_path / "enabled")
    assert pages.setting() == "absent"
