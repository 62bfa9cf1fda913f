"""Tests that run in several processes: `on_ranks` and, within such a test, `world`.

    @on_ranks(2, 4)
    def test_replicas_have_the_same_weights(): ...  # the body runs in every rank, over gloo

All selected tests of one number of ranks share one launch of torchrun, since importing torch takes
most of the time. Each has a process group of its own, and fails where it fails in any rank.
"""

import importlib.util
import inspect
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_worker import end_with_parent

# A launch is killed after this time; a rank ends by itself a little earlier, and says where it was.
LAUNCH_SECONDS = 180
# A rank that waits for another one raises after this time.
COLLECTIVE_SECONDS = 40
_LINES_OF_OUTPUT = 60
# As in pyproject.toml: small cases need no kernel.
_IGNORED = (".*is stepped by the reference kernels", "sketchoptim runs on its reference kernels")
_OUTCOMES = ("passed", "skipped", "failed", "not run")

Outcome = tuple[str, str]
"""One of `_OUTCOMES`, and what a rank says about it."""


# -- in pytest -----------------------------------------------------------------------------------


def on_ranks(*counts: int, ignore: Sequence[str] = ()) -> Callable[[Any], Any]:
    """Makes a function a test that runs in every process of a launch, for each number of them.

    The function may have an argument `folder`: an empty folder that all ranks of the test share.
    Warnings are errors in it, except those whose message matches one of `ignore`.
    """

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        if "TORCHELASTIC_RUN_ID" in os.environ:  # in a rank
            check.ignored_warnings = tuple(ignore)  # type: ignore[attr-defined]
            return check

        @pytest.mark.parametrize("ranks", counts)
        def test(request: pytest.FixtureRequest, ranks: int) -> None:
            outcomes = _launched(request.session, ranks)[test.check]  # type: ignore[attr-defined]
            worst = max((outcome for outcome, _ in outcomes), key=_OUTCOMES.index)
            said = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(outcomes) if text]
            if worst == "skipped":
                pytest.skip(said[0])
            if worst != "passed":
                pytest.fail("\n".join(said), pytrace=False)

        test.__name__, test.__doc__, test.__module__ = (
            check.__name__,
            check.__doc__,
            check.__module__,
        )
        test.check = (inspect.getfile(check), check.__name__)  # type: ignore[attr-defined]
        return test

    return decorate


@cache
def _launched(session: pytest.Session, ranks: int) -> dict[tuple[str, str], list[Outcome]]:
    """What every rank says of each selected test of this number of ranks."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    checks = [
        item.obj.check
        for item in session.items
        if isinstance(item, pytest.Function)
        and hasattr(item.obj, "check")
        and item.callspec.params["ranks"] == ranks
    ]
    factory: Any = session.config._tmp_path_factory  # type: ignore[attr-defined]
    folder = factory.mktemp(f"ranks-{ranks}")
    (folder / "checks.json").write_text(json.dumps(checks))
    launch = torchrun(Path(__file__), folder, ranks=ranks, logs=folder / "logs")
    found: dict[tuple[str, str], list[Outcome]] = {
        check: [("not run", "")] * ranks for check in checks
    }
    for rank in range(ranks):
        for line in _lines(folder / f"outcomes-{rank}.jsonl"):
            file, name, outcome, text = json.loads(line)
            found[file, name][rank] = outcome, text
    for outcomes in found.values():
        if ("not run", "") in outcomes:  # one of them says why
            outcomes[outcomes.index(("not run", ""))] = "not run", launch.describe()
    return found


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


# -- launching -----------------------------------------------------------------------------------


class Launch:
    """A finished launch: its exit code and what was printed, rank by rank."""

    def __init__(self, code: int | None, output: str, logs: Path) -> None:
        self.code = code
        """None where it had to be killed."""
        self.output = output
        self.logs = logs

    def describe(self) -> str:
        """The exit code, and the last lines that torchrun and each rank printed."""
        ended = "was killed, its time was over" if self.code is None else f"gave {self.code}"
        parts = [f"torchrun {ended}", self.output]
        for path in sorted(self.logs.rglob("*.log")):
            if text := path.read_text(errors="replace").strip():
                parts.append(f"-- {path.parent.name}/{path.name}\n{text}")
        return "\n".join("\n".join(part.splitlines()[-_LINES_OF_OUTPUT:]) for part in parts)


def torchrun(
    script: Path,
    *arguments: object,
    ranks: int,
    logs: Path,
    options: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    seconds: float = LAUNCH_SECONDS,
) -> Launch:
    """Runs a script in several processes on this machine; none of them is left behind.

    What the ranks print is in the folder `logs`. Further options of torchrun and variables of the
    environment may be given.
    """
    worker = Path(__file__).with_name("rank_worker.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options]
    command += [f"--nproc-per-node={ranks}", f"--log-dir={logs}", "--redirects=3"]
    command += [str(worker), str(0.8 * seconds), str(script), *map(str, arguments)]
    single = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        command,
        env={**os.environ, **single, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=end_with_parent,
    )
    code: int | None = None
    try:
        output, _ = process.communicate(timeout=seconds)
        code = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()  # its ranks end with it
        output, _ = process.communicate()
    finally:
        process.kill()  # where pytest itself is being stopped
    return Launch(code, output, logs)


# -- in a rank -----------------------------------------------------------------------------------

_store: dist.Store
_groups_of_check = (0, 0)


@contextmanager
def world(count: int) -> Iterator[bool]:
    """Makes the first `count` ranks the whole world for a while; gives whether this is one of them.

    For tests that save on some number of ranks and load on another one.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    _leave()
    is_member = _join(rank, count)
    yield is_member
    if is_member:
        _leave()
    _wait_for_all(ranks, "back")
    _join(rank, ranks)


