"""Reads the texts of `asyncllm_nb.tasks` back: a parser and a solver, apart from what wrote them."""

from __future__ import annotations

import re
from collections.abc import Callable

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


def solve(text: str) -> dict[str, int]:
    """The value of each quantity of a user's text, corrections included, and "?" for what is asked."""
    question = re.split(r"(?<=[.?]) ", text.split("\n")[0])[-1]
    values: dict[str, int] = {}
    for who, (reading, rest) in given(text).items():
        # A name that was not given before is a KeyError here.
        operands = [values[part] if isinstance(part, str) else part for part in rest]
        values[who] = READINGS[reading][1](*operands)
    asked = re.fullmatch(rf"How many {THING} do(?:es)? {WHO}(?: and {WHO})? \w+(?: together)?\?", question)
    assert asked, question
    values["?"] = sum(values[who] for who in asked.groups() if who)
    return values


def follow(paragraph: str, written: dict[str, int], true: dict[str, int]) -> None:
    """A line is right in itself, takes its operands from lines above it (or, where one was overlooked, from
    the prompt), and adds to what is written."""
    says = rf"(.+?) (?:{VERB}|hold|have|read|carry) ([\d +*/=-]+) {THING}\."
    match = re.fullmatch(says, lowered(paragraph))
    if not match:
        return
    who, work = match.groups()
    if "=" in work:
        parts = re.fullmatch(r"(\d+) ([+*/-]) (\d+) = (\d+)", work)
        assert parts, paragraph
        left, right, result = int(parts[1]), int(parts[3]), int(parts[4])
        results = {"+": left + right, "-": left - right, "*": left * right, "/": left / right}
        assert result == results[parts[2]], paragraph
        assert left in {*written.values(), *true.values()}, f"{left} stands in no line above: {paragraph}"
        work = parts[4]
    written[who] = int(work)


def last_statement(thinking: str) -> str | None:
    """The last whole "X holds N things." of a text, as a summary says it."""
    who = r"(together they|the \w+ \w+|bus [A-H]|[A-Z]\w+)"
    numbered = rf"(?:Wait, )?{who} (\w+) (?:[^\n.:]* = )?(\d+) ({THING})"
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
