"""Experiments: data, models, one training loop, and what runs on them."""
