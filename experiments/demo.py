"""The demo: a language model over Python's own sources, with exact Adam and with the default.

experiments demo
"""

import shutil
from pathlib import Path
from typing import Any

from rich.console import Console

from .locks import locked
from .recipes import Contestant, load_recipe
from .report import comparison_table, write_report
from .reproduction import Reproduction, reproduce, run_folder, train_launcher


def run_demo(
    *,
    steps: int | None = None,
    seed: int = 0,
    threads: int = 1,
    sources: Path | None = None,
    resume: bool = False,
    output: Path = Path("build/demo"),
    command: str = "experiments demo",
    console: Console,
) -> Reproduction:
    """The findings about both methods, after printing them side by side and writing the page.

    Runs of an earlier demo in `output` are removed and trained again, unless `resume`.
    """
    recipe = load_recipe("demo")
    setting = recipe.sizes["small"]
    with console.status("reading Python's own source files"):
        corpus = setting.data.read(sources)
    console.print(
        f"{corpus.train.numel():,} words of Python source, {len(corpus.vocabulary):,} distinct; "
        f"{steps or setting.train.steps:,} steps a method"
    )
    with locked(output):
        launch = train_launcher(
            "demo",
            setting,
            "small",
            steps=steps,
            data=sources,
            threads=threads,
            output=output,
            console=console,
        )

        def launch_again(contestant: Contestant, *rates_and_seed: Any) -> dict[str, Any]:
            folder = run_folder(output, contestant, *rates_and_seed)
            with locked(folder):
                shutil.rmtree(folder)
            return launch(contestant, *rates_and_seed)

        reproduction = reproduce(
            recipe,
            "small",
            seeds=[seed],
            command=command,
            launch=launch if resume else launch_again,
            output=output,
            console=console,
        )
        console.print(comparison_table(reproduction, console))
        console.print(f"report: {write_report(reproduction, output)}", markup=False)
    return reproduction
