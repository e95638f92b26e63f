"""Files of agents: the text of their coroutines beside the memory of their blocks.

Knows agents and Python's syntax; the format and the memory are `block_files`'. Loading runs no code: a
coroutine comes back as text, and it is executed when the agent starts it.
"""

from __future__ import annotations

import ast
import builtins
import os
import symtable
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from . import block_files
from .engine.storing import restore
from .sources import Source

if TYPE_CHECKING:
    from .agent import Agent
    from .llm import AsyncLLM

A = TypeVar("A", bound="Agent")


@dataclass(frozen=True, slots=True)
class SavedAgent:
    """The part of a file that is not memory."""

    name: str
    sources: dict[str, str]  # by the coroutine's name, in the order of their definition
    blocks: dict[str, int]  # the agent's name for a block -> its number in the file
    left_out: tuple[str, ...]  # what it held and a file cannot hold, as people read it

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "name": self.name,
            "sources": self.sources,
            "blocks": self.blocks,
            "left_out": list(self.left_out),
        }

    @staticmethod
    def of(plain: Any, num_blocks: int) -> SavedAgent:
        """From what JSON has. Raises ValueError for anything else, and for sources that define no
        coroutine of their name."""
        try:
            saved = SavedAgent(
                plain["name"],
                {**plain["sources"]},
                {**plain["blocks"]},
                tuple(plain["left_out"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"its agent is not whole: {error!r}") from error
        texts = (saved.name, *saved.sources.values(), *saved.left_out)
        if not saved.name or not all(isinstance(text, str) for text in texts):
            raise ValueError("its agent is not whole: a name or a source is no text")
        if {*saved.blocks.values()} != set(range(num_blocks)):
            raise ValueError(f"its agent names blocks {saved.blocks}, and {num_blocks} are there")
        for name, source in saved.sources.items():
            parsed(saved.name, name, source)
        return saved


def parsed(agent: str, name: str, source: str) -> Source:
    """The source of a coroutine, checked. Raises ValueError where it could not be executed."""
    try:
        return Source.parse(name, source, f"<{agent}.{name}>")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the source of coroutine {name!r} cannot be run again: {error}") from error


# ---- saving -----------------------------------------------------------------------------------------


async def save(agent: Agent, file: str | os.PathLike[str]) -> Path:
    """Write an agent's code and blocks; see `Agent.save`."""
    for name, coroutine in agent.coroutines.items():
        if not coroutine.source:
            raise ValueError(
                f"the source of coroutine {name!r} is not known, since no file and no cell holds it: define "
                "it in a cell, or with agent.define(name, source, namespace)"
            )
        parsed(agent.name, name, coroutine.source)
    blocks = list({block.id: block for block in agent.blocks.values()}.values())
    saved = SavedAgent(
        agent.name,
        {name: coroutine.source for name, coroutine in agent.coroutines.items()},
        {name: blocks.index(block) for name, block in agent.blocks.items()},
        tuple(_left_out(agent)),
    )
    path = await block_files.save(agent.llm._engine, file, blocks, saved.plain())
    if saved.left_out:
        what = f"{path} holds the code and the blocks of agent {agent.name!r}"
        caller = 4  # of `Agent.save`, in front of which its keywords are checked
        warnings.warn(f"{what}, and not {', '.join(saved.left_out)}", stacklevel=caller)
    return path


def _left_out(agent: Agent) -> Iterator[str]:
    for name, event in agent.events.items():
        yield f"event {name!r} ({'set' if event.is_set() else 'not set'})"
    for name, queue in agent.queues.items():
        yield f"queue {name!r} ({queue.qsize()} waiting in it)"
    for name in agent.tools:
        yield f"tool {name!r}"


# ---- loading ----------------------------------------------------------------------------------------


async def load(
    kind: type[A], file: str | os.PathLike[str], llm: AsyncLLM, namespace: dict[str, Any] | None
) -> A:
    """The agent that a file holds; see `Agent.load`."""
    from .llm import AsyncLLM

    if not isinstance(llm, AsyncLLM):
        raise TypeError(f"an agent needs an AsyncLLM, not {type(llm).__name__}: Agent.load(file, llm)")
    if namespace is None:
        namespace = sys.modules["__main__"].__dict__
    elif not isinstance(namespace, dict):
        raise TypeError(f"namespace is a dict of names, such as globals(), not {type(namespace).__name__}")
    engine, path = llm._engine, Path(file)
    engine.check_usable()
    stored, plain = await block_files.opened(engine, path)
    if plain is None:
        raise ValueError(f"{path} holds blocks and no agent: take them with llm.load_blocks(file)")
    try:
        saved = SavedAgent.of(plain, len(stored.blocks))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    _check_free(kind, llm, saved.name)
    blocks = await restore(engine, stored)
    try:
        _check_free(kind, llm, saved.name)  # it may have been started meanwhile
    except BaseException:
        blocks.clear()  # the traceback would keep them alive
        raise
    agent = kind(llm, saved.name)
    agent.become(
        {name: parsed(saved.name, name, source).text for name, source in saved.sources.items()},
        {name: blocks[number] for name, number in saved.blocks.items()},
        namespace,
    )
    print(_told(path, saved, namespace))
    return agent


def _check_free(kind: type[Agent], llm: AsyncLLM, name: str) -> None:
    """Raise unless the engine has no agent of this name, or one that may become another."""
    known = llm._agents.get(name)
    if known is None:
        return
    if not isinstance(known, kind):
        its = type(known).__name__
        raise TypeError(f"agent {name!r} of this engine is a {its}: load it with {its}.load")
    if known.state in ("running", "ending"):
        raise ValueError(f"agent {name!r} of this engine runs: `await agent.stop()` first, then load")


def _told(path: Path, saved: SavedAgent, namespace: Mapping[str, Any]) -> str:
    """What loading says: the code, and what has to be there before it runs."""
    lines = [
        f"Agent {saved.name!r} from {path}, with blocks {', '.join(saved.blocks) or 'none'}. Nothing of its "
        "code has run; start() runs it:"
    ]
    missing = []
    for name, source in saved.sources.items():
        lines += ["", source.rstrip()]
        if names := unresolved_names(parsed(saved.name, name, source), namespace):
            missing.append(f"{name} needs {', '.join(names)}")
    if missing:
        lines += ["", f"Names that are not defined here: {'; '.join(missing)}. Define them before start()."]
    if saved.left_out:
        made = "events and queues are made anew when they are asked for"
        lines += ["", f"Not in the file: {', '.join(saved.left_out)}; {made}."]
    return "\n".join(lines)


def unresolved_names(source: Source, namespace: Mapping[str, Any]) -> list[str]:
    """Names that a coroutine reads, and that neither it nor `namespace` nor Python defines; sorted.

    Nothing is executed. Variables of a function around it count: a file does not hold them.
    """
    table = symtable.symtable(ast.unparse(source.tree()), source.file, "exec")
    return sorted(set(_global_names(table)).difference(namespace, dir(builtins)))


def _global_names(table: symtable.SymbolTable) -> Iterator[str]:
    for symbol in table.get_symbols():
        if symbol.is_referenced() and symbol.is_global():
            yield symbol.get_name()
    for child in table.get_children():
        yield from _global_names(child)
