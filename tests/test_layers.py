"""Imports inside the package go one way: each layer sees only itself and the layers before it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sketchoptim

PACKAGE = "sketchoptim"
LAYERS = (
    {
        "_bag_ids",
        "_files",
        "_formatting",
        "_group_options",
        "_hashing",
        "_locks",
        "_names",
        "_pages",
        "_parsing",
        "_rounding",
        "_torch_private",
        "_validation",
        "_warning",
        "theory",
    },
    {"_rows"},
    {"_sketch_base", "_sparse_norm"},
    {"_sketch"},
    {"storage"},
    {"deferred"},
    {"moments"},
    {"_param_groups"},
    {"ops"},
    {"optim"},
    {"nn", "diagnostics", "torchrec", "timm"},
    {"arming"},
    {"planning"},
    {"_cli", "__main__", "gpu_check"},
)
# The modules of optim/, in the order in which they may import each other.
OPTIM = (
    {"_digests", "_shards", "_schedulers", "_signals"},
    {"_checks", "_state", "_exchange"},
    {"_algorithm", "_clip"},
    {"_binding", "_torch_step"},
    {"_step", "_agreement", "_row_blocks", "_blank_state", "_checkpoint"},
    {"_advice", "_counting", "_repetition"},
    {"base"},
    {"_adagrad", "_adam", "_rmsprop", "_sgd"},
    {"_catalogue"},
    {"_convert", "_replace"},
    {"__init__"},
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
# The public names come from every layer that a user programs with, so only layers after those may
# say `import sketchoptim`.
PUBLIC_RANK = RANK["_cli"]
ROOT = Path(sketchoptim.__file__).parent
ROOMS = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
# Every import of a private module of another room.
PRIVATE_IMPORTS = {
    "sketchoptim.diagnostics._diagnose -> optim._binding",
    "sketchoptim.diagnostics._inspection -> optim._digests",
    "sketchoptim.diagnostics._inspection -> optim._state",
    "sketchoptim.diagnostics._memory_report -> optim._shards",
    "sketchoptim.diagnostics._memory_report -> optim._state",
}


def imported_modules(source: str, module: str, *, is_package: bool = False) -> set[str]:
    """Absolute names of everything `source`, the text of `module`, imports, at any depth.

    `from a import b` yields `a.b`, since b may be a module; ranks only look at the first part.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            parents = parts[: len(parts) - node.level + is_package] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """One line for each import in `source` that goes against the order of the layers."""
    layer = module.split(".")[1]
    if layer not in RANK:
        return [f"{module} is in no layer; give it one in {Path(__file__).name}"]
    found = []
    for name in sorted(imported_modules(source, module, is_package=is_package)):
        package, _, rest = name.partition(".")
        if package != PACKAGE:
            continue
        if RANK.get(rest.split(".")[0], PUBLIC_RANK) > RANK[layer]:
            found.append(f"{module} imports {name}")
    return found


def private_imports(source: str, module: str, *, is_package: bool = False) -> set[str]:
    """The private modules of other rooms (packages of the library) that `source` imports."""
    found = set()
    for name in imported_modules(source, module, is_package=is_package):
        package, room, *inner = *name.split("."), ""
        is_other_room = package == PACKAGE and room in ROOMS and room != module.split(".")[1]
        if is_other_room and inner[0].startswith("_"):
            found.add(f"{module} -> {room}.{inner[0]}")
    return found


def modules() -> Iterator[tuple[str, str, bool]]:
    """The text of each module of the package, its name, and whether it is a package."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join([PACKAGE, *parts[: len(parts) - is_package]])
        if module != PACKAGE:
            yield path.read_text(encoding="utf-8"), module, is_package


def test_imports_follow_the_layers():
    found = {name: violations(text, name, is_package=package) for text, name, package in modules()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_private_modules_are_imported_in_their_own_room():
    found = [private_imports(text, name, is_package=package) for text, name, package in modules()]
    assert set().union(*found) == PRIVATE_IMPORTS


def test_the_modules_of_optim_import_only_earlier_ones():
    folder = Path(sketchoptim.__file__).parent / "optim"
    rank = {name: number for number, names in enumerate(OPTIM) for name in names}
    assert rank.keys() == {path.stem for path in folder.glob("*.py")}
    found = [
        f"{path.stem} imports {name}"
        for path in sorted(folder.glob("*.py"))
        for name in imported_modules(path.read_text(encoding="utf-8"), f"{PACKAGE}.optim.x")
        if name.startswith(f"{PACKAGE}.optim.") and rank[name.split(".")[2]] >= rank[path.stem]
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import sketchoptim.optim",
        "import sketchoptim.optim._adam as adam",
        "from sketchoptim.optim import Adam",
        "from sketchoptim import optim",
        "from ..optim.adam import Adam",
        "from .. import optim",
        "def late():\n    from sketchoptim._cli import main",
        "import sketchoptim as so",
        "from sketchoptim import Adam",
    ],
)
def test_an_import_of_a_later_layer_is_caught(source):
    assert len(violations(source, "sketchoptim.moments._exact")) == 1


@pytest.mark.parametrize(
    ("module", "is_package", "source"),
    [
        ("sketchoptim.optim._adam", False, "from sketchoptim.moments import Exact"),
        ("sketchoptim.optim._adam", False, "from ..moments.exact import Exact"),
        ("sketchoptim.optim._adam", False, "from .base import Base"),
        ("sketchoptim.optim", True, "from .adam import Adam"),
        ("sketchoptim.optim", True, "from ..moments import Exact"),
        ("sketchoptim._sketch", False, "from ._hashing import buckets"),
        ("sketchoptim.nn._mach", False, "import torch, sketchoptim.diagnostics._watch"),
        ("sketchoptim._cli", False, "import sketchoptim as so"),
    ],
)
def test_an_import_of_the_same_or_an_earlier_layer_is_allowed(module, is_package, source):
    assert violations(source, module, is_package=is_package) == []


def test_every_layer_exists():
    found = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert set(RANK) - found == set()


def test_a_file_outside_the_layers_is_caught():
    assert len(violations("", "sketchoptim.utils")) == 1
