"""Our docstrings in Markdown, for mkdocstrings: fences around what is to be shown as it stands."""

import re
from typing import Any

import griffe

# An example begins with >>> and ends where a blank line or the docstring does.
_EXAMPLE = re.compile(r"^([ ]*)>>> .*\n?(?:[ ]*\S.*\n?)*", re.MULTILINE)
# A table has a line of equals signs above and below it.
_TABLE = re.compile(r"^([ ]*)={3,}  =.*\n(?:.*\n)*?\1={3,}  =.*\n", re.MULTILINE)


class MarkdownDocstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = in_markdown(obj.docstring.value)


def in_markdown(text: str) -> str:
    """The docstring with fences, and without the second colon that announces literal text."""
    fenced = _EXAMPLE.sub(lambda it: f"{it[1]}```pycon\n{it[0].rstrip()}\n{it[1]}```\n", text)
    fenced = _TABLE.sub(lambda it: f"{it[1]}```text\n{it[0]}{it[1]}```\n", fenced)
    return re.sub(r"::$", ":", fenced, flags=re.MULTILINE)
