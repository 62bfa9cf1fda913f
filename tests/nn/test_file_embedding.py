"""A table in a file trains as one in memory does, stays on disk, and is known again."""

import copy
import errno
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sketchoptim as so
from sketchoptim.nn import FileEmbedding
from sketchoptim.ops import _dispatch, _native

ROWS, DIM = 50, 6
STATUS = Path("/proc/self/status")


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "table.bin"


def batches(rows: int, steps: int = 4, ids: int = 20) -> torch.Tensor:
    return torch.randint(rows, (steps, ids), generator=torch.Generator().manual_seed(3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, all_ids: torch.Tensor) -> list[float]:
    losses = []
    for ids in all_ids:
        loss = (model(ids) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def resident_bytes() -> dict[str, int]:
    lines = STATUS.read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {key: int(fields[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile", "RssShmem")}


# -- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [so.Adam, so.SGD, torch.optim.SparseAdam])
def test_it_trains_as_an_embedding_in_memory_does(path, kind, dtype):
    table = FileEmbedding(path, ROWS, DIM, dtype, padding_idx=-1)
    twin = nn.Embedding(ROWS, DIM, padding_idx=-1, sparse=True, dtype=dtype)
    with torch.no_grad():
        twin.weight[:-1] = table.initial_rows(torch.arange(ROWS - 1))
    all_ids = torch.cat([batches(ROWS), torch.full((4, 1), ROWS - 1)], 1)
    losses = [
        train(model, kind([("weight", model.weight)], lr=0.05), all_ids) for model in (table, twin)
    ]
    assert losses[0] == losses[1]
    assert torch.equal(table(torch.arange(ROWS)), twin(torch.arange(ROWS)))


def test_the_native_kernels_take_it(path):
    if _native.library() is None:
        pytest.skip("no kernels were built")
    kernels, reason = _dispatch.find_kernels(FileEmbedding(path, ROWS, DIM).weight, (None, None))
    assert kernels is not None, reason


def test_ids_of_any_shape_give_rows_of_it(path):
    table = FileEmbedding(path, ROWS, DIM)
    for shape in ((), (3,), (2, 3), (0,)):
        ids = torch.ones(shape, dtype=torch.int32)
        assert table(ids).shape == (*shape, DIM)
        with torch.no_grad():
            assert table(ids + 1).shape == (*shape, DIM)


@pytest.mark.skipif(not STATUS.exists(), reason="needs Linux's status of a process")
def test_only_touched_pages_are_in_memory_and_on_disk(path):
    table = FileEmbedding(path, 400_000, 256)  # 410 MB
    optimizer = so.Adam(table.named_parameters(), lr=0.05)
    all_ids = batches(400_000, steps=10, ids=500)
    train(table, optimizer, all_ids[:1])  # what a first step imports and allocates
    before = resident_bytes()
    losses = train(table, optimizer, all_ids.repeat(2, 1))
    grown = {key: size - before[key] for key, size in resident_bytes().items()}
    assert sum(losses[10:]) < 0.9 * sum(losses[:10])
    pages = 5_000 * 4096  # four rows have one page; few of the ids are neighbours
    assert grown["RssFile"] + grown["RssShmem"] < 2 * pages
    assert grown["RssAnon"] < 20e6
    assert table.path.stat().st_size == 409_600_000
    assert table.path.stat().st_blocks * 512 < 2 * pages


def test_another_process_reads_the_same_weights(path):
    table = FileEmbedding(path, ROWS, DIM)
    train(table, so.Adam(table.parameters(), lr=0.05), batches(ROWS))
    table.flush()
    code = (
        "import sys, torch, sketchoptim as so\n"
        f"table = so.nn.FileEmbedding(sys.argv[1], {ROWS}, {DIM}).requires_grad_(False)\n"
        f"print(table(torch.arange({ROWS})).tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(table(torch.arange(ROWS)).tolist())


def test_a_run_resumed_from_file_and_checkpoint_continues_bit_for_bit(path, tmp_path):
    def build(name: str) -> tuple[FileEmbedding, so.Adam]:
        table = FileEmbedding(path.with_name(name) / "table.bin", ROWS, DIM)
        return table, so.Adam(table.named_parameters(), lr=0.05)

    for name in ("straight", "resumed"):
        path.with_name(name).mkdir()
    straight, optimizer = build("straight")
    train(straight, optimizer, batches(ROWS))
    table, optimizer = build("resumed")
    train(table, optimizer, batches(ROWS)[:2])
    table.flush()
    state = {"model": table.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "checkpoint.pt")
    del table
    table, optimizer = build("resumed")
    state = torch.load(tmp_path / "checkpoint.pt")
    table.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train(table, optimizer, batches(ROWS)[2:])
    assert torch.equal(table.weight, straight.weight)


# -- initial weights ------------------------------------------------------------------------------


def test_initial_rows_do_not_depend_on_the_order_of_ids(tmp_path):
    found = []
    for number, ids in enumerate([[3, 1, 3, 40], [40], [1, 40, 3]]):
        (tmp_path / str(number)).mkdir()
        table = FileEmbedding(tmp_path / str(number) / "table.bin", ROWS, DIM)
        found.append(table(torch.tensor(ids))[ids.index(40)])
        assert torch.equal(table.weight[40], found[-1])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_initial_rows_are_these(path):
    """Golden: a table that was trained for a week must be read the same by the next version."""
    table = FileEmbedding(path, 10, 2, init_bound=1.0, seed=5)
    expected = [
        [0.8665470480918884, 0.2015247941017151],
        [0.39540261030197144, -0.07084709405899048],
    ]
    assert table.initial_rows(torch.tensor([0, 9])).tolist() == expected


def test_initial_weights_are_uniform_within_the_bound(path):
    table = FileEmbedding(path, 2_000, 50, init_bound=0.3)
    rows = table(torch.arange(2_000)).detach().double()
    assert rows.abs().max() < 0.3
    assert rows.mean().abs() < 5 * 0.3 / (3 * rows.numel()) ** 0.5
    counts = torch.histc(rows, 10, -0.3, 0.3)
    assert ((counts - 10_000).abs() < 5 * 10_000**0.5).all()
    neighbours = torch.corrcoef(rows[:20]).fill_diagonal_(0)
    assert neighbours.abs().max() < 5 / 50**0.5


@pytest.mark.parametrize("options", [{"seed": 1}, {"name": "other.bin"}])
def test_tables_of_another_seed_or_name_start_elsewhere(path, options):
    one = FileEmbedding(path, ROWS, DIM)
    name = options.pop("name", "table.bin")
    other = FileEmbedding(path.with_name("b" + name), ROWS, DIM, **options)
    ids = torch.arange(ROWS)
    assert not (one.initial_rows(ids) == other.initial_rows(ids)).any()


def test_a_forward_pass_without_gradients_returns_initial_rows_and_writes_nothing(path):
    table = FileEmbedding(path, ROWS, DIM)
    ids = torch.tensor([4, 9, 4])
    with torch.inference_mode():
        assert torch.equal(table(ids), table.initial_rows(ids))
    assert not table.requires_grad_(False)(ids).requires_grad
    assert not table.weight.any()
    trained = table.requires_grad_(True)(ids)
    assert torch.equal(trained, table.initial_rows(ids))
    assert table.weight.any(1).nonzero()[:, 0].tolist() == [4, 9]


def test_a_row_that_was_written_keeps_its_weights(path):
    table = FileEmbedding(path, ROWS, 3)
    with torch.no_grad():
        table.weight[7] = torch.tensor([0.0, 0.0, 2.0])
    assert table(torch.tensor([7])).tolist() == [[0.0, 0.0, 2.0]]


def test_two_forward_passes_share_one_backward_pass(path):
    table = FileEmbedding(path, ROWS, DIM)
    (table(torch.tensor([1])).square() + table(torch.tensor([2])).square()).sum().backward()
    gradient = table.weight.grad.to_dense()
    assert torch.equal(gradient, 2 * table.weight)


def test_gradient_checkpointing_repeats_the_first_forward_pass(path):
    table = FileEmbedding(path, ROWS, DIM)
    rows = checkpoint(lambda ids: table(ids).square(), torch.tensor([1, 2]), use_reentrant=False)
    rows.sum().backward()
    assert torch.equal(table.weight.grad.to_dense(), 2 * table.weight)


def test_a_bound_of_zero_leaves_zeros(path):
    table = FileEmbedding(path, ROWS, DIM, init_bound=0.0)
    assert not table(torch.arange(ROWS)).any()


def test_the_padding_row_stays_zero(path):
    table = FileEmbedding(path, ROWS, DIM, padding_idx=2)
    assert not table(torch.arange(ROWS))[2].any()
    with torch.no_grad():
        assert not table(torch.tensor([2])).any()


# -- the file -------------------------------------------------------------------------------------


def test_a_new_file_takes_no_space(path):
    FileEmbedding(path, 1_000_000, 100)
    assert path.stat().st_size == 400_000_000
    assert path.stat().st_blocks * 512 < 1_000_000
    assert sorted(it.name for it in path.parent.iterdir()) == [path.name, path.name + ".id"]


def test_reserve_takes_the_space_also_of_a_file_that_exists(path):
    for reserve in (False, True):
        FileEmbedding(path, 1_000, 256, reserve=reserve)
        assert (path.stat().st_blocks * 512 >= 1_024_000) is reserve


def test_a_file_of_another_size_is_refused(path):
    FileEmbedding(path, ROWS, DIM)
    with pytest.raises(ValueError, match=rf"must have {ROWS * DIM * 2} bytes .* got 1200; constr"):
        FileEmbedding(path, ROWS, DIM, torch.bfloat16)
    assert path.stat().st_size == 1200


def test_a_read_only_file_is_refused(path):
    FileEmbedding(path, ROWS, DIM)
    path.chmod(0o444)
    with pytest.raises(PermissionError, match=r"must be writable, .* change its permissions"):
        FileEmbedding(path, ROWS, DIM)


@pytest.mark.parametrize("is_found_in_advance", [True, False])
def test_a_full_disk_is_an_error_and_leaves_no_file(path, monkeypatch, is_found_in_advance):
    def fail(*_):
        assert not is_found_in_advance
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    rows = 2**35 if is_found_in_advance else ROWS
    with pytest.raises(OSError, match=f"space for the {64 * rows * 4} bytes of the table; free"):
        FileEmbedding(path, rows, 64, reserve=True)
    assert list(path.parent.iterdir()) == []


def test_a_file_whose_creation_was_interrupted_is_named(path):
    partial = path.with_name("table.bin.partial")
    partial.touch()
    with pytest.raises(FileExistsError, match=r"interrupted; wait, or delete this file: .*partial"):
        FileEmbedding(path, ROWS, DIM)
    assert not path.exists()


def test_a_missing_directory_is_named(path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        FileEmbedding(path / "nowhere" / "table.bin", ROWS, DIM)


# -- state and copies -----------------------------------------------------------------------------


def test_a_state_dict_has_no_weights(path):
    model = nn.Sequential(FileEmbedding(path, ROWS, DIM), nn.Linear(DIM, 1, bias=False))
    state = model.state_dict()
    assert list(state) == ["0._extra_state", "1.weight"]
    sizes = {"rows": ROWS, "dim": DIM, "dtype": "float32", "init_bound": 0.05, "seed": 0}
    assert state["0._extra_state"] == {"path": str(path), "id": model[0].id, **sizes}
    model.load_state_dict(state)


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("rows", 7, "construct it with the checkpoint's rows"),
        ("dtype", "bfloat16", "construct it with the checkpoint's dtype"),
        ("seed", 1, "construct it with the checkpoint's seed"),
        ("path", "/elsewhere", "if you moved the file"),
    ],
)
def test_the_state_of_another_table_is_refused(path, key, value, remedy):
    table = FileEmbedding(path, ROWS, DIM)
    state = table.state_dict()
    state["_extra_state"][key] = value
    with pytest.raises(ValueError, match=f"^{key} of .* got {value!r}; .*{remedy}"):
        table.load_state_dict(state)


def test_the_state_of_an_embedding_in_memory_is_refused(path):
    table = FileEmbedding(path, ROWS, DIM)
    with pytest.raises(RuntimeError, match=r'(?s)Missing .*"_extra_state".*Unexpected .*"weight"'):
        table.load_state_dict(nn.Embedding(ROWS, DIM).state_dict())


def test_deep_copies_of_module_and_optimizer_are_refused(path):
    table = FileEmbedding(path, ROWS, DIM)
    for thing in (table, nn.Sequential(table), so.Adam(table.parameters())):
        with pytest.raises(TypeError, match=r"are not copied: they are 1200 bytes in .* copy the "):
            copy.deepcopy(thing)
    with pytest.raises(TypeError, match="are not copied"):
        pickle.dumps(table.weight)


def test_a_pickled_table_opens_the_same_file(path):
    table = FileEmbedding(path, ROWS, DIM, padding_idx=1).eval().requires_grad_(False)
    pickled = pickle.dumps(nn.Sequential(table))
    (opened,) = pickle.loads(pickled)
    table.weight[3] = 5.0
    assert torch.equal(opened(torch.tensor([3])), torch.full((1, DIM), 5.0))
    assert (opened.padding_idx, opened.training, opened.weight.requires_grad) == (1, False, False)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"table\.bin"):
        pickle.loads(pickled)


def test_the_mapping_goes_with_the_module(path):
    table = FileEmbedding(path, ROWS, DIM)
    mapping = weakref.ref(table._mapping)
    del table
    assert mapping() is None


def test_moving_the_model_leaves_the_table_or_is_refused(path):
    table = FileEmbedding(path, ROWS, DIM)
    weight = table.weight
    assert nn.Sequential(table).float().to("cpu").share_memory()[0].weight is weight
    for move in (nn.Module.half, lambda it: it.to("meta")):
        with pytest.raises(ValueError, match=r"must stay torch.float32 on the CPU.* one by one"):
            move(nn.Sequential(table))
    assert table.weight is weight


def test_a_default_device_does_not_move_the_table(path):
    with torch.device("meta"):
        table = FileEmbedding(path, ROWS, DIM)
        assert table(torch.tensor([4], device="cpu")).device.type == "cpu"


# -- tools and refusals ---------------------------------------------------------------------------


def test_the_tools_know_it_as_a_table(path):
    model = nn.Sequential(FileEmbedding(path, 2_000, 16), nn.Linear(16, 4))
    assert list(so.find_tables(model)) == ["0.weight"]
    assert list(so.plan(model, "1KB").memory) == ["0.weight"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rows": 0}, ValueError, "rows must be >= 1, got 0"),
        ({"dim": 2.0}, TypeError, "dim must be an int, got 2.0"),
        ({"dtype": torch.int8}, ValueError, "dtype must be one of .* got torch.int8"),
        ({"padding_idx": 50}, ValueError, r"padding_idx must be in \[-50, 49\], got 50"),
        ({"init_bound": -1.0}, ValueError, "init_bound must be finite and >= 0, got -1.0"),
        ({"reserve": 1}, TypeError, "reserve must be True or False, got 1"),
        (
            {"rows": 2**40, "dim": 2**30},
            ValueError,
            r"fewer than 2\^63 bytes, got 47223",
        ),
        ({"copied": "yes"}, TypeError, "copied must be True or False, got 'yes'"),
        ({"path": b"x"}, TypeError, "path must be a str or a Path, got bytes"),
    ],
)
def test_a_wrong_argument_is_refused_and_creates_no_file(path, arguments, error, message):
    with pytest.raises(error, match=message):
        FileEmbedding(**{"path": path, "rows": ROWS, "dim": DIM, **arguments})
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.tensor([1, 50]), ValueError, r"ids must lie in \[0, 49\], got values from 1 to 50"),
        (torch.tensor([-1]), ValueError, r"got values from -1 to -1; map them"),
        (torch.tensor([1.0]), TypeError, r"ids must be int64 or int32, got torch.float32"),
        (torch.empty(2, dtype=torch.int64, device="meta"), ValueError, r"on the CPU.* got meta"),
        ([1], TypeError, r"ids must be a tensor"),
    ],
)
def test_wrong_ids_are_refused(path, ids, error, message):
    with pytest.raises(error, match=message):
        FileEmbedding(path, ROWS, DIM)(ids)
