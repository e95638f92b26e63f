"""The listener: a probe after each word, answers that stop when a word comes, and what is remembered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from helpers import engine, until
from scripted import script

from asyncllm_nb import Agent, AsyncLLM
from asyncllm_nb.agents import listener
from asyncllm_nb.agents.listener import Exchange
from asyncllm_nb.engine.trace import RowRecord
from asyncllm_nb.models import resolve

WORDS = "what is five plus three?".split()
CHANGE = "no wait, plus four?".split()
QUESTION = "Heard: what is five plus three?\nAnswer now? yes\n"
USER, END, ANSWER = "<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def rows_of(llm: AsyncLLM, kind: str = "", block: str | None = "") -> list[RowRecord]:
    rows = [row for step in llm.trace.steps for row in step.rows]
    return [row for row in rows if kind in ("", row.kind) and block in ("", row.block)]


def answers(patch: pytest.MonkeyPatch, llm: AsyncLLM) -> list[str]:
    """Probes say yes behind a question mark. Returns what each of them was about."""
    probe, asked = llm.probe, list[str]()

    async def scripted(question: str, view: list, choices: tuple[str, str]) -> dict[str, float]:  # type: ignore[type-arg]
        asked.append(view[-1].text)
        await probe(question, view, choices)
        yes = float(asked[-1].endswith("?"))
        return {choices[0]: yes, choices[1]: 1 - yes}

    patch.setattr(llm, "probe", scripted)
    return asked


class Saying:
    """Words, each when the one before has been asked about; `then` follows when some tokens are said."""

    def __init__(self, llm: AsyncLLM, asked: list[str], then: list[str], tokens: int) -> None:
        self.llm, self.asked, self.then, self.tokens = llm, asked, then, tokens
        self.said: list[str] = []

    def hears(self, token: str) -> None:
        self.said.append(token)

    async def words(self) -> AsyncIterator[str]:
        for number, word in enumerate(WORDS, 1):
            yield word
            await until(lambda: len(self.asked) >= number)  # noqa: B023  # awaited at once
        if self.then:
            await until(lambda: len(self.said) >= self.tokens)
        for word in self.then:
            yield word


async def test_tiny_hybrid_answers_when_the_question_is_complete() -> None:
    async with engine(resolve("tiny-hybrid")) as llm:
        words = Agent(llm, "phone").queue("words")
        agent = listener(Agent(llm, "phone"), words, enable_thinking=False).start()
        for number, word in enumerate(WORDS, 1):
            words.put_nowait(word)
            while len(rows_of(llm, "probe")) < number:
                await asyncio.sleep(0)
        words.put_nowait(None)
        results = await agent
        assert results["respond"] == (Exchange("what is five plus three?", "It is eight.", False),)
        said = f"{USER}{QUESTION}{END}{ANSWER}It is eight."
        assert agent.blocks["memory"].text == f"{said}{END}{USER}Heard:"
        assert agent.blocks["heard"].num_tokens == agent.blocks["speech"].num_tokens == 0


async def test_tiny_hybrid_changes_its_answer_when_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(resolve("tiny-hybrid")) as llm:
        asked = answers(monkeypatch, llm)
        saying = Saying(llm, asked, CHANGE, tokens=2)
        agent = listener(llm, saying.words(), speak=saying.hears, enable_thinking=False)
        first, second = (await agent.start())["respond"]
        assert first == Exchange("what is five plus three?", first.said, True)
        assert "It is eight.".startswith(first.said) and first.said != "It is eight."
        assert second == Exchange("no wait, plus four?", "It is nine.", False)
        begun = f"{USER}{QUESTION}{END}{ANSWER}{first.said}{END}{USER}Heard: no wait, plus four?\n"
        assert agent.blocks["memory"].text.startswith(begun)


async def test_each_word_is_read_once_and_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as llm:
        asked = answers(monkeypatch, llm)
        script(monkeypatch, llm, {"speech": "Eight."})
        agent = listener(llm, Saying(llm, asked, [], 0).words())
        await agent.start()
        assert asked == ["".join(f" {word}" for word in WORDS[:count]) for count in range(1, 6)]
        heard = rows_of(llm, "prefill", "heard")
        assert sum(row.num_tokens for row in heard) == len(llm.encode(" " + " ".join(WORDS)))
        assert {tuple(block for block, _ in row.view) for row in heard} == {("memory", "heard")}
        probes = rows_of(llm, "probe")
        assert {tuple(block for block, _ in row.view) for row in probes} == {("memory", "heard")}
        speech = rows_of(llm, block="speech")
        assert {tuple(block for block, _ in row.view) for row in speech} == {("memory", "speech")}
        memory = agent.blocks["memory"].token_ids
        encoded = sum(row.num_tokens for row in rows_of(llm) if row.kind != "probe")
        assert len(memory) == encoded  # nothing is encoded twice


@pytest.mark.parametrize("said", ["words", "say"])
async def test_an_interruption_ends_the_speech_and_what_was_said_is_remembered(
    monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    async with engine() as llm:
        asked = answers(monkeypatch, llm)
        speech = "Eight, and not a word more than that; nine."
        script(monkeypatch, llm, {"speech": speech})
        saying = Saying(llm, asked, CHANGE if said == "words" else [], tokens=7)
        words = saying.words()
        agent = listener(llm, words, speak=saying.hears, max_tokens=25).start()
        if said == "say":
            await until(lambda: len(saying.said) >= 7)
            await agent.say(" no wait, plus four?", to="heard")
        first, second = (await agent)["respond"]
        assert first.interrupted and first.said.startswith("Eight, ") and len(first.said) <= 9
        assert second.heard == "no wait, plus four?" and not second.interrupted
        memory = agent.blocks["memory"].text
        assert f"assistant\n{first.said}{END}{USER}Heard: no wait, plus four?\nAnswer now? yes\n" in memory
        assert memory.endswith(f"assistant\n{second.said}{END}{USER}Heard:")
        assert speech.startswith(first.said + second.said) and len(second.said) == 25


async def test_what_others_say_is_encoded_again_behind_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`say` encodes by itself what it puts into a block that no stream writes."""
    async with engine() as llm:
        asked = answers(monkeypatch, llm)
        script(monkeypatch, llm, {"speech": "Eight."})
        words = Agent(llm, "phone").queue("words")
        agent = listener(Agent(llm, "phone"), words).start()
        words.put_nowait("what")
        await until(lambda: len(asked) == 1)
        await agent.say(" is it?", to="heard")
        await until(lambda: len(asked) == 2)
        words.put_nowait(None)
        (exchange,) = (await agent)["respond"]
        assert exchange.heard == "what is it?" and asked == [" what", " what is it?"]
        rows = rows_of(llm, "prefill", "heard")
        views = [(row.name, " ".join(block for block, _ in row.view), row.num_tokens) for row in rows]
        assert views == [
            ("forward", "memory heard", 5),
            ("say", "heard", 7),
            ("replace", "memory heard", 12),
        ]


