import html
import io
import math
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from rich.console import Console
from tiny_recipe import write_text

from experiments.checkpoints import read_json
from experiments.recipes import parse_recipe
from experiments.report import comparison_table, write_report
from experiments.report.plots import figures
from experiments.report.table import comparison, mean_sd
from experiments.reproduction import reproduce
from experiments.runs import run_in, run_settings

RECIPE = """
title = "Numbers & <b>signs</b>"
reference = "none"
[data]
kind = "text"
path = "text.txt"
held_out = 0.1
[small]
about = "tiny <i>about</i>"
test_words = 200
seeds = [3, 4]
[small.model]
dim = 8
hidden = 8
samples = 5
[small.train]
table_lr = 0.05
steps = 30
batch = 4
length = 5
evaluate_every = 10
evaluate_words = 100
[small.sweep]
table_lr = [0.01, 0.1]
body_lr = [0.003, 0.03]
[methods.exact]
title = "Adam"
memory = "exact"
paper = { perplexity = 105.14 }
[methods.lean]
title = "[red]lean[/], $x_<u>1</u>"
small = { table_lr = [0.1] }
"""


class Launches:
    """Runs of the recipe in this process, and a list of what was launched."""

    def __init__(self, recipe, folder):
        self.setting, self.folder, self.list = recipe.sizes["small"], folder, []

    def __call__(self, contestant, table_lr, body_lr, seed):
        name = contestant.method.name
        self.list.append((name, table_lr, body_lr, seed))
        settings = run_settings(
            self.setting, contestant.method, table_lr=table_lr, body_lr=body_lr, seed=seed
        )
        folder = self.folder / f"{len(self.list)}"
        data = self.folder / "text.txt"
        return run_in(folder, self.setting, settings, data=data, console=Console(quiet=True))


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reproduced")
    write_text(folder / "text.txt")
    return folder


@pytest.fixture(scope="module")
def launches(output):
    return Launches(parse_recipe("tiny", RECIPE), output)


@pytest.fixture(scope="module")
def reproduction(launches, output):
    return reproduce(
        parse_recipe("tiny", RECIPE),
        "small",
        command="experiments reproduce tiny --small",
        launch=launches,
        output=output,
        console=Console(quiet=True),
    )


@pytest.fixture(scope="module")
def page(reproduction, output):
    return write_report(reproduction, output)


def test_rates_are_swept_with_the_first_seed_and_the_best_get_the_others(reproduction, launches):
    swept = [launch for launch in launches.list if launch[3] == 3]
    assert {launch[1] for launch in swept if launch[0] == "exact"} >= {0.01, 0.1}
    assert {launch[1] for launch in swept if launch[0] == "lean"} == {0.1}
    for finding in reproduction.findings:
        valid = {(table, body): found for table, body, found in finding.valid_by_rate}
        assert valid[finding.table_lr, finding.body_lr] == min(valid.values())
        assert [result["about"]["train"]["seed"] for result in finding.results] == [3, 4]
        assert (finding.name, finding.table_lr, finding.body_lr, 4) in launches.list


def test_all_findings_are_in_the_json_file(reproduction, output):
    plain = read_json(output / "results.json")
    assert plain["command"] == "experiments reproduce tiny --small"
    exact, lean = plain["findings"]
    assert exact["paper"] == {"perplexity": 105.14}
    assert lean["results"][1]["test"] == reproduction.findings[1].results[1]["test"]


def test_the_table_has_the_papers_numbers_beside_ours(reproduction):
    columns, rows = comparison(reproduction)
    exact, lean = (dict(zip(columns, row, strict=True)) for row in rows)
    assert exact["paper: perplexity"] == "105.14"
    assert lean["paper: perplexity"] == ""
    assert re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d", exact["test perplexity"])
    assert exact["of Adam's"] == "100.000%"
    assert float(lean["of Adam's"].rstrip("%")) < 20
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(comparison_table(reproduction, console))
    printed = console.export_text()
    assert "Numbers & <b>signs</b>" in printed
    assert "[red]lean[/], $x_<u>1</u>" in printed


