"""The source text of coroutines: taken when they are defined, and made into functions again.

Knows Python's syntax and `linecache`, so that tracebacks show lines of code that no file holds. Knows
no agent and runs nothing: `Source.build` executes a definition when its caller says so.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import CodeType
from typing import Any

Function = Callable[..., Coroutine[Any, Any, Any]]


@dataclass(frozen=True, slots=True)
class Source:
    """The text of one ``async def``, checked; `file` is what tracebacks call it."""

    name: str
    text: str
    file: str

    @staticmethod
    def parse(name: str, text: str, file: str) -> Source:
        """Check that `text` defines ``async def name(...)`` and nothing else. Runs nothing.

        Raises SyntaxError, or ValueError that says what is wrong.
        """
        source = Source(name, textwrap.dedent(text).strip("\n") + "\n", file)
        source.tree()
        return source

    def tree(self) -> ast.Module:
        """The definition without the decorator that registers it: building must not register again."""
        tree = ast.parse(self.text, self.file)
        match tree.body:
            case [ast.AsyncFunctionDef(name=self.name) as definition]:
                kept = [one for one in definition.decorator_list if not _registers(one)]
                definition.decorator_list = kept
                _check(self.name, compile(tree, self.file, "exec"))
                return tree
            case [ast.FunctionDef(name=self.name)]:
                raise ValueError(f"{self.name!r} is a plain function: write `async def {self.name}`")
        raise ValueError(
            f"the source of {self.name!r} is one `async def {self.name}(...)`, nothing beside it"
        )

    def build(self, namespace: dict[str, Any]) -> Function:
        """Execute the definition in `namespace`, which gets no new name, and return the function."""
        if self.file not in linecache.cache:
            lines = self.text.splitlines(keepends=True)
            linecache.cache[self.file] = (len(self.text), None, lines, self.file)
        made: dict[str, Any] = {}
        exec(compile(self.tree(), self.file, "exec"), namespace, made)
        function: Function = made[self.name]
        return function


def source_of(function: Callable[..., Any]) -> str:
    """The text of a function as it is now, without the indentation of where it stands; "" if there is
    none (it was made by `exec`, or typed at a prompt)."""
    try:
        return textwrap.dedent(inspect.getsource(function)).strip("\n") + "\n"
    except (OSError, TypeError):
        return ""


def as_definition(name: str, body: str) -> str:
    """The text of ``async def name():`` with `body`, the text of a cell. Its first line stands where the
    cell's magic line stood, so that line numbers agree. Raises SyntaxError."""
    tree = ast.parse(f"\n{body}")
    if not tree.body:
        body += "\npass"
    inside: set[int] = set()  # lines that begin inside a string, whose text indentation would change
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno is not None:
            inside.update(range(node.lineno + 1, node.end_lineno + 1))
    lines = [
        line if number in inside or not line.strip() else f"    {line}"
        for number, line in enumerate(body.splitlines(), 2)
    ]
    return "\n".join([f"async def {name}():", *lines]) + "\n"


def _check(name: str, module: CodeType) -> None:
    """Raise ValueError for a body that makes the function something else than a coroutine."""
    for code in module.co_consts:
        if isinstance(code, CodeType) and code.co_name == name and code.co_flags & inspect.CO_ASYNC_GENERATOR:
            raise ValueError(f"{name!r} yields, so nobody would run it: a coroutine has no `yield`")


def _registers(decorator: ast.expr) -> bool:
    """Is it ``@some_agent.coroutine``, or a call of that?"""
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(target, ast.Attribute) and target.attr == "coroutine"
