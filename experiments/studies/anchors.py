"""Two published results that Adam must reach here before lean is compared with it.

    python -m experiments.studies.anchors run --anchors recbole --methods adam,lean --seeds 0,1,2
    python -m experiments.studies.anchors table

- `recbole`: RecBole's BPR on its ml-100k, with all of its defaults (64 columns, batches of 2,048,
  Adam at 0.001, until MRR@10 on validation data has not improved for 10 epochs). Its quick start
  documents NDCG@10 on validation data and on test data.
- `treebank`: the Penn Treebank in Mikolov's split, from the package `treebank`. Two LSTM layers of
  200 units and tables of 10,000 x 200, as the small model of Zaremba, Sutskever and Vinyals
  (arXiv:1409.2329), whose test perplexity is 114.5 without dropout and with SGD. Ours differs in
  the optimizer, in dropout, and in fewer passes.

A run that is in the file is not repeated. RecBole and `treebank` are not among the requirements of
the experiments.
"""

import importlib
import itertools
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import nn

from experiments.corpora import Corpus, Vocabulary
from experiments.full_softmax import FullSoftmax
from experiments.models import LanguageModel, ModelSettings
from experiments.tasks import perplexity
from sketchoptim._formatting import readable_bytes

from .defaults.methods import Rates, build, scale_rates_, state_bytes
from .defaults.packages import train_bpr
from .defaults.runs import commit

MEASURED = Path(__file__).parents[1] / "measured" / "anchors.jsonl"


class Quality(NamedTuple):
    """On validation and on test data, and what the state of the tables takes."""

    valid: float
    test: float
    state_bytes: int


class Anchor(NamedTuple):
    """A published result.

    Args:
        run: Trains by a method, the rate of the tables and a seed.
        metric: The name of the result.
        published: Of it, on test data.
        rate: Of the tables: RecBole's own; that of the LSTM was not swept.
    """

    run: Callable[[str, float, int], Quality]
    metric: str
    published: float
    rate: float


def recbole(method: str, rate: float, seed: int) -> Quality:
    """NDCG@10 of RecBole's quick start."""
    found = train_bpr(method, Rates(rate, rate), seed, {})
    return Quality(found.best_valid["ndcg@10"], found.test["ndcg@10"], found.state_bytes)


_BATCH, _LENGTH, _PASSES = 20, 35, 6
_BODY_RATE = 0.003


def treebank(method: str, rate: float, seed: int) -> Quality:
    """Perplexity of two LSTM layers of 200 units; the embedding has sparse gradients."""
    penn: dict[str, str] = importlib.import_module("treebank").penn
    parts = {part: penn[part].replace("\n", " <eos> ").split() for part in penn}
    corpus = Corpus.from_words(Vocabulary.from_words(parts["train"]), **parts)
    torch.manual_seed(seed)
    sizes = ModelSettings(
        dim=200, hidden=200, layers=2, samples=0, dropout=0.35, products="bfloat16"
    )
    model = LanguageModel(len(corpus.vocabulary), sizes)
    assert isinstance(model.softmax, FullSoftmax)
    tables = ["embedding.weight", "softmax.table.weight"]
    optimizer = build(model, method, Rates(rate, _BODY_RATE), tables=tables)
    batches = corpus.batches(batch=_BATCH, length=_LENGTH)
    state: Any = None
    for step in range(_PASSES * batches):
        state = state if step % batches else None
        scale_rates_(optimizer, 1 - step / (_PASSES * batches))
        optimizer.zero_grad()
        words, following = corpus.batch(step, batch=_BATCH, length=_LENGTH)
        loss, state = model.loss(words, following, state, generator=None)
        loss.backward()
        nn.utils.clip_grad_norm_(model.named_body().values(), 1.0)
        optimizer.step()
    valid, test = (perplexity(model, it, words=len(it)) for it in (corpus.valid, corpus.test))
    return Quality(valid, test, state_bytes(optimizer, tables))


ANCHORS = {
    "recbole": Anchor(recbole, "NDCG@10", 0.292, 0.001),
    "treebank": Anchor(treebank, "perplexity", 114.5, 0.01),
}
LEAN = "1/8 columns and row-wise below 4096"

app = typer.Typer(help=__doc__, no_args_is_help=True, rich_markup_mode=None)
File = Annotated[Path, typer.Option(help="Where runs are kept, one in a line.")]


def _kept(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@app.command()
def run(
    anchors: str = ",".join(ANCHORS),
    methods: str = f"adam,{LEAN}",
    rates: Annotated[str, typer.Option(help="Of the tables; the anchor's own if empty.")] = "",
    seeds: str = "0,1,2",
    file: File = MEASURED,
) -> None:
    """Trains what is not kept yet."""
    torch.set_num_threads(1)
    runs = itertools.product(anchors.split(","), methods.split(","), map(int, seeds.split(",")))
    for name, method, seed in runs:
        for rate in map(float, rates.split(",")) if rates else [ANCHORS[name].rate]:
            run = {"anchor": name, "method": method, "rate": rate, "seed": seed}
            if any(run.items() <= it.items() for it in _kept(file)):
                continue
            began = time.process_time()
            found = ANCHORS[name].run(method, rate, seed)
            line = {
                **run,
                "metric": ANCHORS[name].metric,
                **found._asdict(),
                "cpu_seconds": round(time.process_time() - began, 1),
                "commit": commit(),
                "torch": torch.__version__,
                "command": "python -m experiments.studies.anchors " + shlex.join(sys.argv[1:]),
            }
            with file.open("a") as kept:
                kept.write(json.dumps(line) + "\n")
            print(f"{name:10} {method:36} {rate:<6g} {seed} {found.valid:.4f} {found.test:.4f}")


@app.command()
def table(file: File = MEASURED) -> None:
    """Prints the kept runs as a table in Markdown."""
    found: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for it in _kept(file):
        found.setdefault((it["anchor"], it["method"], it["rate"]), []).append(it)
    print("| | published, test | rate | seeds | validation | test | state of the tables |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for (name, method, rate), lines in sorted(found.items()):
        values = (_of_seeds([it[part] for it in lines]) for part in ("valid", "test"))
        title = f"{name}, {ANCHORS[name].metric}: {method}"
        state = readable_bytes(lines[0]["state_bytes"])
        cells = [title, str(ANCHORS[name].published), f"{rate:g}", str(len(lines)), *values, state]
        print(f"| {' | '.join(cells)} |")


def _of_seeds(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.4g}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4g}{spread}"


def main() -> None:
    """Runs the command line."""
    app()


if __name__ == "__main__":
    main()
