"""Reads the texts of `asyncllm_nb.tasks` back: a parser and a solver, apart from what wrote them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from asyncllm_nb.tasks import Example

VERB = r"(?:holds|has|reads|carries)"
THING = r"(?:coins|beans|apples|pages|books|people|cows|pupils)"
WHO = r"((?:the \w+ \w+)|(?:bus [A-H])|(?:[A-Z]\w+))"
READINGS: list[tuple[str, Callable[..., int]]] = [
    (rf"{WHO} {VERB} (?:exactly )?(\d+) {THING}", lambda n: n),
    (rf"{WHO} {VERB} (\d+) (?:more {THING}|{THING} more) than {WHO}", lambda n, x: x + n),
    (rf"{WHO} {VERB} (\d+) (?:fewer {THING}|{THING} fewer) than {WHO}", lambda n, x: x - n),
    (rf"{WHO} {VERB} (?:twice|two times) as many {THING} as {WHO}", lambda x: 2 * x),
    (rf"{WHO} {VERB} three times (?:as many {THING} as|the {THING} of) {WHO}", lambda x: 3 * x),
    (rf"{WHO} {VERB} half (?:as many {THING} as|the {THING} of) {WHO}", lambda x: x // 2),
    (
        rf"{WHO} {VERB} as many {THING} as (?:both )?{WHO} (?:and|plus) {WHO}(?: together)?",
        lambda x, y: x + y,
    ),
]


def lowered(text: str) -> str:
    """Without the capital that a sentence begins with."""
    return re.sub(r"^(The|Bus|Compared|We) ", lambda match: match[0].lower(), text)


def read_sentence(sentence: str) -> tuple[str, int, tuple[str | int, ...]]:
    """Who it is about, which reading fits, and the numbers and names in it."""
    sentence = re.sub(r"^we know that ", "", lowered(sentence))
    compared = re.fullmatch(rf"compared with {WHO}, (.+)", sentence)
    if compared:
        link = "than" if " more " in sentence or " fewer " in sentence else "as"
        sentence = f"{compared[2]} {link} {compared[1]}"
    for reading, (pattern, _) in enumerate(READINGS):
        match = re.fullmatch(pattern, sentence)
        if match:
            who, *rest = match.groups()
            return who, reading, tuple(int(part) if part.isdigit() else part for part in rest)
    raise AssertionError(f"no reading fits: {sentence}")


Said = dict[str, tuple[int, tuple[str | int, ...]]]
"""For each quantity, which reading its sentence has, and what stands in it."""


def given(text: str) -> Said:
    """What a user's text says about each quantity, corrections (one a line, behind it) included."""
    problem, *corrections = text.split("\n")
    *sentences, _ = re.split(r"(?<=[.?]) ", problem)
    said: Said = {}
    for sentence in sentences:
        who, reading, rest = read_sentence(sentence.removesuffix("."))
        assert who not in said
        said[who] = reading, rest
    for correction in corrections:
        match = re.fullmatch(r"(?:Correction:|Sorry,|Wait,) (.+?)(?:, not (\d+))?\.", correction)
        assert match, correction
        who, reading, rest = read_sentence(match[1])
        before = said[who]
        assert before[0] == reading and before[1][1:] == rest[1:] and before[1][0] != rest[0]
        assert match[2] is None or int(match[2]) == before[1][0]
        said[who] = reading, rest
    return said


def asked(text: str) -> tuple[str, ...]:
    """Whom the question of a user's text asks for: one, or the ends of two chains."""
    question = re.split(r"(?<=[.?]) ", text.split("\n")[0])[-1]
    match = re.fullmatch(rf"How many {THING} do(?:es)? {WHO}(?: and {WHO})? \w+(?: together)?\?", question)
    assert match, question
    return tuple(who for who in match.groups() if who)


