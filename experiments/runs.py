"""One training in a folder of its own: log, TensorBoard, checkpoints, and the result.

The folder holds `log.jsonl`, TensorBoard's events, `checkpoint.pt` while the training runs, and
`result.json` when it is done. Started again, a run that was stopped or killed continues from its
checkpoint, and one that is done is not repeated. A lock keeps a second run out of the folder.
"""

import json
import math
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from sketchoptim._files import replace_file

from .checkpoints import (
    TimedCheckpoints,
    check_same,
    load_checkpoint,
    read_json,
    write_json,
)
from .errors import StoppedError
from .locks import locked
from .machine import machine_facts, peak_memory_bytes, versions
from .methods import Method
from .progress import progress_bar
from .recipes import Setting
from .settings import TrainSettings
from .stopping import StopRequest
from .training import DivergedError, Training

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
    """The setting's `train`, for a method and with the given values in place of its own."""
    changes: dict[str, Any] = {"table_lr": table_lr, "body_lr": body_lr}
    if method.batch:
        changes["batch"] = method.batch
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
    with locked(folder):
        done = read_result(folder, about)
        if done is not None:
            return done
        training = Training(setting.task(data), settings)
        checkpoint = folder / "checkpoint.pt"
        if checkpoint.exists():
            load_checkpoint(checkpoint, training, about=about)
            console.print(f"continuing from step {training.step:,} of {checkpoint}", markup=False)
        checkpoints = TimedCheckpoints(checkpoint, about=about, seconds=checkpoint_seconds)
        outcome = _train_and_measure(folder, setting, training, checkpoints, console=console)
        result = {"about": about, **outcome, **_costs(training)}
        result |= {"machine": machine_facts(), "versions": versions()}
        write_json(folder / "result.json", result)
        checkpoint.unlink(missing_ok=True)
        return result


def read_result(folder: Path, about: dict[str, Any]) -> dict[str, Any] | None:
    """The result in the folder, None if there is none; `about` must be that of its run."""
    path = folder / "result.json"
    if not path.exists():
        return None
    found: dict[str, Any] = read_json(path)
    if not isinstance(found, dict) or not isinstance(found.get("about"), dict):
        raise ValueError(f"{path} must be the result of a run; remove it")
    check_same(path, found["about"], about)
    return found


def about_run(setting: Setting, settings: TrainSettings, *, data_sha256: str) -> dict[str, Any]:
    """Everything that a run's result depends on, with a digest of its data."""
    return {
        "data": {**asdict(setting.data), "sha256": data_sha256},
        "model": asdict(setting.model),
        "train": settings.to_dict(),
        "test_words": setting.test_words,
    }


def _train_and_measure(
    folder: Path,
    setting: Setting,
    training: Training,
    checkpoints: TimedCheckpoints,
    *,
    console: Console,
) -> dict[str, Any]:
    """The quality of the model after all steps, or why it diverged.

    Raises:
        StoppedError: The user asked for it; the checkpoint is saved.
    """
    with (
        RunLog(folder, after=training.step) as log,
        progress_bar(console, training) as show,
        StopRequest() as stop,
    ):
        try:
            for loss in training.steps():
                if training.step % setting.log_every == 0 or training.is_evaluated:
                    log.write(training, loss)
                show(loss)
                if stop.is_made:
                    raise _stopped(training, checkpoints)
                checkpoints.save_if_due(training)
        except DivergedError as error:
            return {"diverged": str(error), "valid": None, "test": None}
        stop.is_immediate = True  # the training is done, and measuring does not change it
        try:
            return {"peak_memory_bytes": peak_memory_bytes(), **_measured(setting, training)}
        except KeyboardInterrupt:
            raise _stopped(training, checkpoints) from None


def _stopped(training: Training, checkpoints: TimedCheckpoints) -> StoppedError:
    checkpoints.save(training)
    return StoppedError(
        f"stopped after step {training.step:,} of {training.total_steps:,}, "
        f"which is saved in {checkpoints.path}"
    )


def _measured(setting: Setting, training: Training) -> dict[str, Any]:
    """Quality on the held-out parts; None for what is infinite, which JSON cannot hold."""
    found: dict[str, Any] = {"valid": None, "test": None}
    for part in training.task.held_out if setting.test_words else ():
        measures = training.task.measures(training.model, part, limit=setting.test_words)
        quality = measures.pop("quality")
        found |= {f"{part}_{name}": value for name, value in measures.items()}
        if quality < _DIVERGED:
            found[part] = quality
        else:
            rate = training.settings.table_lr
            found["diverged"] = f"{part} is {quality:.3g}; lower table_lr = {rate}"
    return found


def _costs(training: Training) -> dict[str, Any]:
    costs: dict[str, Any] = {
        "steps": training.step,
        "losses": smooth_losses(training.losses),
        "evaluations": [vars(evaluation) for evaluation in training.evaluations],
        "seconds": sum(training.step_seconds),
        "cpu_seconds": training.cpu_seconds,
    }
    if training.step:
        run = training.run()
        costs |= {
            "step_seconds": run.step_seconds,
            "update_seconds": run.update_seconds,
            "rows_a_second": training.rows_a_step / run.step_seconds,
            "table_state_bytes": run.table_state_bytes,
            "state_bytes": run.state_bytes,
            "parameter_bytes": sum(weight.nbytes for weight in training.model.parameters()),
        }
    return costs


def smooth_losses(losses: list[float], *, points: int = 100) -> list[tuple[int, float]]:
    """At most `points` pairs (step, mean loss of the steps up to it and since the last pair)."""
    width = max(1, math.ceil(len(losses) / points))
    return [
        (min(start + width, len(losses)), statistics.fmean(losses[start : start + width]))
        for start in range(0, len(losses), width)
    ]


class RunLog:
    """The log of a run as JSON lines and for TensorBoard.

    Args:
        folder: Where both are written.
        after: The step that the run continues from. Lines about later steps, which a killed run
            has left, are dropped, since these steps are done again.
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
            "rows_a_second": training.rows_a_step / training.step_seconds[-1],
            "table_lr": training.optimizers[0].param_groups[0]["lr"],
        }
        if training.is_evaluated:
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
