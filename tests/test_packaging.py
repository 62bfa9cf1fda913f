import subprocess
import sys
from importlib.metadata import version
from importlib.resources import files

import sketchoptim

OPTIONAL = ("lightning", "matplotlib", "rich", "tensorboard", "transformers", "typer")


def test_version_is_the_one_of_the_installed_metadata():
    assert sketchoptim.__version__ == version("sketchoptim")


def test_type_information_is_shipped():
    assert (files("sketchoptim") / "py.typed").is_file()


def test_import_needs_no_optional_dependency():
    # None in sys.modules makes any import of that name raise, as if it were not installed.
    program = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL})); import sketchoptim"
    subprocess.run([sys.executable, "-c", program], check=True)
