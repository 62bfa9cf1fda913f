"""`python -m experiments` is `experiments`."""

import sys

from .errors import user_message


def main() -> None:
    """Runs the command line, or prints which package it lacks."""
    try:
        from .commands import build_app
    except ModuleNotFoundError as error:
        message = user_message(error)
        if message is None:
            raise
        sys.exit(f"error: {message}")
    build_app()()


if __name__ == "__main__":
    main()
