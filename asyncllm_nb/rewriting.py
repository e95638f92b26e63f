"""What a model is told that is to rewrite a coroutine, and what an agent runs once it has.

Knows text: the task, the request, the code that runs a source in the sandbox. Tries and judges nothing.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .candidates import EXAMPLE, TOOL
from .engine.blocks import CacheBlock
from .llm import AsyncLLM
from .sandbox import Limits, Ran
from .sandbox_llm import OFFERED, READY_MADE

Author = AsyncLLM | Callable[[str], str | Awaitable[str]]
"""Who writes: a model, or a function of the request."""

ANSWER_TOKENS = 2048
SHOWN_CHARACTERS = 600
"""Of each reason that the model is told."""


@dataclass(frozen=True)
class Trial:
    """What a score is given for: how the run ended, and the copies of the blocks as it left them."""

    ran: Ran
    blocks: Mapping[str, CacheBlock]

    @property
    def result(self) -> Any:
        """What the coroutine returned. It comes from code that nobody has checked."""
        return self.ran.result


@dataclass(frozen=True)
class EditingTask:
    """What a coroutine is to be good at.

    Attributes
    ----------
    coroutine: the name of the agent's coroutine that is rewritten.
    goal: what it is for, as the model is told.
    score: a number for a `Trial`, higher is better; may be async. Called for runs that returned only.
    blocks: the agent's blocks that the coroutine gets, by the agent's names.
    writes: those of them that it may change; None: all.
    inputs: more that it gets, by name: what JSON can hold.
    """

    coroutine: str
    goal: str
    score: Callable[[Trial], float | Awaitable[float]]
    blocks: Sequence[str] = ()
    writes: Sequence[str] | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for names in (self.blocks, self.writes):
            if isinstance(names, str):
                raise TypeError(f"blocks and writes are lists of names: [{names!r}], not {names!r}")
        if not callable(self.score):
            raise TypeError(f"score is a function of a Trial that gives a number, not {self.score!r:.60}")
        unknown = sorted(set(self.writes or ()) - set(self.blocks))
        if unknown:
            raise ValueError(f"writes names {', '.join(unknown)}, which is not among blocks")
        for name in self.given:
            if not name.isidentifier():
                raise ValueError(f"{name!r} is no Python name, and the coroutine uses it by name")
        if len(set(self.given)) < len(self.given):
            raise ValueError(f"each name is given once: {', '.join(self.given)}")
        try:
            json.dumps(dict(self.inputs), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"inputs are what JSON can hold: {error}") from error

    @property
    def given(self) -> tuple[str, ...]:
        """The names that the coroutine gets."""
        return ("llm", *self.blocks, *self.inputs)


@dataclass(frozen=True)
class Attempt:
    """What became of one proposal.

    `score` and `against`: its score and that of the code that ran, on copies of the same blocks; None:
    it did not get that far. `version`: its number if it was accepted. `reason`: why not. `ran`: how its
    trial ended. `answer`: the model's text.
    """

    source: str | None
    score: float | None
    against: float | None
    version: int | None
    reason: str
    ran: Ran | None
    answer: str = field(default="", repr=False)

    @property
    def accepted(self) -> bool:
        return self.version is not None


def request_text(
    task: EditingTask, source: str, score: float | None, failure: str, attempts: Sequence[Attempt]
) -> str:
    """What the model is asked.

    `score`, `failure`: of the code that runs now (a score, or why it has none). `attempts`: proposals
    that it is reminded of.
    """
    standing = f"Its score is {score:g}" if score is not None else f"It could not be tried: {_short(failure)}"
    writes = task.blocks if task.writes is None else task.writes
    parts = [
        task.goal.strip(),
        f"This is done by the coroutine `{task.coroutine}`, which is now:",
        f"```python\n{source.strip()}\n```",
        f"{standing}. A higher score is better.",
        "It uses the names below, without importing them, and may take any of them as parameters:\n"
        "- `llm`, with `create_block`, `forward`, `generate`, `probe`, `fork`, `merge_blocks`, "
        "`append_block`, `replace`, `clear`, `free_block`, `encode`, `turn`, `chat_prompt`\n"
        + "".join(
            f"- the block `{name}`{'' if name in writes else ', which it may only read'}\n"
            for name in task.blocks
        )
        + "".join(f"- `{name}`, which is {_short(repr(value))}\n" for name, value in task.inputs.items())
        + f"- the modules {', '.join(READY_MADE)}; it may import {', '.join(OFFERED[len(READY_MADE) :])}",
        "It has no files, no network and no processes. What it returns has to fit into JSON.",
    ]
    for attempt in attempts:
        if attempt.source is not None:
            became = "was taken" if attempt.accepted else f"was not taken: {_short(attempt.reason)}"
            parts.append(f"This proposal {became}\n```python\n{attempt.source.strip()}\n```")
        else:
            parts.append(f"An earlier answer could not be read: {_short(attempt.reason)}")
    parts.append(f"Propose better code: call the tool {TOOL} with the whole source, like this:\n{EXAMPLE}")
    return "\n\n".join(parts)


async def answer_of(author: Author, request: str) -> str:
    """What a model or a function answers to a request. Raises TypeError if that is no text."""
    if isinstance(author, AsyncLLM):
        block = await author.create_block("editor")
        stream = author.generate(
            author.chat_prompt(request), [block], max_tokens=ANSWER_TOKENS, stop="</tool_call>", name="editor"
        )
        await stream
        return stream.full_text
    answer = author(request)
    text = await answer if inspect.isawaitable(answer) else answer
    if not isinstance(text, str):
        raise TypeError(f"the author answers with text that has a tool call in it, not {text!r:.60}")
    return text


def in_sandbox(task: EditingTask, version: int, source: str, limits: Limits) -> str:
    """The text of the coroutine that an agent runs for `source`: it hands it to the sandbox. So the
    agent's own code shows what runs and how, and stays in the sandbox when it is saved and loaded."""
    lines = "".join(f"        {line!r}\n" for line in source.splitlines(keepends=True))
    return (
        f"async def {task.coroutine}(agent):\n"
        f"    # Version {version}, by a model. It runs in a child process, which has what is named here.\n"
        f"    from asyncllm_nb.sandbox import Limits, run_sandboxed\n\n"
        f"    source = (\n{lines}    )\n"
        f"    blocks = {{name: await agent.block(name) for name in {tuple(task.blocks)!r}}}\n"
        f"    return await run_sandboxed(\n"
        f"        {task.coroutine!r},\n"
        f"        source,\n"
        f"        agent.llm,\n"
        f"        blocks,\n"
        f"        writes={None if task.writes is None else tuple(task.writes)!r},\n"
        f"        inputs={json.loads(json.dumps(dict(task.inputs)))!r},\n"
        f"        limits={limits!r},\n"
        f"    )\n"
    )


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"
