"""The model of bytes and operations."""

import pytest

from experiments.studies.gpu_model import Case, main, models


def test_by_the_model_lean_moves_a_seventh_of_the_bytes_of_sparse_adam():
    found = models(Case())
    assert found["lean"].moved_bytes == pytest.approx(found["SparseAdam"].moved_bytes / 7, rel=0.01)
    assert found["lean"].state_bytes == 4 * (793_471 // 8)


def test_the_model_prints_a_line_for_each_method(capsys):
    main(["--bandwidth", "3.35"])
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(models(Case()))
