"""A monitor: lines of a growing log are read as they come, judged by a probe, explained in the background.

Blocks, and who reads them (each line is a view; the last block is written):

    prompt log                                     watch: a new line
    prompt log [thinker] [probe's note]            watch: asks about it by a probe, which writes nothing
    prompt log [thinker's note] thinker            explain

While the thinker explains one line, it sees those that come. Blocks in brackets are there if asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..agent import Agent
from .common import agent_of, ask, blocks_of, check_choices, with_note
from .feeds import Feed, check_feed, items
from .turns import Turns

if TYPE_CHECKING:
    from ..engine.blocks import CacheBlock
    from ..llm import AsyncLLM


@dataclass(frozen=True)
class Watched:
    """A line and what was made of it."""

    line: str
    chance: float  # of a warning
    warned: bool


def monitor(
    llm: AsyncLLM | Agent,
    rule: str,
    lines: Feed,
    *,
    question: str = "Warn?",
    choices: tuple[str, str] = (" yes", " no"),
    threshold: float = 0.5,
    on_warning: Callable[[str], Any] = lambda line: None,
    explanation_end: str = ".",
    conclusion: str = "\n</think>\n\n",
    probe_reads_thinker: bool = False,
    probe_note: str = "",
    thinker_note: str = "",
    keep: int = 24,
    max_tokens: int = 60,
    name: str = "monitor",
    **template_args: Any,
) -> Agent:
    """An agent with coroutines "watch", which gives all that was `Watched`, and "explain", which gives the
    conclusion that it writes when the lines have ended.

    rule: what to warn of, in words. lines: text from outside; markers in it stay plain text.
    question, choices: what is asked after each line, and the answers for a warning and for none.
    on_warning: called with each line that is warned of.
    explanation_end: what ends the thinker's word on a line. conclusion: what it begins that with.
    max_tokens: most tokens of each.
    probe_reads_thinker: ask under what the thinker has written, too.
    probe_note, thinker_note: what only one of the two is told, so that neither is distracted by the other.
    keep: how many lines the log holds, and the thinker explains; then the older half makes room.
    """
    check_feed(lines)
    check_choices(choices)
    if keep < 2:
        raise ValueError(f"keep must be 2 lines or more, not {keep}")
    agent = agent_of(llm, name)
    llm = agent.llm
    turns = Turns.of(llm, **template_args)
    unexplained = agent.queue("unexplained")
    held, watched = list[str](), list[Watched]()

    async def put(line: str, view: list[CacheBlock]) -> None:
        """Append a line to the log; or replace all of it by the newer lines, with one change."""
        if len(held) < keep:
            await llm.forward(llm.encode(f"{line}\n", control=False), view, logits="none")
        else:
            del held[: -(keep // 2)]
            text = "".join(f"{one}\n" for one in [*held, line])
            await llm.replace(view[-1], llm.encode(text, control=False), view)
        held.append(line)

    @agent.coroutine
    async def watch() -> tuple[Watched, ...]:
        view = [await ask(agent, llm.encode(f"{turns.opening}{rule}\nLog:\n")), await agent.block("log")]
        reads = [*view, await agent.block("thinker")] if probe_reads_thinker else view
        reads = await with_note(agent, reads, probe_note, "probe's note")
        async for line in items(lines):
            await put(line, view)
            chance = (await llm.probe(question, reads, choices))[choices[0]]
            watched.append(Watched(line, chance, chance >= threshold))
            if chance >= threshold:
                on_warning(line)
            unexplained.put_nowait(line)
        unexplained.put_nowait(None)
        return tuple(watched)

    @agent.coroutine
    async def explain() -> str:
        line, explained = await unexplained.get(), 0
        prompt, log, thinker = await blocks_of(agent, "prompt", "log", "thinker")
        view = [*await with_note(agent, [prompt, log], thinker_note, "thinker's note"), thinker]
        while line is not None:
            if explained % keep == 0:
                await llm.clear(thinker)
            begun = llm.encode("\n\n" if thinker.num_tokens else turns.answering)
            begun += llm.encode(f"{line}:", control=False)
            await llm.generate(begun, view, stop=explanation_end, max_tokens=max_tokens, name="explain")
            line, explained = await unexplained.get(), explained + 1
        closing = conclusion if thinker.num_tokens else turns.answering + conclusion
        return await llm.generate(closing, view, max_tokens=max_tokens, name="conclude")

    return agent
