"""Where a source knows a storage by its type or by the names of its parts, as line numbers."""

import ast
from collections.abc import Callable

from storage_cases import PART_NAMES, STATE_KEYS, STORAGE_NAMES

# Methods whose first argument is a key, or the beginning or the end of one.
KEY_METHODS = {
    "get", "pop", "setdefault", "startswith", "endswith", "removeprefix", "removesuffix",
}  # fmt: skip


def is_class_of_ours(node: ast.AST) -> bool:
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return name in STORAGE_NAMES or (name.endswith("Moment") and name != "Moment")


def asks_for_a_type(node: ast.AST) -> bool:
    """Whether a node compares a type with a storage or a moment, or looks something up by it."""
    match node:
        case ast.Call(func=ast.Name("isinstance" | "issubclass"), args=[_, kinds]):
            return any(map(is_class_of_ours, ast.walk(kinds)))
        case ast.MatchClass(cls=kind):
            return is_class_of_ours(kind)
        case ast.Compare(left=left, comparators=others):
            operands = [it for side in (left, *others) for it in elements(side)]
            return any(is_class_of_ours(it) or is_string(it, STORAGE_NAMES) for it in operands)
        case ast.Dict(keys=keys):
            return any(key is not None and is_class_of_ours(key) for key in keys)
        case ast.MatchValue(value=value):
            return is_string(value, STORAGE_NAMES)
        case _:
            return False


def elements(node: ast.expr) -> list[ast.expr]:
    """What a tuple, list or set literal consists of, else the node itself."""
    return node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]


def is_string(node: ast.AST | None, among: set[str]) -> bool:
    return isinstance(node, ast.Constant) and node.value in among


def names_a_state_key(node: ast.AST) -> bool:
    """Whether a node is the key of a part in an optimizer's state, or builds one."""
    if isinstance(node, ast.JoinedStr):
        suffixes = {f"_{part}" for part in PART_NAMES}
        return any(is_string(it, suffixes) for it in node.values)
    return is_string(node, STATE_KEYS)


def names_a_part(node: ast.AST) -> bool:
    """Whether a string that is a part's name is used as a key."""
    keys: list[ast.expr | None] = []
    match node:
        case ast.Subscript(slice=key):
            keys = [key]
        case ast.Dict(keys=found):
            keys = found
        case ast.Call(func=ast.Attribute(attr=method), args=[key, *_]) if method in KEY_METHODS:
            keys = [key]
        case ast.Compare(left=left, comparators=others):
            keys = [it for side in (left, *others) for it in elements(side)]
        case ast.Assign(value=ast.Tuple() | ast.List() | ast.Set() as value):
            keys = value.elts
        case ast.For(iter=source) | ast.comprehension(iter=source):
            keys = elements(source)
        case ast.MatchValue(value=key):
            keys = [key]
    return any(is_string(key, PART_NAMES) for key in keys)


def has_moments(node: ast.AST) -> bool:
    """Whether a node brings the tensors of moments into a file."""
    match node:
        case ast.ImportFrom(module=module, names=names):
            imported = {*(module or "").split("."), *(it.name for it in names)}
            return not imported.isdisjoint({"moments", "parts_of"})
        case ast.Import(names=names):
            return any("moments" in it.name.split(".") for it in names)
        case ast.Attribute(attr="tensors" | "moments"):
            return True
        case _:
            return False


def has_no_end(node: ast.AST) -> bool:
    """Whether a match statement may fall through, instead of ending in assert_never."""
    if not isinstance(node, ast.Match):
        return False
    match node.cases[-1]:
        case ast.match_case(
            pattern=ast.MatchAs(pattern=None),
            guard=None,
            body=[ast.Expr(value=ast.Call(func=ast.Name("assert_never")))],
        ):
            return False
        case _:
            return True


def lines_with(source: str, *checks: Callable[[ast.AST], bool]) -> list[int]:
    """The lines of a source with a node for which one of the checks is true."""
    found = (node for node in ast.walk(ast.parse(source)) if any(check(node) for check in checks))
    return sorted(
        {it.iter.lineno if isinstance(it, ast.comprehension) else it.lineno for it in found}
    )


def lines_with_types(source: str) -> list[int]:
    return lines_with(source, asks_for_a_type)


def lines_with_parts(source: str) -> list[int]:
    """Keys of parts anywhere; names of parts, which are common words, where there are moments."""
    if lines_with(source, has_moments):
        return lines_with(source, names_a_state_key, names_a_part)
    return lines_with(source, names_a_state_key)


def lines_with_open_matches(source: str) -> list[int]:
    return lines_with(source, has_no_end)