def test_a_narrow_terminal_gets_fewer_columns_but_whole_numbers(reproduction):
    console = Console(file=io.StringIO(), width=60)
    console.print(comparison_table(reproduction, console))
    printed = console.file.getvalue()
    assert max(map(len, printed.splitlines())) <= 60
    columns, rows = comparison(reproduction)
    assert "…" not in printed
    assert "the page has more columns" in printed
    for title in (f"test {reproduction.recipe.metric}", "state of tables"):
        for row in rows:
            assert row[columns.index(title)] in printed


def test_a_method_that_diverged_is_reported_as_such(reproduction, tmp_path):
    exact, lean = reproduction.findings
    broken = {**lean.results[0], "valid": None, "test": None, "evaluations": []}
    del broken["peak_memory_bytes"]
    findings = [exact, replace(lean, results=[broken, broken])]
    columns, rows = comparison(replace(reproduction, findings=findings))
    row = dict(zip(columns, rows[1], strict=True))
    assert row["test perplexity"] == "diverged"
    assert row["s to Adam's best"] == "never"
    assert row["peak memory"] == ""
    assert write_report(replace(reproduction, findings=findings), tmp_path).exists()


@pytest.mark.parametrize("points", [1, 3])
@pytest.mark.parametrize("state_bytes", [0, 1000])
def test_one_method_alone_is_drawn(reproduction, tmp_path, points, state_bytes):
    lean = reproduction.findings[1]
    results = [
        {
            **result,
            "table_state_bytes": state_bytes,
            "losses": result["losses"][:points],
            "evaluations": result["evaluations"][:points],
        }
        for result in lean.results[:1]
    ]
    alone = replace(reproduction, findings=[replace(lean, results=results)])
    assert write_report(alone, tmp_path).exists()
    for name, points_shown in (("steps", points), ("loss", points)):
        axes = figures(alone)[name][1].axes[0]
        low, high = axes.get_xlim()
        (line,) = axes.lines
        assert len(line.get_xdata()) == points_shown
        assert all(low <= x <= high for x in line.get_xdata())


def test_the_table_has_further_measures_and_no_column_for_validation_that_was_trained_on(
    reproduction,
):
    findings = [
        replace(
            finding,
            results=[{**it, "valid": None, "test_recall": 0.18244} for it in finding.results],
        )
        for finding in reproduction.findings
    ]
    columns, rows = comparison(replace(reproduction, findings=findings))
    assert "valid perplexity" not in columns
    assert {row[columns.index("test recall")] for row in rows} == {"0.1824 ± 0.0000"}


def test_a_diverged_seed_is_not_averaged_away():
    assert mean_sd([100.0, math.inf]) == "diverged"
    assert mean_sd([100.0, 102.0]) == "101.0 ± 1.4"
    assert mean_sd([1e19, 3e19]) == "2.0e+19 ± 1.4e+19"
    assert mean_sd([100.0]) == "100.0"
    assert mean_sd([17.5]) == "17.50"


def test_the_page_needs_no_other_file(page):
    text = page.read_text(encoding="utf-8")
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', text)
    assert sources
    assert all(source.startswith("data:") for source in sources)
    assert "http" not in text


def test_the_text_of_a_recipe_is_no_markup_on_the_page(page):
    text = page.read_text(encoding="utf-8")
    assert not re.search("<[biu]>", text)
    for shown in ("<b>signs</b>", "<i>about</i>", "$x_<u>1</u>"):
        assert html.escape(shown) in text


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_the_page_without_scrolling_sideways(page, tmp_path, width):
    text = page.read_text(encoding="utf-8").replace('"', "&quot;")
    frame = tmp_path / "frame.html"
    frame.write_text(
        f"""<!doctype html><iframe style="border:0;width:{width}px;height:4000px" srcdoc="{text}">
        </iframe><script>onload = () => {{
            const page = document.querySelector("iframe").contentDocument
            const images = [...page.images].filter(image => image.complete && image.naturalWidth)
            const scrolled = page.documentElement.scrollWidth
            const rows = page.querySelectorAll("tr").length
            document.title = `${{scrolled}} ${{images.length}} ${{rows}}`
        }}</script>""",
        encoding="utf-8",
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000"]
    shown = subprocess.run(
        ["chromium", *options, f"--user-data-dir={tmp_path}/profile", "--dump-dom", frame.as_uri()],
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = re.search(r"<title>(\d+) (\d+) (\d+)</title>", shown.stdout)
    assert found, shown.stderr
    assert [int(number) for number in found.groups()] == [width, 6, 3]
