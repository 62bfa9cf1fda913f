"""What the demo says and draws."""

import pytest

from experiments.demo import figures, summary
from experiments.recipes import load_recipe
from experiments.reproduction import Findings, Reproduction


def finding(name, **result):
    numbers = {
        "valid": 100.0,
        "table_state_bytes": 2_000_000,
        "peak_memory_bytes": 3_000_000,
        "step_seconds": 0.050,
        "steps": 500,
        "evaluations": [{"step": 50, "quality": 400.0}, {"step": 500, "quality": 100.0}],
    }
    return Findings(
        name=name,
        title={"sparse-adam": "SparseAdam", "lean": "lean (default)"}[name],
        paper={},
        table_lr=0.1,
        body_lr=0.003,
        valid_by_rate=[],
        results=[{**numbers, **result}],
    )


def demo(**lean):
    return Reproduction(
        recipe=load_recipe("demo"),
        size="small",
        command="experiments demo",
        date="",
        findings=[finding("sparse-adam"), finding("lean", table_state_bytes=1000, **lean)],
    )


@pytest.mark.parametrize(
    ("valid", "change"), [(110.0, "10% more"), (95.0, "5% less"), (100.2, "the same")]
)
def test_the_sentence_says_what_was_saved_and_what_it_cost(valid, change):
    assert summary(demo(valid=valid, step_seconds=0.060)) == (
        "lean keeps 1 KB of optimizer state for the tables instead of SparseAdam's 2 MB (0.05%); "
        f"after 500 steps its validation perplexity is {valid:.1f} against 100.0 ({change}), "
        "and a step takes 60 ms against 50 ms (20% more)."
    )


def test_the_sentence_says_that_a_method_diverged():
    found = summary(demo(valid=None, diverged="loss became nan at step 7"))
    assert found == "lean (default) diverged: loss became nan at step 7."


def test_the_curve_ends_at_the_number_of_the_table():
    _, curve = figures(demo(valid=120.0, evaluations=[{"step": 50, "quality": 300.0}]))["curve"]
    exact, lean = curve.axes[0].lines
    assert [*zip(*exact.get_data(), strict=True)] == [(50, 400.0), (500, 100.0)]
    assert [*zip(*lean.get_data(), strict=True)] == [(50, 300.0), (500, 120.0)]
