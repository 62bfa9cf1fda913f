"""The benchmark: the time of an optimizer's step, ours against others'."""
