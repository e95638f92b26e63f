"""The listener agent beside ordinary turn-taking: who answers when, and what an interruption costs.

Knows both, the speaker, and what is counted. Words come every `gap` ticks. When two tokens of the answer have
been said, the speaker breaks in with a change ("no wait, plus four?"), or does not. The *listener* asks
itself after each word whether to answer. *Turns* is the ordinary loop: it waits for `silence` ticks without a
word, encodes all of the conversation from its start, and hears nothing until it has said its answer; with a
silence of 0 it is told when the speaker has ended, as by a button.

Counted: whether the last answer is right; answers begun before the question was complete (too early); ticks
from the last word of the question to the first token of the answer, and from the last word of the change to
that of the next; tokens said from when the speaker broke in until it had ended (talked over).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from ..agents.listener import listener
from ..agents.turns import Turns
from ..tasks import make_utterance
from ..tasks.speech import Utterance
from .clock import Clock, results_of

if TYPE_CHECKING:
    from ..engine.blocks import CacheBlock
    from ..llm import AsyncLLM

HEARD = "Heard:"
CLOSING = "\nAnswer now? yes\n"
MOST = 20
"""Tokens of an answer."""
BREAKS_IN = 2
"""Tokens of an answer that the speaker listens to."""
WAITS = 40
"""Ticks that the speaker waits for an answer."""


@dataclass
class Speaker:
    """Says an utterance, and breaks in with a change unless that is ""; knows when what was said to it."""

    clock: Clock
    utterance: Utterance
    change: str
    answer: str  # that is right in the end
    gap: int
    spoken: list[int] = field(default_factory=list)  # when each word was said
    tokens: list[tuple[int, int, int]] = field(default_factory=list)
    """Of answers: tick, how many words had been said then, and how many of them are answered."""

    @property
    def num_words(self) -> int:
        """Of the utterance."""
        return len(self.utterance.words)

    @property
    def all_words(self) -> int:
        """With those of the change."""
        return self.num_words + len(self.change.split())

    async def words(self) -> AsyncIterator[str]:
        """What it says."""
        async for word in self.clock.paced(self.utterance.words, self.gap):
            self.spoken.append(self.clock.now)
            yield word
        end = self.clock.now + WAITS
        while self.clock.now < end and len(self._ticks(self.num_words)) < BREAKS_IN:
            await self.clock.until(self.clock.now + 1)
        async for word in self.clock.paced(self.change.split(), self.gap):
            self.spoken.append(self.clock.now)
            yield word

    def hears(self, token: str, answered: int | None = None) -> None:
        """A token of an answer, to so many words; None: to all that were said."""
        said = len(self.spoken)
        self.tokens.append((self.clock.now, said, said if answered is None else answered))

    def _ticks(self, words: int) -> list[int]:
        """When the tokens came of the answer to exactly so many words."""
        return [tick for tick, _, answered in self.tokens if answered == words]

    def numbers(self, last: str) -> dict[str, list[float]]:
        """The measures, of a conversation that ended with this answer."""
        first, second = self._ticks(self.num_words), self._ticks(self.all_words)
        right = float(last.strip() == self.answer)
        numbers = {
            "too early": [float(any(said < self.num_words for _, said, _ in self.tokens))],
            "question to answer": [float(first[0] - self.spoken[self.num_words - 1])] if first else [],
        }
        if not self.change:
            return {"right": [right], **numbers}
        over = sum(said > self.num_words and answered < self.all_words for _, said, answered in self.tokens)
        return {
            **numbers,
            "right after a change": [right],
            "change to answer": [float(second[0] - self.spoken[-1])] if second else [],
            "talked over": [float(over)],
        }


def speakers(clock: Clock, count: int, gap: int, seed: int = 0) -> list[Speaker]:
    """So many, with utterances that were held out of training; every other one breaks in. The same seed gives
    the same."""
    rng = Random(f"listening/{seed}")
    made = []
    for number in range(count):
        utterance = make_utterance(rng, held_out=True)
        change, changed = utterance.changed(rng)
        breaks_in = number % 2 == 1
        answer = changed.answer if breaks_in else utterance.answer
        made.append(Speaker(clock, utterance, change if breaks_in else "", answer, gap))
    return made


async def listened(llm: AsyncLLM, speaker: Speaker, name: str) -> tuple[str, list[CacheBlock]]:
    """The agent's way: its last answer, and its blocks."""
    agent = listener(
        llm,
        speaker.words(),
        opening=HEARD,
        closing=CLOSING,
        speak=speaker.hears,
        max_tokens=MOST,
        name=name,
        enable_thinking=False,
    )
    exchanges = (await results_of(agent))["respond"]
    return exchanges[-1].said, list(agent.blocks.values())


async def took_turns(
    llm: AsyncLLM, speaker: Speaker, name: str, silence: int
) -> tuple[str, list[CacheBlock]]:
    """The loop's way: its last answer, and its blocks, which are freed."""
    marks = Turns.of(llm, enable_thinking=False)
    heard: list[str] = []
    blocks: list[CacheBlock] = []
    text, answer, answered = marks.opening, "", 0

    async def hear() -> None:
        async for word in speaker.words():
            heard.append(word)

    hearing = asyncio.create_task(hear())
    while not hearing.done() or answered < len(heard):
        if not _is_over(speaker, heard[answered:], silence, hearing.done()):
            await speaker.clock.until(speaker.clock.now + 1)
            continue
        text += f"{HEARD} {' '.join(heard[answered:])}{CLOSING}{marks.answering}"
        answered = len(heard)
        blocks.append(await llm.create_block(name))
        stream = llm.generate(text, [blocks[-1]], max_tokens=MOST, name="loop")
        async for token in stream:
            speaker.hears(token, answered)
        await llm.free_block(blocks[-1])
        answer = stream.text
        text += answer + marks.next
    await hearing
    return answer, blocks


def _is_over(speaker: Speaker, words: list[str], silence: int, ended: bool) -> bool:
    """Is it the loop's turn?"""
    if not words:
        return False
    if not silence:
        return words[-1].endswith("?")
    return ended or speaker.clock.now - speaker.spoken[-1] >= silence
