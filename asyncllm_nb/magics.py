"""``%load_ext asyncllm_nb``: %blocks, %views, %trace and %%coroutine; the Tab key completes arguments.

Knows IPython, and the engines and agents in a notebook's names. What is shown comes from
``llm.snapshot()`` and ``llm.trace``; only %%coroutine changes anything: an agent's code.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from html import escape
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .agent import Agent
from .display import show_html
from .engine.trace import StepRecord
from .host import shell
from .inputs import known_name
from .llm import AsyncLLM
from .markup import block_label, code, muted, table, text_table
from .sources import as_definition
from .summary import summarise

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

STEPS = 10
"""Steps that %trace shows unless it is told how many."""

TRACE_WORDS = ("save", "html", "plot")


class Shown:
    """A table as a cell shows it: HTML, and the same as plain text."""

    def __init__(self, html: str, text: str) -> None:
        self._html = html
        self._text = text

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return self._html


def load_ipython_extension(ip: InteractiveShell) -> None:
    """Called by ``%load_ext asyncllm_nb``."""
    commands = Commands(ip.user_ns)
    for name, command in commands.by_name.items():
        ip.register_magic_function(command, "line", name)  # type: ignore[arg-type]  # wrongly typed
        for key in (f"%{name}", name):  # with and without the sign
            ip.set_hook("complete_command", commands.complete, str_key=key)  # type: ignore[no-untyped-call]
    ip.register_magic_function(commands.coroutine, "cell", "coroutine")  # type: ignore[arg-type]  # the same
    ip.set_hook("complete_command", commands.complete_agents, str_key="%%coroutine")  # type: ignore[no-untyped-call]


class Commands:
    """The commands over the engines that `names`, a notebook's, hold."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self.by_name: dict[str, Callable[[str], Any]] = {
            "blocks": self.blocks,
            "views": self.views,
            "trace": self.trace,
        }

    # ---- commands -------------------------------------------------------------------------------

    def blocks(self, line: str = "") -> Shown:
        """%blocks [ENGINE] [BLOCK ...]: the live blocks, or the whole text of some.

        ENGINE is needed only if the notebook has several: its name, or the variable that holds it.
        """
        llm, words = self._engine(line)
        if not words:
            return Shown(show_html(llm), _blocks_text(llm.snapshot()))
        blocks = [llm.blocks[known_name(word, llm.blocks, "live block")] for word in words]
        html = "".join(
            f"<div>{block_label(b.id, b.name)} {muted(f'· {b.num_tokens} tokens')}</div>"
            f'<pre style="white-space:pre-wrap;margin:2px 0 8px 0">{escape(b.text)}</pre>'
            for b in blocks
        )
        return Shown(html, "\n\n".join(f"{b.name}: {b.num_tokens} tokens\n{b.text}" for b in blocks))

    def views(self, line: str = "") -> Shown:
        """%views [ENGINE] [COROUTINE ...]: what each coroutine reads, in order; the last is written."""
        llm, words = self._engine(line)
        streams, names = _streams(llm)
        if words:
            wanted = [known_name(word, _names_of(streams), "stream") for word in words]
            streams = [stream for stream in streams if stream["name"] in wanted]
        live = {block.id: block.num_tokens for block in llm.blocks.values()}
        columns = ("coroutine", "state", "reads, in order", "writes", "tokens")
        html_rows, text_rows = [], []
        for stream in streams:
            *read, written = stream["view"]
            facts = [stream["name"], stream["reason"] or stream["state"]]
            count = str(stream["tokens"])
            labels = [_label(number, names[number], live) for number in stream["view"]]
            html_rows.append([*map(escape, facts), " → ".join(labels[:-1]), labels[-1], count])
            text_rows.append([*facts, " → ".join(names[number] for number in read), names[written], count])
        if not streams:
            return Shown(muted("no coroutine has read a stream yet"), "no coroutine has read a stream yet")
        return Shown(table(columns, html_rows, numeric=(4,)), text_table(columns, text_rows))

    def trace(self, line: str = "") -> Any:
        """%trace [ENGINE] [N | save FILE | html FILE | plot]: the last N steps; to a file; a figure."""
        llm, words = self._engine(line)
        match words:
            case []:
                return _steps(list(llm.trace.steps)[-STEPS:])
            case [number] if number.isdigit():
                return _steps(list(llm.trace.steps)[-int(number) :] if int(number) else [])
            case ["plot"]:
                stats = llm.stats()
                return summarise(llm.trace.steps, pages=stats["pages"], slots=stats["slots"])
            case ["save", file]:
                return llm.trace.save(Path(file).expanduser())
            case ["html", file]:
                return llm.trace.to_html(Path(file).expanduser())
            case [("save" | "html") as word, *_]:
                raise ValueError(f"%trace {word} takes one file name: %trace {word} run.{_ENDINGS[word]}")
            case _:
                raise ValueError(
                    f"%trace takes a number of steps, save FILE, html FILE or plot, not {' '.join(words)!r}"
                )

    def coroutine(self, line: str, cell: str) -> None:
        """%%coroutine AGENT.NAME: the cell is the body of a coroutine of an agent.

        AGENT: the variable that holds it, or its name. The same as a cell with ``@agent.coroutine`` above
        ``async def NAME():`` and this body: names of the notebook are read, those assigned are its own.
        """
        agent, found, name = line.strip().rpartition(".")
        if not found or not name.isidentifier() or iskeyword(name):
            raise ValueError(f"%%coroutine takes AGENT.NAME, as in %%coroutine solver.think, not {line!r}")
        agents = self.agents()
        chosen = agents[known_name(agent, agents, "agent of this notebook")]
        ip = shell()
        text = as_definition(name, ip.transform_cell(cell))
        file = ip.compile.cache(text, ip.execution_count)
        chosen.define(name, text, self._names, file=file)

    # ---- arguments ------------------------------------------------------------------------------

    def agents(self) -> dict[str, Agent]:
        """The notebook's agents by what a line may call them: variables first, then names."""
        values = list(self._names.items())
        found = {key: value for key, value in values if isinstance(value, Agent) and key[0] != "_"}
        for llm in self.engines().values():
            for name, agent in llm._agents.items():
                found.setdefault(name, agent)
        return found

    def complete_agents(self, _: object, event: Any) -> list[str]:
        """What may stand behind %%coroutine: agents with their coroutines, and a dot for a new one."""
        agents = self.agents()
        known = [f"{key}.{name}" for key, agent in agents.items() for name in agent.coroutines]
        return sorted([*known, *(f"{key}." for key in agents)])

    def engines(self) -> dict[str, AsyncLLM]:
        """The notebook's open engines by what a line may call them: variables first, then names."""
        found: dict[str, AsyncLLM] = {}
        for variable, value in list(self._names.items()):
            if isinstance(value, AsyncLLM) and not variable.startswith("_") and not value.stats()["closed"]:
                found[variable] = value
        for llm in list(found.values()):
            found.setdefault(llm.snapshot()["name"], llm)
        return found

    def _engine(self, line: str) -> tuple[AsyncLLM, list[str]]:
        """The engine that a line is about, and the words after its name."""
        words, engines = _split(line), self.engines()
        if not engines:
            raise ValueError("no open engine in this notebook: make one with AsyncLLM(...)")
        if words and words[0] in engines:
            return engines[words[0]], words[1:]
        if len({id(llm) for llm in engines.values()}) > 1:
            raise ValueError(f"which engine? Begin with one of {', '.join(engines)}")
        return next(iter(engines.values())), words

    def complete(self, _: object, event: Any) -> list[str]:
        """What may come next behind the words of a line; IPython picks those that fit."""
        command, *words = _split(event.line[: len(event.line)])
        if words and not event.line.endswith((" ", "\t")):
            words.pop()  # the word that is being typed
        return sorted(self._candidates(command.lstrip("%"), words))

    def _candidates(self, command: str, words: list[str]) -> Iterator[str]:
        engines = self.engines()
        several = len({id(llm) for llm in engines.values()}) > 1
        if not words and several:
            yield from engines
            return
        llm = engines.get(words[0]) if words else None
        if llm is not None:
            words = words[1:]
        llm = llm or next(iter(engines.values()), None)
        if llm is None:
            return
        if command == "trace":
            yield from TRACE_WORDS if not words else ()
        else:
            names = llm.blocks if command == "blocks" else _names_of(_streams(llm)[0])
            yield from (shlex.quote(name) if " " in name else name for name in names if name not in words)


