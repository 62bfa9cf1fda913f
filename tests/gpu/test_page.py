"""The page that a machine with a GPU prints, from the CPU of this one."""

import pytest

from experiments.bench import gpu
from experiments.studies.gpu_model import Case, main, models
from sketchoptim.storage import PRESETS


def test_the_page_compares_every_preset_with_the_reference_and_times_the_others():
    lines = list(gpu.run_on_device("cpu", gpu.QUICK))
    checked = [line for line in lines if line.endswith(("| yes |", "| NO |"))]
    assert len(checked) == len(PRESETS) * len(gpu.DTYPES)
    assert all(line.endswith("| yes |") for line in checked)
    for line in checked:
        assert float(line.split("|")[3]) < 4
    for method in ("lean", "exact", "SparseAdam", "fused Adam, dense"):
        assert sum(line.startswith(f"| {method} | ") for line in lines[-10:]) == 1


@pytest.mark.skipif(gpu.torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="device must be one that torch finds, got cuda"):
        list(gpu.run_on_device("cuda", gpu.QUICK))


def test_by_the_model_lean_moves_a_seventh_of_the_bytes_of_sparse_adam():
    found = models(Case())
    assert found["lean"].moved_bytes == pytest.approx(found["SparseAdam"].moved_bytes / 7, rel=0.01)
    assert found["lean"].state_bytes == 4 * (793_471 // 8)


def test_the_model_prints_a_line_for_each_method(capsys):
    main(["--bandwidth", "3.35"])
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(models(Case()))