def solve(text: str) -> dict[str, int]:
    """The value of each quantity of a user's text, corrections included, and "?" for what is asked."""
    values: dict[str, int] = {}
    for who, (reading, rest) in given(text).items():
        # A name that was not given before is a KeyError here.
        operands = [values[part] if isinstance(part, str) else part for part in rest]
        values[who] = READINGS[reading][1](*operands)
    values["?"] = sum(values[who] for who in asked(text))
    return values


REFERENCES = (
    (1, rf"(\d+) more than {WHO}"),
    (2, rf"(\d+) fewer than {WHO}"),
    (3, rf"twice {WHO}"),
    (4, rf"three times {WHO}"),
    (5, rf"half {WHO}"),
    (6, rf"{WHO} and {WHO}"),
)
"""How a line says what its quantity refers to, with the place of the sentence's reading in `READINGS`."""

SUM = 6
"""The reading of a line that adds two quantities up."""

TOGETHER = "together they"
"""Who the sum of two chains is about."""


class Line(NamedTuple):
    """A line of a solution. `reading` and `rest` are as `read_sentence` has them, of what it refers to."""

    who: str
    reading: int
    rest: tuple[str | int, ...]
    recalled: tuple[tuple[str, int], ...]  # what it refers to, and the value that it takes for that
    work: tuple[int, str, int] | None  # "12 + 7"; None: computes nothing
    value: int

    @property
    def names(self) -> tuple[str, ...]:
        """What it says that it refers to."""
        return tuple(part for part in self.rest if isinstance(part, str))


def read_line(paragraph: str) -> Line | None:
    """A paragraph that gives, computes or adds up quantities, taken apart; None for any other text."""
    text = lowered(paragraph)
    base = re.fullmatch(rf"{WHO} {VERB} (\d+) {THING}\.", text)
    if base:
        return Line(base[1], 0, (int(base[2]),), (), None, int(base[2]))
    work = r"(\d+) ([+*/-]) (\d+) = (\d+)"
    total = re.fullmatch(rf"Together they (?:hold|have|read|carry) {work} {THING}\.", text)
    if total:
        return Line(TOGETHER, SUM, (), (), (int(total[1]), total[2], int(total[3])), int(total[4]))
    recalled = rf"{WHO} {VERB} \d+"
    derived = re.fullmatch(
        rf"{WHO}: (?P<refers>[^;:,]+); (?P<recalled>{recalled}(?:, {recalled})?), "
        rf"(?P<left>\d+) (?P<sign>[+*/-]) (?P<right>\d+) = (?P<result>\d+), "
        rf"so (?P<so>.+) {VERB} (?P<value>\d+) {THING}\.",
        text,
    )
    if not derived or derived[1] != derived["so"] or derived["result"] != derived["value"]:
        return None
    values = re.findall(rf"{WHO} {VERB} (\d+)", derived["recalled"])
    for reading, pattern in REFERENCES:
        refers = re.fullmatch(pattern, derived["refers"])
        if refers:
            return Line(
                derived[1],
                reading,
                tuple(int(part) if part.isdigit() else part for part in refers.groups()),
                tuple((who, int(value)) for who, value in values),
                (int(derived["left"]), derived["sign"], int(derived["right"])),
                int(derived["value"]),
            )
    return None


