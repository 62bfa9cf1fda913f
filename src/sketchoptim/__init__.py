"""Memory-compressed optimizers for PyTorch."""

from importlib.metadata import version

__version__ = version("sketchoptim")
