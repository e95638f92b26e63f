"""How an answer is read from a model's text, and what it counts as. Knows text; no model, no blocks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..tasks import parse_answer

Outcome = Literal["after", "before", "neither", "unfinished"]
OUTCOMES: tuple[Outcome, ...] = ("after", "before", "neither", "unfinished")


@dataclass(frozen=True)
class Scoring:
    """`answer` reads the answer from the writer's text, `conclusion` from the thinker's; each gives a value
    in the same form as `normal` gives to the answers of a case, or None when there is none."""

    name: str
    answer: Callable[[str], str | None]
    conclusion: Callable[[str], str | None]
    normal: Callable[[str], str]

    def outcome(self, answer: str, before: str | None, after: str) -> Outcome:
        """What the writer's text counts as. `before`: None where the problem has no answer without what
        comes later."""
        found = self.answer(answer)
        if found is None:
            return "unfinished"
        if found == self.normal(after):
            return "after"
        return "before" if before is not None and found == self.normal(before) else "neither"

    def takes_up(self, thinking: str, after: str) -> bool:
        """Is the thinking's own conclusion the answer after the correction?"""
        return self.conclusion(thinking) == self.normal(after)


# ---- whole numbers ----------------------------------------------------------------------------------


def _last_integer(text: str) -> str | None:
    found = parse_answer(text)
    return None if found is None else str(found)


def _last_line_integer(thinking: str) -> str | None:
    """The last whole number of the last paragraph that states a value: one that is no "Check: ...", which
    repeats given numbers, and is not cut off."""
    paragraphs = thinking.split("</think>")[0].split("\n\n")
    for paragraph in reversed(paragraphs):
        line = paragraph.strip()
        if line.endswith(".") and not line.startswith("Check:"):
            return _last_integer(line)
    return None


def _plain_integer(answer: str) -> str:
    try:
        return str(int(answer))
    except ValueError:
        raise ValueError(f"the answer {answer!r} is no whole number: score it as 'boxed'") from None


# ---- what stands in a box --------------------------------------------------------------------------

_DROPPED = (
    r"\left", r"\right", r"\displaystyle", r"\!", r"\,", r"\;", r"\:", r"\ ", r"\$", "$", r"\%", "%",
    r"^\circ", r"^{\circ}", " ", "\n",
)  # fmt: skip
"""What makes no difference between two answers."""

_UNIT = re.compile(r"(?<=[\d})])(?:\\ )?\s*\\(?:text|mbox|mathrm)\{[^{}]*\}(?:\^\{?\d\}?)?$")
_UNWRAPPED = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf)\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\frac(\d)(\d)")
_SHORT_ROOT = re.compile(r"\\sqrt(\d)")
_BARE_DOT = re.compile(r"(?<!\d)\.(?=\d)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_BARE_ZEROS = re.compile(r"(\d)\.0+$")


def normal_math(answer: str) -> str:
    r"""An answer as LaTeX with what makes no difference taken out: spaces, dollar signs, a unit in \text
    behind a number, \dfrac for \frac, commas between thousands, a final dot."""
    text = answer.strip().rstrip(".")
    text = text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    text = _UNWRAPPED.sub(r"\1", _UNIT.sub("", text.strip(" $")).replace("{,}", ","))
    for dropped in _DROPPED:
        text = text.replace(dropped, "")
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", _THOUSANDS.sub("", text))
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", _BARE_DOT.sub("0.", text))
    text = _BARE_ZEROS.sub(r"\1", text)
    return text.split("=")[-1] if text.count("=") == 1 and len(text.split("=")[0]) <= 2 else text


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...} that is complete, normalised; None if there is none."""
    start = text.rfind(r"\boxed{")
    while start >= 0:
        begin = start + len(r"\boxed{")
        depth = 1
        for at in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                return normal_math(text[begin:at])
        start = text.rfind(r"\boxed{", 0, start)
    return None


SCORINGS = {
    scoring.name: scoring
    for scoring in (
        Scoring("integer", _last_integer, _last_line_integer, _plain_integer),
        Scoring("boxed", last_boxed, last_boxed, normal_math),
    )
}
"""integer: the last whole number; of the thinking, that of its last finished paragraph that is no "Check:".
boxed: what stands in the last \\\\boxed{...}, in the answer and in the thinking alike."""
