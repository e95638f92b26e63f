"""Code that a model proposes: found in its text, and looked at before anything runs.

Knows Python's syntax, and what a coroutine in the sandbox is given. Runs nothing and guards nothing: it
spares a trial to code that cannot work, with an error that says why.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection

from .agent_files import unresolved_names
from .sandbox_llm import OFFERED, READY_MADE
from .sources import Source

TOOL = "rewrite"
"""The tool that a model calls, with one argument, `source`."""

EXAMPLE = f"""<tool_call>
<function={TOOL}>
<parameter=source>
async def ...
</parameter>
</function>
</tool_call>"""

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]*)>(.*)", re.DOTALL)
_SOURCE = re.compile(r"<parameter=source>(.*?)(?:</parameter>|</function>|\Z)", re.DOTALL)


class CandidateRejected(ValueError):
    """A proposal that cannot work: says why."""


def proposed_source(text: str) -> str:
    """The source in the last tool call of a model's text, in either form that models use: the tags of
    `EXAMPLE`, or JSON with "name" and "arguments" between <tool_call> and </tool_call>.

    Raises CandidateRejected.
    """
    calls = _CALL.findall(text)
    if not calls:
        raise CandidateRejected(f"there is no <tool_call> in the answer; it looks like this:\n{EXAMPLE}")
    body = calls[-1]
    function = _FUNCTION.search(body)
    if function is not None:
        name, found = function[1], _SOURCE.search(function[2])
        source: object = found[1] if found else None
    else:
        try:
            call = json.loads(body)
            name, source = call["name"], call["arguments"].get("source")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CandidateRejected(f"the tool call cannot be read; it looks like this:\n{EXAMPLE}") from None
    if name != TOOL:
        raise CandidateRejected(f"there is no tool {name!r}; call {TOOL!r} with the argument source")
    if not isinstance(source, str) or not source.strip():
        raise CandidateRejected(f"the call of {TOOL!r} has no source")
    return source.strip("\n") + "\n"


def checked_source(name: str, source: str, given: Collection[str]) -> str:
    """The source of a coroutine that can run in the sandbox, without the decorator of an agent.

    `given`: the names that it gets there, which are names it may use and parameters it may take.
    Raises CandidateRejected.
    """
    try:
        parsed = Source.parse(name, source, f"<{name}>")
        tree = parsed.tree()
    except SyntaxError as error:
        raise CandidateRejected(f"line {error.lineno}: {error.msg}: {(error.text or '').strip()}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise CandidateRejected(str(error) or type(error).__name__) from None
    (definition,) = tree.body
    assert isinstance(definition, ast.AsyncFunctionDef)
    if definition.decorator_list:
        raise CandidateRejected(f"{name!r} takes no decorators")
    _check_parameters(name, definition.args, given)
    for node in ast.walk(definition):
        _check_import(node)
    unknown = unresolved_names(parsed, dict.fromkeys((*given, *READY_MADE)))
    if unknown:
        raise CandidateRejected(
            f"{name!r} uses {', '.join(unknown)}, which it does not have: there are {', '.join(given)}, the "
            f"modules {', '.join(READY_MADE)}, and what it defines or imports itself"
        )
    lines = parsed.text.splitlines(keepends=True)
    return "".join(lines[definition.lineno - 1 :])


def _check_parameters(name: str, arguments: ast.arguments, given: Collection[str]) -> None:
    if arguments.posonlyargs or arguments.kwonlyargs or arguments.vararg or arguments.kwarg:
        raise CandidateRejected(f"{name!r} takes plain parameters only: no *, no / and no **")
    required = arguments.args[: len(arguments.args) - len(arguments.defaults)]
    wrong = [parameter.arg for parameter in required if parameter.arg not in given]
    if wrong:
        raise CandidateRejected(
            f"{name!r} takes {', '.join(wrong)}, and nobody would give it that: it may take "
            f"{', '.join(given)}, or nothing"
        )


def _check_import(node: ast.AST) -> None:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or "." * node.level]
    else:
        return
    for module in names:
        if module not in OFFERED:
            raise CandidateRejected(f"{module!r} cannot be imported; what can be is {', '.join(OFFERED)}")
