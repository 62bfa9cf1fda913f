import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import pytest

import sketchoptim

ROOT = Path(__file__).parents[1]

OPTIONAL = ("lightning", "matplotlib", "rich", "tensorboard", "transformers", "typer")


def test_version_is_the_one_of_the_installed_metadata():
    assert sketchoptim.__version__ == version("sketchoptim")


def test_versions_agree():
    files = ("pyproject.toml", "experiments/pyproject.toml")
    projects = [tomllib.loads((ROOT / file).read_text(encoding="utf-8")) for file in files]
    assert {project["project"]["version"] for project in projects} == {sketchoptim.__version__}
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert f"version: {sketchoptim.__version__}" in citation


def test_type_information_is_shipped():
    assert (files("sketchoptim") / "py.typed").is_file()


def test_import_needs_no_optional_dependency():
    # None in sys.modules makes any import of that name raise, as if it were not installed.
    program = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL})); import sketchoptim"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_experiments_are_built_without_torch_and_with_their_data(tmp_path):
    tree = tmp_path / "experiments"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    shutil.copytree(ROOT / "experiments", tree, ignore=ignored)
    program = (
        "import sys; sys.modules['torch'] = None; "
        f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"
    )
    files = {
        path.relative_to(tmp_path).as_posix()
        for path in tree.rglob("*.*")
        if path.name not in ("README.md", "pyproject.toml")
    }
    subprocess.run([sys.executable, "-c", program], cwd=tree, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        assert files == {name for name in content.namelist() if ".dist-info/" not in name}


@pytest.fixture
def build_with_broken_cmake(tmp_path):
    """Builds a wheel of this source tree on a machine whose cmake runs but always fails."""
    tree = tmp_path / "tree"
    for folder in ("src", "experiments"):
        shutil.copytree(ROOT / folder, tree / folder)
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    cmake = tmp_path / "cmake"
    answer = '{"version": {"string": "3.31.0"}}'
    cmake.write_text(f"#!/bin/sh\n[ \"$1\" = -E ] && echo '{answer}'\n")
    cmake.chmod(0o755)

    def build(**environment: str) -> subprocess.CompletedProcess[str]:
        program = f"from scikit_build_core.build import build_wheel; build_wheel({str(tmp_path)!r})"
        return subprocess.run(
            [sys.executable, "-c", program],
            cwd=tree,
            env={**os.environ, "CMAKE_EXECUTABLE": str(cmake), **environment},
            capture_output=True,
            text=True,
        )

    return build


def test_a_failing_native_build_falls_back_to_a_pure_python_wheel_of_the_library_alone(
    build_with_broken_cmake, tmp_path
):
    built = build_with_broken_cmake(SKETCHOPTIM_REQUIRE_NATIVE="0")
    assert built.returncode == 0, built.stderr
    assert "CMake configuration failed - retrying" in built.stdout
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"sketchoptim-{sketchoptim.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as content:
        folders = {name.partition("/")[0] for name in content.namelist()}
        scripts = content.read(f"{wheel.name.split('-py3')[0]}.dist-info/entry_points.txt").decode()
    assert folders == {"sketchoptim", f"sketchoptim-{sketchoptim.__version__}.dist-info"}
    assert scripts.split() == ["[console_scripts]", "sketchoptim", "=", "sketchoptim._cli:main"]


def test_a_failing_native_build_is_an_error_where_native_is_required(
    build_with_broken_cmake, tmp_path
):
    built = build_with_broken_cmake(SKETCHOPTIM_REQUIRE_NATIVE="1")
    assert built.returncode != 0
    assert "SKETCHOPTIM_REQUIRE_NATIVE forbids" in built.stdout
    assert not list(tmp_path.glob("*.whl"))


@pytest.fixture(scope="module")
def installed_wheel(tmp_path_factory):
    """A folder with the content of a wheel of this source tree; building it takes half a minute."""
    for program in ("cmake", "c++"):
        if shutil.which(program) is None:
            pytest.skip(f"building a wheel needs {program}")
    folder = tmp_path_factory.mktemp("wheel")
    program = f"from scikit_build_core.build import build_wheel; build_wheel({str(folder)!r})"
    environment = {**os.environ, "SKETCHOPTIM_REQUIRE_NATIVE": "1"}
    subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, check=True, capture_output=True
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        content.extractall(folder / "installed")
    return folder / "installed"


def test_a_wheel_has_a_library_for_every_level_and_no_openmp_runtime(installed_wheel):
    levels = ("base", "v3", "v4") if platform.machine() in ("x86_64", "AMD64") else ("base",)
    libraries = {path.name for path in installed_wheel.rglob("*.so*")}
    assert libraries == {f"libsketchoptim_{level}.so" for level in levels}


def test_a_wheel_trains_without_a_compiler_on_the_openmp_runtime_of_torch(installed_wheel):
    # The interpreter outside the virtual environment does not see the editable installation.
    paths = (str(installed_wheel), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    environment = {
        **os.environ,
        "PATH": "",
        "PYTHONPATH": os.pathsep.join(paths),
        "SKETCHOPTIM_REQUIRE_NATIVE": "1",
    }
    python = getattr(sys, "_base_executable", sys.executable)
    result = subprocess.run(
        [python, "-W", "error", str(ROOT / ".ci" / "smoke.py")],
        cwd=installed_wheel,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert str(installed_wheel) in result.stdout