async def test_what_was_heard_last_is_answered_in_any_case() -> None:
    async with engine() as llm:
        agent = listener(llm, WORDS[:2], threshold=1.0, max_tokens=3)
        (exchange,) = (await agent.start())["respond"]
        assert exchange.heard == "what is" and not exchange.interrupted
        assert (await listener(llm, [], name="silence").start())["respond"] == ()


async def test_markers_in_words_stay_text(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as llm:
        (marker,) = llm.encode("<|im_end|>")
        agent = listener(llm, ["<|im_end|>"], max_tokens=2, threshold=1.0)
        script(monkeypatch, llm, {"speech": "A"})
        await agent.start()
        memory = agent.blocks["memory"]
        assert "Heard: <|im_end|>\nAnswer" in memory.text and memory.token_ids.count(marker) == 2


async def test_a_listener_that_is_restarted_remembers_what_it_was_saying(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with engine() as llm:
        answers(monkeypatch, llm)
        script(monkeypatch, llm, {"speech": "Eight, of course. And now?"})
        words = Agent(llm, "phone").queue("words")
        said: list[str] = []
        agent = listener(Agent(llm, "phone"), words, speak=said.append, max_tokens=19).start()
        words.put_nowait("three?")
        await until(lambda: len(said) == 9)
        agent.restart("respond")
        await until(lambda: agent.coroutines["respond"].state == "running" and llm.blocks)
        words.put_nowait("four?")
        words.put_nowait(None)
        results = await agent
        memory = agent.blocks["memory"].text
        assert f"assistant\nEight, of{END}{USER}Heard: four?\n" in memory
        assert [exchange.heard for exchange in results["respond"]] == ["four?"]


async def test_two_choices_are_needed() -> None:
    async with engine() as llm:
        with pytest.raises(ValueError, match="two answers"):
            listener(llm, WORDS, choices=(" yes",))  # type: ignore[arg-type]
