"""The pages on several processes: their code runs on two, and prints what they say."""

import contextlib
from pathlib import Path

import pytest
import torch.distributed as dist
from markdown_code import blocks, run
from ranks import on_ranks

DOCS = Path(__file__).parents[2] / "docs"


def run_page(page: str, folder: Path) -> None:
    """Runs a page in the process group of the test, and in a folder that all ranks share."""
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        patch.setattr(dist, "init_process_group", lambda *_: None)
        patch.setattr(dist, "destroy_process_group", lambda *_: None)
        run(blocks((DOCS / page).read_text("utf-8")), page)


@on_ranks(2)
def test_the_code_of_the_page_on_several_processes_runs(folder: Path):
    run_page("howto/distributed.md", folder)


@on_ranks(2, ignore=[".*"])
def test_the_code_of_the_page_on_torchrec_runs(folder: Path):
    pytest.importorskip("fbgemm_gpu", reason="fbgemm-gpu-cpu is not installed")
    pytest.importorskip("torchrec", reason="torchrec is not installed")
    run_page("howto/torchrec.md", folder)
