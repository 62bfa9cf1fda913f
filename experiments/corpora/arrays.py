"""Arrays of numbers in NumPy's files."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np


def load_array(path: str | Path) -> Any:
    """The array in a .npy file, or the arrays in an .npz file by name."""
    try:
        return np.load(path)
    except (EOFError, ValueError, zipfile.BadZipFile):
        raise ValueError(
            f"{path} must be a .npy or .npz file of numbers; save it by NumPy"
        ) from None
