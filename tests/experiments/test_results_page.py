import json
import re
from pathlib import Path

import pytest

from experiments.studies import results_figures
from experiments.studies.results_page import main

ROOT = Path(__file__).parents[2]


def write_run(folder, method, rate, seed, valid, test):
    run = folder / "runs" / f"{method}-{rate}-{seed}"
    run.mkdir(parents=True)
    train = {"table_lr": rate, "seed": seed, "method": {"name": method, "title": method.upper()}}
    train |= {"batch": 4, "length": 5}
    costs = {"cpu_seconds": 1800.0, "table_state_bytes": 1000, "peak_memory_bytes": 2_000_000}
    points = [
        {"step": 10, "cpu_seconds": 900.0, "quality": test + 1},
        {"step": 20, "cpu_seconds": 1800.0, "quality": test},
    ]
    result = {"about": {"train": train}, "valid": valid, "test": test, "evaluations": points}
    diverged = {"diverged": "at step 7"} if valid is None else {}
    (run / "result.json").write_text(json.dumps({**result, **costs, **diverged}))


@pytest.fixture
def folder(tmp_path):
    write_run(tmp_path, "lean", 0.01, 0, 120.0, 119.0)
    write_run(tmp_path, "lean", 0.03, 0, 110.0, 111.0)
    write_run(tmp_path, "lean", 0.03, 1, 130.0, 113.0)
    write_run(tmp_path, "exact", 0.01, 0, None, 140.0)
    return tmp_path


def test_a_row_has_all_seeds_at_the_rate_that_was_best_on_validation_data(folder, capsys):
    main([f"wikitext2-adam={folder}"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("| EXACT | 1 | 140.0 | diverged at 0.01 |")]
    assert [line for line in lines if "| LEAN | 2 | 112.0 ± 1.4 | 120.00 at 0.01" in line]
    assert lines[-1] == "4 runs, 2.0 CPU hours"


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no finished runs in .*; run experiments"):
        main([f"wikitext2-adam={tmp_path}"])


def test_kept_runs_make_the_same_table_and_are_kept_once(folder, tmp_path, capsys):
    kept = tmp_path / "kept"
    keep = [f"wikitext2-adam={folder}", "--keep", str(kept)]
    main(keep)
    write_run(folder, "lean", 0.03, 2, 120.0, 115.0)
    capsys.readouterr()
    main(keep)
    from_folder = capsys.readouterr().out
    (file,) = kept.iterdir()
    main([f"wikitext2-adam={file}"])
    assert capsys.readouterr().out == from_folder
    assert "| LEAN | 3 | 113.0 ± 2.0 |" in from_folder
    assert len(file.read_text().splitlines()) == 5


def test_the_figures_of_the_page_are_drawn_from_the_kept_runs(tmp_path):
    results_figures.main(["--output", str(tmp_path)])
    page = (ROOT / "docs" / "results.md").read_text("utf-8")
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == set(re.findall(r"figures/(\w+\.png)", page)) - {"memory.png"}


def test_a_row_without_kept_runs_replaces_the_kept_seeds_of_its_method():
    found = results_figures.points("transformer_converged-small", "test")
    (adamw,) = (it for it in found if it.method == "exact")
    assert (adamw.mean, adamw.deviation) == (136.5, 4.6)


def test_the_times_of_the_figure_are_those_of_the_page():
    page = (ROOT / "docs" / "results.md").read_text("utf-8").replace("`", "").replace("**", "")
    for row in results_figures.step_times():
        assert f"| {row['what']} | {row['baseline']} | {row['avx512']} | {row['avx2']} |" in page
