"""What tiny-hybrid is asked to see how good it is, and what counts as right: each task, sequentially.

Knows the texts of `asyncllm_nb.tasks` that are held out of training, and the public API. Every text is laid
out as in training and stands in one block. An answer counts if it is the right one word for word. Does not
know how many examples there are, or what becomes of the counts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from asyncllm_nb import AsyncLLM, CacheBlock
from asyncllm_nb.tasks import NotCorrectable, Problem, make_log, make_problem, make_utterance
from asyncllm_nb.tasks.breaking_off import CLOSINGS, IN_SHORT, NOTHING_YET, STOPS, SUM_UP, last_word
from asyncllm_nb.tasks.calling import (
    CALL,
    CALL_END,
    RESPONSE,
    RESPONSE_END,
    USE_SUB_QUESTIONS,
    calculate,
    make_sum,
)
from asyncllm_nb.tasks.logs import QUESTION
from asyncllm_nb.tasks.pieces import ANSWER_NEXT, CLOSE, NO_THINKING, THINK, USER, between, cut, pick
from asyncllm_nb.tasks.thinking import Thinking, correction_wording
from asyncllm_nb.tasks.working import solution

MOST = 800
"""Tokens of a thinking and its answer. Those of the longest problem, all redone once, take 650."""
SHORT = 40
"""Tokens of a sentence."""
CHOICES = (" yes", " no")


@dataclass(frozen=True)
class Examination:
    """One kind of question; `ask` asks about one example and says of each answer whether it is right."""

    kind: str
    what: str
    ask: Callable[[AsyncLLM, Random], Awaitable[list[bool]]]


def opening(user: str) -> str:
    """All that stands before a thinking."""
    return USER + user + CLOSE + THINK


def answer_of(text: str) -> str:
    """What follows the thinking; empty if that has no end."""
    return text.partition(ANSWER_NEXT)[2]


async def solves(user: str, answer: str, llm: AsyncLLM) -> list[bool]:
    """Whether a problem is thought through to its answer."""
    return [answer_of(await llm.generate(opening(user), max_tokens=MOST)) == answer]


async def plain(llm: AsyncLLM, rng: Random, steps: int) -> list[bool]:
    problem = make_problem(rng, (steps, steps), held_out=True)
    return await solves(problem.text, problem.answer_sentence, llm)


async def corrected(llm: AsyncLLM, rng: Random, steps: int) -> list[bool]:
    """The correction stands behind the problem, in the words of some user."""
    while True:
        problem = make_problem(rng, (steps, steps), held_out=True)
        try:
            correction = problem.corrected(rng)
            break
        except NotCorrectable:
            continue
    user = f"{problem.text}\n{correction_wording(rng, correction)}"
    return await solves(user, correction.problem.answer_sentence, llm)


def _thinking(problem: Problem, user: str = "") -> Thinking:
    return Thinking(user or problem.text, tuple(solution(problem)), problem)


async def summary(llm: AsyncLLM, text: str, block: CacheBlock | None = None) -> str:
    """One sentence behind `text`, with the space before it and its stop if it has one."""
    stream = llm.generate(text + IN_SHORT, block, stop=".", max_tokens=SHORT)
    return await stream + "." * (stream.stop_reason == "stop")


async def summary_of_a_cut(llm: AsyncLLM, rng: Random) -> list[bool]:
    """Behind a thinking that was cut anywhere: the last quantity that stands there."""
    thinking = _thinking(make_problem(rng, held_out=True))
    place = cut(rng, thinking.text)
    said, _ = thinking.said(place)
    text = opening(thinking.user) + thinking.text[:place]
    return [await summary(llm, text) == (f" {said}." if said else NOTHING_YET)]


async def summaries_in_order(llm: AsyncLLM, rng: Random) -> list[bool]:
    """Behind a whole thinking, one for each step; each reads the true ones before it."""
    problem = make_problem(rng, held_out=True)
    thinking = _thinking(problem, problem.text + SUM_UP)
    block = await llm.create_block()
    await llm.forward(opening(thinking.user) + thinking.text, block)
    right = []
    for paragraph in thinking.paragraphs:
        if paragraph.statement:
            expected = f" {paragraph.statement}."
            right.append(await summary(llm, "", await llm.fork(block)) == expected)
            await llm.forward(IN_SHORT + expected, block)
    return right


async def warnings(llm: AsyncLLM, rng: Random) -> list[bool]:
    """Yes or no after each line of a log of 2 to 8."""
    log = make_log(rng, between(rng, 2, 8), held_out=True)
    block = await llm.create_block()
    text, right = USER + log.head, []
    for line, answer in zip(log.lines, log.answers, strict=True):
        await llm.forward(f"{text}{line}\n", block)
        text = ""
        right.append(await _says_yes(llm, QUESTION, block) == answer)
    return right


async def _says_yes(llm: AsyncLLM, question: str, block: CacheBlock) -> bool:
    chances = await llm.probe(question, block, CHOICES)
    return chances[" yes"] > chances[" no"]


async def explained_log(llm: AsyncLLM, rng: Random) -> list[bool]:
    log = make_log(rng, between(rng, 2, 6), held_out=True)
    user = log.head + "".join(f"{line}\n" for line in log.lines)
    return await solves(user, log.verdict, llm)


async def stopped(llm: AsyncLLM, rng: Random) -> list[bool]:
    """A user stops a thinking anywhere: the answer if it stands there, else how far it got."""
    thinking = _thinking(make_problem(rng, held_out=True))
    place = cut(rng, thinking.text)
    said, _ = thinking.said(place)
    text = opening(thinking.user) + thinking.text[:place]
    text += f"{CLOSE}{USER}{pick(rng, STOPS)}{CLOSE}{THINK}"
    return [await llm.generate(text, max_tokens=SHORT) == "</think>\n\n" + last_word(thinking, said)]


async def closed(llm: AsyncLLM, rng: Random) -> list[bool]:
    """The same where the thinking is closed without a word."""
    thinking = _thinking(make_problem(rng, held_out=True))
    place = cut(rng, thinking.text)
    said, _ = thinking.said(place)
    text = opening(thinking.user) + thinking.text[:place] + pick(rng, CLOSINGS)
    return [await llm.generate(text, max_tokens=SHORT) == last_word(thinking, said)]


async def with_calculator(llm: AsyncLLM, rng: Random) -> list[bool]:
    """Every call gets its result; a call that cannot be computed is a wrong answer."""
    task = make_sum(rng, held_out=True)
    block = await llm.create_block()
    text = opening(task.text)
    for _ in range(len(task.kinds) + 1):
        stream = llm.generate(text, block, stop=CALL_END, max_tokens=MOST)
        said = await stream
        if stream.stop_reason != "stop":
            return [answer_of(said) == task.answer_sentence]
        call = said.partition(f"{CALL}calc(")[2].removesuffix(")")
        try:
            text = f"{RESPONSE}{calculate(call)}{RESPONSE_END}"
        except ValueError:
            return [False]
    return [False]  # calls for more than there is to compute


async def with_sub_questions(llm: AsyncLLM, rng: Random) -> list[bool]:
    problem = make_problem(rng, chains=2, held_out=True)
    return await solves(problem.text + USE_SUB_QUESTIONS, problem.answer_sentence, llm)


async def turns(llm: AsyncLLM, rng: Random) -> list[bool]:
    """Whether to answer now, after each word."""
    utterance = make_utterance(rng, held_out=True)
    block = await llm.create_block()
    heard, right = USER + "Heard:", []
    for word, complete in zip(utterance.words, utterance.complete, strict=True):
        await llm.forward(f"{heard} {word}", block)
        heard = ""
        right.append(await _says_yes(llm, "\nAnswer now?", block) == complete)
    return right


def _said(words: str) -> str:
    return f"{USER}Heard: {words}\nAnswer now? yes\n{CLOSE}{NO_THINKING}"


async def spoken(llm: AsyncLLM, rng: Random) -> list[bool]:
    utterance = make_utterance(rng, held_out=True)
    return [await llm.generate(_said(utterance.text), max_tokens=SHORT) == utterance.answer]


async def interrupted(llm: AsyncLLM, rng: Random) -> list[bool]:
    """The answer to what the speaker says into an answer."""
    utterance = make_utterance(rng, held_out=True)
    said, other = utterance.changed(rng)
    begun = utterance.answer[: cut(rng, utterance.answer)]
    text = f"{_said(utterance.text)}{begun}{CLOSE}{_said(said)}"
    return [await llm.generate(text, max_tokens=SHORT) == other.answer]


STEPS = (3, 4, 5, 6)
EXAMINATIONS = (
    *(Examination("a", f"problems of {n} steps", partial(plain, steps=n)) for n in STEPS),
    *(
        Examination("a", f"problems of {n} steps, corrected in the prompt", partial(corrected, steps=n))
        for n in STEPS
    ),
    Examination("b", "a summary behind a thinking cut anywhere", summary_of_a_cut),
    Examination("b", "summaries of all steps in order", summaries_in_order),
    Examination("c", "yes or no after each log line", warnings),
    Examination("c", "a log explained, and when it warns", explained_log),
    Examination("d", "stopped by the user anywhere", stopped),
    Examination("d", "closed from outside anywhere", closed),
    Examination("e", "problems with a calculator", with_calculator),
    Examination("f", "problems of two chains, with sub-questions", with_sub_questions),
    Examination("g", "whether to answer, after each word", turns),
    Examination("g", "spoken questions", spoken),
    Examination("g", "spoken questions changed in the middle of the answer", interrupted),
)
