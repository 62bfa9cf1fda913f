"""Deferred gradients for the layers of a model that exists, and the way back."""

from ._arm import Deferral, defer_gradients, materialize_gradients

__all__ = ["Deferral", "defer_gradients", "materialize_gradients"]
