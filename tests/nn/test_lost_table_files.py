"""A lost, swapped or doubly trained table file is refused, and half a row does not count."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sketchoptim.nn import FileEmbedding, _table_file

ROWS, DIM = 50, 6


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "table.bin"


def beside(path: Path) -> Path:
    return path.with_name(path.name + ".id")


def trained(path: Path) -> dict[str, object]:
    """The state of a table all of whose rows are written; nothing keeps its file open."""
    table = FileEmbedding(path, ROWS, DIM)
    table(torch.arange(ROWS)).sum().backward()
    table.flush()
    return table.state_dict()


# -- identity -------------------------------------------------------------------------------------


def test_a_lost_file_is_refused_at_every_start(path):
    trained(path)
    path.unlink()
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match=r"table of .*\.id is missing; restore it"):
            FileEmbedding(path, ROWS, DIM)
    assert not path.exists()


def test_a_new_file_never_passes_for_the_old_one(path):
    state = trained(path)
    path.unlink()
    beside(path).unlink()
    for _ in range(2):  # the second start finds a file
        table = FileEmbedding(path, ROWS, DIM)
        table.state_dict()
        with pytest.raises(ValueError, match=r"^id of the state of .* is of another file: restore"):
            table.load_state_dict(state)
        del table


def test_a_swapped_file_of_the_same_size_is_refused(path):
    state, other = trained(path), path.with_name("other.bin")
    trained(other)
    os.replace(other, path)
    with pytest.raises(ValueError, match=r"is not the file that table.bin.id was .* copied=True"):
        FileEmbedding(path, ROWS, DIM)
    os.replace(beside(other), beside(path))
    with pytest.raises(ValueError, match=r"^id of the state"):
        FileEmbedding(path, ROWS, DIM).load_state_dict(state)


def test_a_file_restored_from_its_copies_is_accepted_on_request(path):
    state = trained(path)
    content = path.read_bytes()
    kept = path.with_name("kept")
    path.rename(kept)  # so that the restored file has another inode
    path.write_bytes(content)
    FileEmbedding(path, ROWS, DIM, copied=True)
    table = FileEmbedding(path, ROWS, DIM)
    table.load_state_dict(state)
    assert path.read_bytes() == content


def test_the_same_bytes_as_another_shape_are_refused(path):
    trained(path)
    with pytest.raises(ValueError, match=r"rows of .* must be 50 as in table.bin.id, got 60; con"):
        FileEmbedding(path, 60, 5)


def test_weights_without_an_identity_get_one_that_stays(path):
    weights = torch.arange(ROWS * DIM, dtype=torch.float32)
    path.write_bytes(weights.numpy().tobytes())
    table = FileEmbedding(path, ROWS, DIM)
    assert FileEmbedding(path, ROWS, DIM).id == table.id
    assert torch.equal(table.weight.flatten(), weights)


def test_a_damaged_identity_is_named(path):
    trained(path)
    for content in ("{", json.dumps({"id": "x"})):
        beside(path).write_text(content)
        with pytest.raises((TypeError, ValueError), match=r"content of .*table.bin.id must"):
            FileEmbedding(path, ROWS, DIM)


def test_a_pickle_does_not_open_another_table(path):
    pickled = pickle.dumps(FileEmbedding(path, ROWS, DIM))
    path.unlink()
    beside(path).unlink()
    FileEmbedding(path, ROWS, DIM)
    with pytest.raises(ValueError, match="pickle of a FileEmbedding is of the table"):
        pickle.loads(pickled)


def test_a_dangling_symbolic_link_is_not_replaced(path):
    path.symlink_to(path.with_name("unmounted.bin"))
    with pytest.raises(FileNotFoundError, match=r"symbolic link to a file that is missing; mount"):
        FileEmbedding(path, ROWS, DIM)
    assert path.is_symlink()


def test_a_link_and_its_target_are_one_table(path):
    target = path.with_name("target.bin")
    table = FileEmbedding(target, ROWS, DIM)
    path.symlink_to(target)
    assert FileEmbedding(path, ROWS, DIM).id == table.id
    assert not beside(path).exists()


# -- one writer -----------------------------------------------------------------------------------

_TRAIN = f"""
import sys, torch, sketchoptim as so
table = so.nn.FileEmbedding(sys.argv[1], {ROWS}, {DIM})
with torch.no_grad():
    table(torch.arange({ROWS}))
try:
    table(torch.tensor([3]))
except BlockingIOError as error:
    print(error)
"""


def second_process(path: Path) -> str:
    command = [sys.executable, "-c", _TRAIN, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_second_writer_is_refused_until_the_first_is_gone(path):
    table = FileEmbedding(path, ROWS, DIM)
    twin = FileEmbedding(path, ROWS, DIM)
    twin(torch.tensor([1]))
    table(torch.tensor([2]))  # the same process may, as before
    del twin
    assert "is being trained by another process" in second_process(path)
    assert not table.weight[3].any()
    del table
    assert second_process(path) == ""


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_process_is_a_second_writer(path):
    table = FileEmbedding(path, ROWS, DIM)
    table(torch.tensor([1]))
    child = os.fork()
    if child == 0:  # no test may go on in here
        try:
            table._become_writer()
        except BlockingIOError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_file_system_without_locks_gives_a_warning(path, monkeypatch):
    import fcntl

    def fail(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    table = FileEmbedding(path, ROWS, DIM)
    with pytest.warns(UserWarning, match=r"cannot be locked \(No locks available\); make sure"):
        table(torch.tensor([1]))


def test_the_lock_goes_with_the_last_table(path):
    table = FileEmbedding(path, ROWS, DIM)
    table(torch.tensor([1]))
    assert len(_table_file._HELD) == 1
    del table
    assert len(_table_file._HELD) == 0


# -- half a row -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dim", "columns"),
    [
        (DIM, slice(0, 4)),  # killed in the middle
        (DIM, slice(1, None)),  # killed before the first column, which is written last
        (DIM, slice(0, 1)),
        (600, slice(0, 128)),  # the disk stopped between sectors
        (600, slice(256, None)),
        (600, [*range(130), *range(500, 600)]),
    ],
)
def test_a_row_that_was_half_written_is_written_again(path, dim, columns):
    table = FileEmbedding(path, ROWS, dim)
    initial = table.initial_rows(torch.tensor([7]))[0]
    table.weight.data[7, columns] = initial[columns]
    assert torch.equal(table(torch.tensor([7]))[0], initial)
    assert torch.equal(table.weight[7], initial)


def test_a_trained_row_with_zeros_keeps_its_weights(path):
    table = FileEmbedding(path, ROWS, DIM)
    row = table.initial_rows(torch.tensor([7]))[0]
    row[0], row[3] = 0.0, 2.0
    table.weight.data[7] = row
    assert torch.equal(table(torch.tensor([7]))[0], row)
