"""The code of Markdown pages, and what they say that it prints."""

import contextlib
import io
import re
from typing import NamedTuple

import torch

# a block of code and, where one follows at once, the text that it prints
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    line: int
    code: str
    printed: str | None


def blocks(markdown: str) -> list[Block]:
    return [
        Block(markdown.count("\n", 0, match.start(1)), match[1], match[2])
        for match in BLOCK.finditer(markdown)
    ]


def run(found: list[Block], page: str) -> None:
    """Runs the blocks of a page one after the other, in one namespace."""
    namespace = {"__name__": page}
    with torch.random.fork_rng(devices=[]):
        for block in found:
            output = io.StringIO()
            # as many lines as come before the block, so that a traceback has the page's lines
            program = compile("\n" * block.line + block.code, page, "exec")
            with contextlib.redirect_stdout(output):
                exec(program, namespace)
            if block.printed is not None:
                assert output.getvalue() == block.printed, f"{page}, line {block.line}"
