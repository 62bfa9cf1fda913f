"""Huge pages: asked for before a large table is written, and nothing else is different."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

import sketchoptim as so
from sketchoptim import pages

CPU = torch.device("cpu")
LARGE = 4 << 20  # elements of float32: 16 MiB
on_linux = pytest.mark.skipif(pages.setting() == "absent", reason="needs Linux with huge pages")


def is_advised(tensor: Tensor) -> bool:
    """Whether Linux was asked for huge pages for the middle of the tensor's memory."""
    middle, is_there = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, *rest = line.split()
        if not head.endswith(":"):
            low, high = (int(address, 16) for address in head.split("-"))
            is_there = low <= middle < high
        elif is_there and head == "VmFlags:":
            return "hg" in rest
    raise AssertionError("the tensor has no memory")


def filled(elements: int) -> Tensor:
    return pages.empty((elements,), dtype=torch.float32, device=CPU).fill_(1.0)


@on_linux
def test_huge_pages_are_asked_for_where_a_tensor_is_large():
    assert is_advised(filled(LARGE))
    assert not is_advised(filled(1000))


@on_linux
def test_the_advice_ends_with_the_tensor():
    for _ in range(4):  # malloc learns from what is freed to keep such sizes in its heap
        tensors = [filled(LARGE), torch.ones(LARGE)]
        assert is_advised(tensors[0])
        del tensors
    assert not any(is_advised(torch.ones(elements)) for elements in (1000, LARGE // 2, LARGE))


@on_linux
def test_fresh_and_loaded_sketches_lie_in_them():
    table = torch.nn.Embedding(LARGE // 64, 64, sparse=True)
    memory = so.Memory(second=so.Sketched(granularity="element", ratio=1.0))
    optimizer = so.Adam(table.parameters(), memory=memory)
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    optimizers = [optimizer, so.Adam(table.parameters(), memory=memory)]
    optimizers[1].load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(is_advised(it.state[table.weight]["second_table"]) for it in optimizers)
    assert not is_advised(table.weight)  # whose memory is not ours


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
