"""Huge pages: asked for before a large table is written, and nothing else is different."""

import copy
from pathlib import Path

import pytest
import torch
from moment_runs import opened
from torch import Tensor

import sketchoptim as so
from sketchoptim import _pages

CPU = torch.device("cpu")
LARGE = 4 << 20  # elements of float32: 16 MiB
on_linux = pytest.mark.skipif(_pages.setting() == "absent", reason="needs Linux with huge pages")


def advised_mappings() -> list[range]:
    """The memory for which Linux was asked for huge pages: by us, or by NumPy for its arrays."""
    found = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, *rest = line.split()
        if not head.endswith(":"):
            mapping = range(*(int(address, 16) for address in head.split("-")))
        elif head == "VmFlags:" and "hg" in rest:
            found.append(mapping)
    return found


def is_advised(tensor: Tensor) -> bool:
    """Whether Linux was asked for huge pages for the middle of the tensor's memory."""
    return any(tensor.data_ptr() + tensor.nbytes // 2 in mapping for mapping in advised_mappings())


def advised_bytes() -> int:
    return sum(map(len, advised_mappings()))


def is_from_torch(tensor: Tensor) -> bool:
    """Whether torch gave the memory, of which malloc may hand on what NumPy had advised."""
    return tensor.untyped_storage().resizable()


def filled(elements: int) -> Tensor:
    return _pages.empty((elements,), dtype=torch.float32, device=CPU).fill_(1.0)


@on_linux
def test_huge_pages_are_asked_for_where_a_tensor_is_large():
    assert is_from_torch(filled(1000))
    large = filled(LARGE)
    assert is_advised(large)
    assert not is_from_torch(large)


@on_linux
def test_the_advice_ends_with_the_tensor():
    before = advised_bytes()
    for _ in range(4):  # malloc learns from what is freed to keep such sizes in its heap
        tensors = [filled(LARGE), torch.ones(LARGE)]
        assert is_advised(tensors[0])
        del tensors
    assert advised_bytes() <= before


@on_linux
@pytest.mark.parametrize(
    ("second", "dim", "part", "expected"),
    [
        (so.Sketched(granularity="element", ratio=0.25), 64, "counters", True),
        (so.Exact(), 64, "values", False),
    ],
    ids=["sketched", "exact"],
)
def test_tables_of_sketches_alone_lie_in_them_fresh_or_loaded(second, dim, part, expected):
    weight = torch.zeros(4 * LARGE // dim, dim)
    table = torch.nn.Embedding.from_pretrained(weight, freeze=False, sparse=True)
    memory = so.Memory(second=second)
    optimizer = so.Adam(table.parameters(), memory=memory)
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    optimizers = [optimizer, so.Adam(table.parameters(), memory=memory)]
    optimizers[1].load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for it in optimizers:
        kept = it.state[table.weight][f"second_{part}"]
        assert is_advised(kept) if expected else is_from_torch(kept)
    assert is_from_torch(table.weight)


@on_linux
def test_a_folded_table_lies_in_them():
    moment = opened(so.Sketched(width=2 * LARGE, depth=1, fold_at=(1,)))
    moment.maintain_(1)
    assert moment.tensors["counters"].shape == (1, LARGE, 1)
    assert is_advised(moment.tensors["counters"])


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (LARGE // 8, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_tensor_is_what_was_asked_for(shape, dtype):
    tensor = _pages.empty(shape, dtype=dtype, device=CPU)
    assert (tensor.shape, tensor.dtype, tensor.device) == (shape, dtype, CPU)
    assert tensor.is_contiguous()
    tensor.fill_(7)
    assert (tensor == 7).all()


def test_no_memory_is_asked_for_on_other_devices():
    assert _pages.empty((LARGE,), dtype=torch.float32, device=torch.device("meta")).is_meta


@pytest.mark.parametrize(
    ("text", "expected"),
    [("always [madvise] never\n", "madvise"), ("[always] madvise never\n", "always")],
)
def test_the_setting_is_the_word_in_brackets(text, expected, tmp_path, monkeypatch):
    (tmp_path / "enabled").write_text(text)
    monkeypatch.setattr(_pages, "_SETTING", tmp_path / "enabled")
    assert _pages.setting() == expected


def test_without_the_file_huge_pages_are_absent(tmp_path, monkeypatch):
    monkeypatch.setattr(_pages, "_SETTING", tmp_path / "enabled")
    assert _pages.setting() == "absent"
