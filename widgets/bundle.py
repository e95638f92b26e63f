"""One JavaScript module out of several files: what a widget sends to the browser.

A notebook's front end loads a widget's code as text, which cannot import its neighbours. So each file
stays a module of its own, which a test can load, and here they are joined in the order of their imports,
without their import lines, comments, indentation and needless line breaks. Top-level names are unique
over all files.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent

_IMPORT = re.compile(r'^import (?:.*? from )?"\./([\w-]+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?!default)", re.MULTILINE)
_OPEN = re.compile(r"(?<=[{(\[,;])\n")
"""A line break that ends no statement. No string of ours has one in it."""
_TRAILING = re.compile(r'(?<=[;,{)\]]) // [^"`]*$')
"""A comment behind code. No string of ours holds a slash pair behind such a sign and a blank."""


@functools.cache
def source(name: str) -> str:
    """The text of one file of this folder."""
    return (FOLDER / name).read_text(encoding="utf-8")


def modules(entry: str, extra: Sequence[str] = ()) -> list[str]:
    """`entry` and all that it imports, each after what it imports; `extra` ones before the entry."""
    found: list[str] = []

    def visit(name: str) -> None:
        for imported in _IMPORT.findall(source(f"{name}.js")):
            if imported not in found:
                visit(imported)
        if name not in found:
            found.append(name)

    for name in (*extra, entry):
        visit(name)
    return found


@functools.cache
def bundle(entry: str, extra: tuple[str, ...] = ()) -> str:
    """One module with the code of `entry`, of `extra` modules and of all that they import."""
    return "\n".join(_lean(source(f"{name}.js")) for name in modules(entry, extra)) + "\n"


def _lean(text: str) -> str:
    text = _EXPORT.sub("", _IMPORT.sub("", text))
    return _OPEN.sub("", "\n".join(_code_lines(text)))


def _code_lines(text: str) -> Iterator[str]:
    """Lines without indentation, comments and empty lines. No line of ours that starts like a
    comment is part of a string."""
    in_comment = False
    for line in text.splitlines():
        line = line.strip()
        if in_comment or line.startswith("/*"):
            in_comment = not line.endswith("*/")
        elif line and not line.startswith("//"):
            yield _TRAILING.sub("", line)


def style() -> str:
    """The style sheet of all widgets."""
    return source("style.css")
