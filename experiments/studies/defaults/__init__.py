"""Which memory should tables have by default? Small tasks, a grid of memories and rates, a rule."""