def _wait_for_all(ranks: int, where: str) -> None:
    """Waits until all ranks have come so far, or one of them has failed."""
    check, group = _groups_of_check
    key = f"{where} {check} {group}"
    _store.add(key, 1)
    while _store.add(key, 0) < ranks:
        if _store.check([f"failed {check}"]):
            raise RuntimeError("another rank has failed")
        time.sleep(0.005)


def run_checks(folder: Path) -> None:
    """Runs the checks that a launch asks for, and writes their outcomes line by line."""
    global _store, _groups_of_check
    _store, rank, ranks = next(dist.rendezvous("env://"))
    checks = json.loads((folder / "checks.json").read_text())
    with (folder / f"outcomes-{rank}.jsonl").open("w") as outcomes:
        for number, (file, name) in enumerate(checks):
            _groups_of_check = number, 0
            shared = folder / f"{number}-{name}"
            shared.mkdir(exist_ok=True)
            outcome = _outcome(file, name, shared, rank, ranks)
            outcomes.write(json.dumps([file, name, *outcome]) + "\n")
            outcomes.flush()
            # Not by a collective: the group of a failed check may be gone.
            _store.set(f"ended {number} {rank}", "")
            others = [f"ended {number} {other}" for other in range(ranks)]
            _store.wait(others, timedelta(seconds=2 * COLLECTIVE_SECONDS))


def _outcome(file: str, name: str, shared: Path, rank: int, ranks: int) -> Outcome:
    """Runs one check in a process group of its own."""
    try:
        with warnings.catch_warnings():
            check = getattr(_module(file), name)
            warnings.simplefilter("error")
            for message in (*_IGNORED, *check.ignored_warnings):
                warnings.filterwarnings("ignore", message)
            torch.manual_seed(0)
            _join(rank, ranks)
            check(**({"folder": shared} if "folder" in inspect.signature(check).parameters else {}))
    except pytest.skip.Exception as skipped:
        return "skipped", str(skipped)
    except (Exception, pytest.fail.Exception) as error:
        text = "".join(traceback.format_exception(error))
        traceback.clear_frames(error.__traceback__)
        _store.set(f"failed {_groups_of_check[0]}", "")
        return "failed", text
    finally:
        # Also frees ranks that wait for this one: their connection is closed.
        _leave()
    return "passed", ""


@cache
def _module(file: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _join(rank: int, count: int) -> bool:
    """Forms the default group of the first `count` ranks; returns whether this is one of them."""
    global _groups_of_check
    check, group = _groups_of_check
    _groups_of_check = check, group + 1
    if rank >= count:
        return False
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"check {check}, group {group}", _store),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )
    # A rank that left at once, by a skip, would not be there for those that still connect.
    _wait_for_all(count, "joined")
    return True


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    import ranks  # the module that the checks import, and not this one

    ranks.run_checks(Path(sys.argv[1]))
