"""Studies: programs that each answer one question, `python -m experiments.studies.<name>`."""
