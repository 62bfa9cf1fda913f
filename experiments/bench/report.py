"""All results of a run of the benchmark, and their JSON file."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from .bags import BagsResult
from .cases import Settings
from .heads import HeadResult
from .runs import Comparison, FixedCost, SweepResult
from .training import TrainingResult
from .updates import UpdateTimes


@dataclasses.dataclass(kw_only=True)
class Report:
    """All results of a run and what they depend on."""

    settings: Settings
    ids: str
    machine: dict[str, object]
    versions: dict[str, str]
    absent: dict[str, str]
    peak_memory_bytes: int = 0
    load_average_at_the_end: float = 0.0
    steps: list[Comparison] = dataclasses.field(default_factory=list)
    fixed_costs: list[FixedCost] = dataclasses.field(default_factory=list)
    scaling: list[SweepResult] = dataclasses.field(default_factory=list)
    training: list[list[TrainingResult]] = dataclasses.field(default_factory=list)
    tables: list[list[TrainingResult]] = dataclasses.field(default_factory=list)
    many: list[UpdateTimes] = dataclasses.field(default_factory=list)
    dense: list[UpdateTimes] = dataclasses.field(default_factory=list)
    heads: list[list[HeadResult]] = dataclasses.field(default_factory=list)
    bags: list[list[BagsResult]] = dataclasses.field(default_factory=list)

    @property
    def conditions(self) -> str:
        """Threads, clock, processor and SIMD level, which every table and picture names."""
        return self.conditions_with(self.settings.threads, self.settings.clock)

    def conditions_with(self, threads: int, clock: str) -> str:
        """The same for a part that sets threads and clock itself."""
        return (
            f"{threads} thread{'s' if threads > 1 else ''}, {clock} time, "
            f"{self.machine['processor']}, torch on {self.machine['simd']}, "
            f"our kernels {self.machine['kernels']}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The report in dicts, lists, strings and numbers; times are seconds."""
        plain = dataclasses.asdict(self)
        for comparison, kept in zip(self.steps, plain["steps"], strict=True):
            for result, row in zip(comparison.results, kept["results"], strict=True):
                row["ratio_to_sparse_adam"] = comparison.ratio(result)
        return plain

    def save(self, path: Path) -> None:
        """Writes the report as JSON."""
        path.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")