_ENDINGS = {"save": "json", "html": "html"}


def _split(line: str) -> list[str]:
    """Words of a line; quotes hold a name with spaces together, an open one is closed at the end."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.replace('"', " ").replace("'", " ").split()


def _names_of(streams: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(stream["name"] for stream in streams if stream["name"]))


def _streams(llm: AsyncLLM) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Streams as the trace has them, those that have ended lately too, and the names of all blocks."""
    requests = llm.trace.state()["requests"].values()
    names = {record["id"]: record["name"] for record in llm.trace.plain(0) if record["t"] == "block"}
    names |= {block.id: block.name for block in llm.blocks.values()}
    streams = [request for request in requests if request["kind"] == "stream"]
    return streams, {number: names.get(number, f"block{number}") for s in streams for number in s["view"]}


def _label(number: int, name: str, live: dict[int, int]) -> str:
    """`live`: tokens of the blocks that are not freed."""
    count = str(live[number]) if number in live else "(freed)"
    return f"{block_label(number, name)} {muted(count)}"


def _blocks_text(snapshot: dict[str, Any]) -> str:
    columns = ("block", "tokens", "span", "version", "written by", "read by")
    rows = [
        [
            b["name"],
            str(b["tokens"]),
            str(b["span"]),
            str(b["version"]),
            b["writer"] or "",
            ", ".join(b["readers"]),
        ]
        for b in snapshot["blocks"]
    ]
    return text_table(columns, rows) if rows else "no blocks"


def _steps(steps: Sequence[StepRecord]) -> Shown:
    """A table of steps, oldest first."""
    columns = ("step", "begins", "takes", "batch", "tokens", "waiting", "pages free")
    rows = [
        [
            str(step.number),
            f"{step.started:.3f} s",
            f"{step.seconds * 1000:.1f} ms",
            step.error or ", ".join(_row_text(row.name, row.kind, row.block) for row in step.rows),
            str(sum(row.num_tokens for row in step.rows)),
            ", ".join(step.waiting),
            str(step.pages_free),
        ]
        for step in steps
    ]
    if not rows:
        return Shown(muted("no step was made yet"), "no step was made yet")
    html_rows = [[escape(cell) if i != 3 else code(cell) for i, cell in enumerate(row)] for row in rows]
    return Shown(table(columns, html_rows, numeric=(0, 1, 2, 4, 6)), text_table(columns, rows))


def _row_text(name: str, kind: str, block: str | None) -> str:
    return f"{name} {kind}" + (f" into {block}" if block else "")
