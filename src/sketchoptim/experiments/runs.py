"""One training in a folder of its own: log, TensorBoard, checkpoints, and the result.

The folder holds `log.jsonl`, TensorBoard's events, `checkpoint.pt` while the training runs, and
`result.json` when it is done. Started again, a run that was killed goes on from its checkpoint,
and one that is done is not repeated.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .checkpoints import (
    TimedCheckpoints,
    check_same,
    load_checkpoint,
    read_json,
    replace_file,
    write_json,
)
from .corpora import Part
from .machine import machine, peak_memory_bytes, readable_bytes, versions
from .methods import Method
from .recipes import Setting
from .settings import TrainSettings
from .tasks import NextWords
from .train import DivergedError, Training

_HELD_OUT: tuple[Part, ...] = ("valid", "test")
_DIVERGED = 1e30


def run_settings(
    setting: Setting,
    method: Method,
    *,
    table_lr: float | None = None,
    body_lr: float | None = None,
    seed: int = 0,
    steps: int | None = None,
    device: str = "cpu",
) -> TrainSettings:
    """The setting's way to train, for a method and with what was asked for instead."""
    changes: dict[str, Any] = {"table_lr": table_lr, "body_lr": body_lr}
    if steps is not None:
        changes |= {"steps": steps, "epochs": 0}
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(setting.train, method=method, seed=seed, device=device, **given)


def run_in(
    folder: Path,
    setting: Setting,
    settings: TrainSettings,
    *,
    data: Path | None = None,
    checkpoint_seconds: float = 30.0,
    console: Console,
) -> dict[str, Any]:
    """The result of training by `settings`: from `result.json` if that is there, else trained."""
    about = about_run(setting, settings, data_sha256=setting.data.sha256(data))
    done = finished(folder, about)
    if done is not None:
        return done
    training = Training(setting.task(data), settings)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        load_checkpoint(checkpoint, training, about=about)
        console.print(f"going on from step {training.step:,} of {checkpoint}")
    saves = TimedCheckpoints(checkpoint, about=about, seconds=checkpoint_seconds)
    outcome = _trained(folder, setting, training, saves, console=console)
    result = {"about": about, **outcome, **_costs(training)}
    result |= {"machine": machine(), "versions": versions()}
    write_json(folder / "result.json", result)
    checkpoint.unlink(missing_ok=True)
    return result


def finished(folder: Path, about: dict[str, Any]) -> dict[str, Any] | None:
    """The result that is in the folder already, if it is that of the run that `about` tells of."""
    path = folder / "result.json"
    if not path.exists():
        return None
    found: dict[str, Any] = read_json(path)
    if not isinstance(found, dict) or not isinstance(found.get("about"), dict):
        raise ValueError(f"{path} must be the result of a run; remove it")
    check_same(path, found["about"], about)
    return found


def about_run(setting: Setting, settings: TrainSettings, *, data_sha256: str) -> dict[str, Any]:
    """All that a run's result depends on, the content of its data included."""
    return {
        "data": {**asdict(setting.data), "sha256": data_sha256},
        "model": asdict(setting.model),
        "train": settings.to_dict(),
        "test_words": setting.test_words,
    }


def _trained(
    folder: Path, setting: Setting, training: Training, saves: TimedCheckpoints, *, console: Console
) -> dict[str, Any]:
    """How good the model is after all steps; a diverged one is infinitely bad, which JSON lacks."""
    with RunLog(folder, after=training.step) as log, _bar(console, training) as show:
        try:
            for loss in training.steps():
                evaluated = training.evaluations and training.evaluations[-1].step == training.step
                if training.step % setting.log_every == 0 or evaluated:
                    log.write(training, loss)
                show(loss)
                saves.save_if_due(training)
        except DivergedError as error:
            return {"diverged": str(error), "valid": None, "test": None}
        outcome: dict[str, Any] = {"peak_memory_bytes": peak_memory_bytes()}
        for part in _HELD_OUT:
            outcome[part] = None
            if setting.test_words:
                found = training.task.measured(training.model, part, limit=setting.test_words)
                if found < _DIVERGED:
                    outcome[part] = found
                else:
                    rate = training.settings.table_lr
                    outcome["diverged"] = f"{part} is {found:.3g}; lower table_lr = {rate}"
        return outcome


