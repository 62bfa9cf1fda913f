"""`python -m sketchoptim` is `sketchoptim`."""

from ._cli import main

if __name__ == "__main__":
    main()
