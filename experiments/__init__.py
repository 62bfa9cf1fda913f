"""Experiments with sketchoptim: data, models, one training loop, recipes, reports and benchmarks.

An application of the library and no part of its wheel: `pip install -e ./experiments`.
"""
