"""What is said behind a thinking that breaks off, or between its steps: summaries, and answers on demand.

Knows two rules. A summary says the last quantity that stands in the thinking. An answer is the answer if
that quantity is the one asked for, and otherwise says how far the thinking got.
"""

from __future__ import annotations

from random import Random

from .pieces import ANSWER_NEXT, BREAK, CLOSE, END, THINK, USER, Example, cut, example, pick, weighted
from .thinking import Thinking, corrected_later, interjected, overlooked, plain, read_at_once, slip
from .words import capital

STOPS = ("Stop and answer now.", "Stop. Answer now.", "That is enough, answer now.")
SUM_UP = " Sum up each step."
IN_SHORT = "\n\nIn short,"
NOTHING_YET = " nothing yet."
CLOSINGS = ("</think>\n\n", "\n</think>\n\n", "\n\n</think>\n\n")
"""How a thinking is closed from outside, wherever it stands."""

_CUT = (
    (plain, 0.45),
    (read_at_once, 0.12),
    (overlooked, 0.16),
    (slip, 0.06),
    (interjected, 0.06),
    (corrected_later, 0.15),
)


def _cut_thinking(rng: Random) -> tuple[Thinking, int]:
    """A thinking and a place in its text where it breaks off."""
    thinking = weighted(rng, _CUT)(rng)
    way = rng.random()
    if thinking.earlier is not None and way < 0.25:
        return thinking, 0
    if way < 0.75:
        return thinking, cut(rng, thinking.text)
    # Behind a whole paragraph, where listeners are told of it.
    whole = thinking.paragraphs[: 1 + int(rng.random() * len(thinking.paragraphs))]
    place = len(BREAK.join(paragraph.text for paragraph in whole))
    more = len(whole) < len(thinking.paragraphs) and rng.random() < 0.7
    return thinking, place + len(BREAK) * more


def _earlier(rng: Random, thinking: Thinking, place: int) -> str:
    """Summaries of some steps that stand before a place."""
    end, found = 0, ""
    for paragraph in thinking.paragraphs:
        end += len(paragraph.text) + len(BREAK)
        if end < place and paragraph.statement and rng.random() < 0.3:
            found += f"{IN_SHORT} {paragraph.statement}."
    return found


def last_word(thinking: Thinking, said: str) -> str:
    """What is answered when the thinking breaks off: the answer if it stands there, else how far it got."""
    if not said:
        return "So far: nothing."
    sentence = capital(said) + "."
    # All but the number has to agree: the answer that stands there may be a wrong one.
    answered = sentence.split(" ")[:-2] == thinking.answer.split(" ")[:-2]
    return sentence if answered else f"So far: {said}."


def stopped_example(rng: Random) -> Example:
    """The user stops the thinking, or it is closed from outside."""
    way = rng.random()
    if way < 0.15:
        return _answered_at_once(rng)
    holds = False
    while not holds:
        thinking, place = _cut_thinking(rng)
        said, holds = thinking.said(place)
    answer = last_word(thinking, said) + END
    begun = [*thinking.opening, (thinking.text[:place], False)]
    if way < 0.65:
        stop = STOPS[0] if rng.random() < 0.6 else pick(rng, STOPS)
        turn = f"{CLOSE}{USER}{stop}{CLOSE}{THINK}"
        return example(*begun, (turn, False), ("</think>\n\n" + answer, True))
    return example(*begun, (pick(rng, CLOSINGS), False), (answer, True))


def _answered_at_once(rng: Random) -> Example:
    """A correction arrives as a turn, and no time is given to think: the answer itself redoes the lines.

    Summaries of what was thought before may stand between.
    """
    thinking = corrected_later(rng, ended=0.5)
    assert thinking.earlier is not None
    old = thinking.earlier
    between = _earlier(rng, old, len(old.text)) if rng.random() < 0.5 else ""
    redone = " ".join(paragraph.text for paragraph in thinking.paragraphs[:-1])  # without the check
    return example(*thinking.opening, (between + pick(rng, CLOSINGS[:2]), False), (redone + END, True))


def summary_example(rng: Random) -> Example:
    """Summaries: after each step if the user asks for that, else of the last step wherever one is wanted."""
    way = rng.random()
    if way < 0.2:
        return _summed_up_each(rng)
    if way < 0.35:
        return _summed_up_in_order(rng)
    if way < 0.5:
        return _summed_up_once(rng)
    return _summed_up_behind(rng)


def _summed_up_each(rng: Random) -> Example:
    thinking = plain(rng)
    paragraphs = [
        paragraph.text + (f"{IN_SHORT} {paragraph.statement}." if paragraph.statement else "")
        for paragraph in thinking.paragraphs
    ]
    text = BREAK.join(paragraphs) + ANSWER_NEXT + thinking.answer + END
    return example((f"{USER}{thinking.user}{SUM_UP}{CLOSE}{THINK}", False), (text, True))


def _summed_up_in_order(rng: Random) -> Example:
    thinking = plain(rng)
    pieces = [(f"{USER}{thinking.user}{SUM_UP}{CLOSE}{THINK}{thinking.text}", False)]
    for paragraph in thinking.paragraphs:
        if paragraph.statement:
            pieces += [(IN_SHORT, False), (f" {paragraph.statement}.", True)]
    return example(*pieces)


def _summed_up_once(rng: Random) -> Example:
    """One summary between two paragraphs, behind which the thinking goes on."""
    thinking = plain(rng)
    place = 1 + int(rng.random() * (len(thinking.paragraphs) - 2))
    above, below = thinking.paragraphs[:place], thinking.paragraphs[place:]
    return example(
        *thinking.opening,
        (BREAK.join(paragraph.text for paragraph in above), True),
        (IN_SHORT, False),
        (f" {above[-1].statement}.{BREAK}", True),
        (BREAK.join(paragraph.text for paragraph in below) + ANSWER_NEXT + thinking.answer + END, True),
    )


def _summed_up_behind(rng: Random) -> Example:
    """Summaries behind a thinking, of earlier moments and of the last one, and now and then the answer."""
    thinking, place = _cut_thinking(rng)
    said, holds = thinking.said(place)
    text = thinking.text[:place]
    done = place == len(thinking.text) and rng.random() < 0.7
    if done:
        text += "\n</think>"
    earlier = _earlier(rng, thinking, place)
    if thinking.earlier is not None and not place:
        earlier = _earlier(rng, thinking.earlier, len(thinking.earlier.text))
    pieces = [
        *thinking.opening,
        (text + earlier + IN_SHORT, False),
        (f" {said}." if said else NOTHING_YET, True),
    ]
    if holds and rng.random() < 0.5:
        pieces += [
            (BREAK if done else pick(rng, CLOSINGS), False),
            (last_word(thinking, said) + END, True),
        ]
    return example(*pieces)
