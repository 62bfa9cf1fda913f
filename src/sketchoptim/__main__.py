"""`python -m sketchoptim` is `sketchoptim`."""

from .cli import main

if __name__ == "__main__":
    main()