class Follower:
    """Reads a thinking, paragraph by paragraph, beside what the user says. Fails at one that does not follow.

    `written`: the value of each quantity by the last line that has it. `true`: by what was said so far.
    """

    def __init__(self, text: str) -> None:
        self._said = text
        self._corrected = "\n" in text
        self.true = solve(text)
        self.written: dict[str, int] = {}
        self._begun = False

    def read(self, paragraph: str) -> None:
        """Take in the next paragraph."""
        if paragraph.startswith("Wait, ") and self._begun:  # somebody interjects; else a turn is restated
            self._said += "\n" + paragraph
            self.true = solve(self._said)
        self._begun = True
        wait = re.search(rf"Wait, {WHO} {VERB} (\d+) {THING}(?:, not \d+)?\.$", paragraph)
        if wait:
            self.written[wait[1]] = int(wait[2])
        if not paragraph.startswith(("Wait, ", "Check: ")):
            line = read_line(paragraph)
            assert line, f"no line: {paragraph}"
            self._follow(line)

    def _follow(self, line: Line) -> None:
        """It is right in itself, refers to what the user says it does, and takes values from the last lines
        that have them (or, where the user's correction was overlooked up to there, from the prompt)."""
        recalled = line.recalled
        if line.who == TOGETHER:  # recalls by its two numbers
            assert line.work
            recalled = tuple(zip(asked(self._said), line.work[::2], strict=True))
        else:
            reading, rest = given(self._said)[line.who]
            named = tuple(part for part in rest if isinstance(part, str))
            assert (line.reading, line.names) == (reading, named), line
        for who, value in recalled:
            known = {self.written[who], self.true[who] if self._corrected else self.written[who]}
            assert value in known, f"{who} has no {value} above: {line}"
        if line.work:
            check_work(line, [value for _, value in recalled])
        self.written["?" if line.who == TOGETHER else line.who] = line.value


def check_work(line: Line, operands: list[int]) -> None:
    """What a line computes from `operands` is what it says: the sign, both numbers, and the result."""
    assert line.work
    left, sign, right = line.work
    number = [line.rest[0]] if line.reading in (1, 2) else {3: [2], 4: [3], 5: [2], SUM: []}[line.reading]
    assert sign == " +-**/+"[line.reading] and [left, right] == [*operands, *number], line
    results = {"+": left + right, "-": left - right, "*": left * right, "/": left / right}
    assert line.value == results[sign], line


def last_statement(thinking: str) -> str | None:
    """The last whole "X holds N things." of a text, as a summary says it."""
    who = r"(together they|the \w+ \w+|bus [A-H]|[A-Z]\w+)"
    numbered = rf"(?:Wait, )?{who} (\w+) (?:\d+ \+ \d+ = )?(\d+) ({THING})"
    found = [
        match
        for match in re.finditer(numbered + r"(?:, not \d+)?\.", thinking, re.I)
        if "In short" not in thinking[max(0, match.start() - 12) : match.start()]
    ]
    if not found:
        return None
    who, verb, number, unit = found[-1].groups()
    who = who if re.fullmatch(r"[A-Z]\w+", who) else who[0].lower() + who[1:]
    return f"{who} {verb} {number} {unit}"


def warns(rule: str, line: str) -> bool:
    """Another reader of rules."""
    _, said = line.split(" ", 1)
    event = re.fullmatch(r"Rule: warn if the log says (.+)\.", rule)
    if event:
        return said == event[1]
    metric = re.fullmatch(r"Rule: warn if the (.+) is (above|below) (\d+)\.", rule)
    assert metric, rule
    subject, side, limit = metric.groups()
    if not said.startswith(subject + " "):
        return False
    value = int(said.rsplit(" ", 1)[1])
    return value > int(limit) if side == "above" else value < int(limit)


NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
).split()
NUMBERS += [f"twenty-{one}" for one in NUMBERS[1:10]] + ["thirty"]
NUMBERS += [f"thirty-{one}" for one in NUMBERS[1:10]] + ["forty"]


def compute(heard: str) -> int:
    """Another reader of spoken questions."""
    left, right = (NUMBERS.index(word) for word in re.findall(r"[a-z-]+", heard) if word in NUMBERS)
    if "times" in heard:
        return left * right
    return left - right if re.search(r"\b(minus|lose|give|sell)\b", heard) else left + right


def text_of(pieces: Example) -> str:
    return "".join(piece.text for piece in pieces)


def turns(text: str) -> list[tuple[str, str]]:
    """(role, content) of each turn; the last may be open."""
    return re.findall(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|$)", text, re.S)