def _costs(training: Training) -> dict[str, Any]:
    costs: dict[str, Any] = {
        "steps": training.step,
        "losses": smoothed(training.losses),
        "evaluations": [vars(evaluation) for evaluation in training.evaluations],
        "seconds": sum(training.step_seconds),
        "cpu_seconds": training.cpu_seconds,
    }
    if training.step:
        run = training.run()
        costs |= {
            "step_seconds": run.step_seconds,
            "update_seconds": run.update_seconds,
            "rows_a_second": rows_a_step(training) / run.step_seconds,
            "table_state_bytes": run.table_state_bytes,
            "state_bytes": run.state_bytes,
            "parameter_bytes": sum(weight.nbytes for weight in training.model.parameters()),
        }
    return costs


def rows_a_step(training: Training) -> int:
    """How many words or examples a step takes."""
    is_text = isinstance(training.task, NextWords)
    return training.settings.batch * (training.settings.length if is_text else 1)


def smoothed(losses: list[float], *, points: int = 100) -> list[tuple[int, float]]:
    """At most `points` pairs (step, mean loss of the steps up to it and since the last pair)."""
    width = max(1, math.ceil(len(losses) / points))
    return [
        (min(start + width, len(losses)), statistics.fmean(losses[start : start + width]))
        for start in range(0, len(losses), width)
    ]


class RunLog:
    """The log of a run as JSON lines and for TensorBoard.

    Args:
        folder: Where both go.
        after: The step that the run goes on from; what an earlier, killed one logged of later
            steps is dropped, as they are done again.
    """

    def __init__(self, folder: Path, *, after: int) -> None:
        # its import takes a second, and only runs that write a log need it
        from torch.utils.tensorboard import SummaryWriter

        path = folder / "log.jsonl"
        kept = []
        if path.exists():
            try:
                lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
                # a kill may have cut the last line
                whole = [line for line in lines if line.endswith("\n")]
                kept = [line for line in whole if json.loads(line)["step"] <= after]
            except (ValueError, LookupError, TypeError) as error:
                raise ValueError(f"{path} must be the log of a run: {error}; remove it") from error
        replace_file(path, lambda file: file.write("".join(kept).encode()))
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder), purge_step=after + 1)

    def write(self, training: Training, loss: float) -> None:
        """Adds a line about the step just done."""
        line: dict[str, Any] = {
            "step": training.step,
            "loss": loss,
            "seconds": sum(training.step_seconds),
            "rows_a_second": rows_a_step(training) / training.step_seconds[-1],
            "table_lr": training.optimizers[0].param_groups[0]["lr"],
        }
        if training.evaluations and training.evaluations[-1].step == training.step:
            line["valid"] = training.evaluations[-1].quality
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        for name, value in line.items():
            if name != "step":
                self._board.add_scalar(name, value, training.step)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._board.close()


@contextmanager
def _bar(console: Console, training: Training) -> Iterator[Callable[[float], None]]:
    """A progress bar; what it gives is called with the loss after every step."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
    )
    rows = rows_a_step(training)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(
            training.settings.chosen.title, total=training.total_steps, numbers=""
        )
        state = ""

        def show(loss: float) -> None:
            nonlocal state
            if not state:  # it is all there after the first step, and does not grow
                state = readable_bytes(sum(training.state_bytes().values()))
            rate = rows / training.step_seconds[-1]
            numbers = f"loss {loss:.3f}, {rate:,.0f} rows/s, state {state}"
            progress.update(task, completed=training.step, numbers=numbers)

        yield show
