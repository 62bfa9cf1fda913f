"""The report as one HTML page, which needs no other file and no network."""

import base64
import html
import json
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path

from matplotlib.figure import Figure

from ..reproduction import Reproduction
from .plots import as_svg, figures, save_pngs
from .table import comparison


def write_report(reproduction: Reproduction, folder: Path) -> Path:
    """The path of the page, after writing it, and its pictures as PNG files next to it."""
    pictures = figures(reproduction)
    save_pngs(pictures, folder)
    path = folder / "report.html"
    path.write_text(_page(reproduction, picture_tags(pictures)), encoding="utf-8")
    return path


def picture_tags(pictures: dict[str, tuple[str, Figure]]) -> str:
    """The pictures as HTML that holds them."""
    return "".join(
        f"<figure><figcaption>{html.escape(caption)}</figcaption>"
        f'<img alt="{html.escape(caption)}" '
        f'src="data:image/svg+xml;base64,{base64.b64encode(as_svg(figure)).decode()}"></figure>'
        for caption, figure in pictures.values()
    )


def html_document(title: str, main: str) -> str:
    """A page of its own: `title` is plain text, `main` is HTML."""
    style = (files(__package__) / "style.css").read_text(encoding="utf-8")
    title = html.escape(title)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}: sketchoptim</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{main}
</main>
</body>
</html>
"""


def _page(reproduction: Reproduction, images: str) -> str:
    setting = reproduction.recipe.sizes[reproduction.size]
    main = f"""<p>{html.escape(setting.about)}.</p>
<p>Every method starts from the same weights, sees the same data in the same order and takes the
same steps. {_tuning(reproduction)} {_seeds(reproduction)} {_clock(reproduction)}</p>
<h2>Comparison</h2>
<div class="scroll">{_table(reproduction)}</div>
<h2>Pictures</h2>
<div class="figures">{images}</div>
<h2>How to reproduce it</h2>
<pre>{html.escape(reproduction.command)}</pre>
<p>{html.escape(reproduction.date)}. {html.escape(_origin(reproduction))}</p>
<details><summary>Settings</summary><pre>{html.escape(_settings(reproduction))}</pre></details>
<details><summary>Sweeps</summary><pre>{html.escape(_sweeps(reproduction))}</pre></details>"""
    return html_document(reproduction.recipe.title, main)


def _table(reproduction: Reproduction) -> str:
    columns, rows = comparison(reproduction)
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(
        f"<tr{_emphasis(finding.name)}>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        + "</tr>"
        for finding, row in zip(reproduction.findings, rows, strict=True)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _emphasis(name: str) -> str:
    return ' class="ours"' if name == "lean" else ""


def _seeds(reproduction: Reproduction) -> str:
    steps, seeds = (
        reproduction.findings[0].results[0]["steps"],
        len(reproduction.findings[0].results),
    )
    if seeds == 1:
        return f"These are results of {steps:,} steps with one seed."
    return f"Means and standard deviations are over {seeds} seeds of {steps:,} steps."


def _tuning(reproduction: Reproduction) -> str:
    if all(len(finding.valid_by_rate) == 1 for finding in reproduction.findings):
        return "Learning rates are those of the recipe."
    return (
        "Each method's learning rates are the best of its own sweep on validation data with the "
        "first seed; test data is used for the table alone."
    )


def _clock(reproduction: Reproduction) -> str:
    if reproduction.clock == "seconds":
        return "Times are wall-clock."
    return (
        "The machine was busy with other work, so times along a training are processor time; "
        "milliseconds a step are medians of wall-clock."
    )


def _origin(reproduction: Reproduction) -> str:
    result = reproduction.findings[0].results[0]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    machine = result["machine"]
    return f"{versions}. {machine['processor']}, {machine['cores']} cores, {machine['system']}."


def _settings(reproduction: Reproduction) -> str:
    setting = reproduction.recipe.sizes[reproduction.size]
    shown = {
        "data": asdict(setting.data),
        "model": asdict(setting.model),
        "train": reproduction.findings[0].results[0]["about"]["train"],
        "memory": {
            finding.name: finding.results[0]["about"]["train"]["method"]["memory"]
            for finding in reproduction.findings
        },
    }
    return json.dumps(shown, indent=2)


def _sweeps(reproduction: Reproduction) -> str:
    lines = []
    for finding in reproduction.findings:
        lines.append(finding.title)
        for table_lr, body_lr, valid in finding.valid_by_rate:
            missing = "diverged" if reproduction.is_measured else "not measured"
            found = missing if valid is None else f"{valid:.1f}"
            lines.append(f"  table lr {table_lr:g}, body lr {body_lr:g}: {found}")
    return "\n".join(lines)
