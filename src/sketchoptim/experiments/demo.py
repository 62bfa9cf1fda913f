"""The demo: a language model over Python's own sources, by exact Adam and by the default.

sketchoptim demo
"""

import shutil
from pathlib import Path
from typing import Any

from rich.console import Console

from .recipes import Contestant, load_recipe
from .report import comparison_table, write_report
from .reproduce import Reproduction, launched_train, reproduce, run_folder


def run_demo(
    *,
    steps: int | None = None,
    seed: int = 0,
    threads: int = 1,
    sources: Path | None = None,
    output: Path = Path("build/demo"),
    command: str = "sketchoptim demo",
    console: Console,
) -> Reproduction:
    """Both methods' findings, after printing them side by side and writing a page about them."""
    recipe = load_recipe("demo")
    setting = recipe.sizes["small"]
    with console.status("reading Python's own source files"):
        corpus = setting.data.read(sources)
    console.print(
        f"{corpus.train.numel():,} words of Python source, {len(corpus.vocabulary):,} distinct; "
        f"{steps or setting.train.steps:,} steps a method"
    )
    output.mkdir(parents=True, exist_ok=True)
    launch = launched_train(
        "demo",
        setting,
        "small",
        steps=steps,
        data=sources,
        threads=threads,
        output=output,
        console=console,
    )

    def launched_anew(contestant: Contestant, *rates_and_seed: Any) -> dict[str, Any]:
        # a demo is to be seen, not remembered
        shutil.rmtree(run_folder(output, contestant, *rates_and_seed), ignore_errors=True)
        return launch(contestant, *rates_and_seed)

    made = reproduce(
        recipe,
        "small",
        seeds=[seed],
        command=command,
        launch=launched_anew,
        output=output,
        console=console,
    )
    console.print(comparison_table(made, console))
    console.print(f"report: {write_report(made, output)}")
    return made
