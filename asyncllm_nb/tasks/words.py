"""The words of the tasks: what problems are about, how their sentences go, and numbers as words.

Knows words only: no arithmetic, no order of sentences. The lists are short on purpose: a vocabulary of
1,024 entries should hold most of these words whole.
"""

from __future__ import annotations

from dataclasses import dataclass

COLOURS = ("red", "blue", "green", "white", "black", "yellow", "grey", "brown")
NAMES = ("Tom", "Ann", "Ben", "Eva", "Max", "Mia", "Sam", "Lea")


@dataclass(frozen=True)
class Domain:
    """What a problem is about. `verb` as in "how many coins does it hold", `verbs` as in "it holds"."""

    verb: str
    verbs: str
    unit: str
    entities: tuple[str, ...]


def _the(words: tuple[str, ...], noun: str) -> tuple[str, ...]:
    return tuple(f"the {word} {noun}" for word in words)


DOMAINS = (
    Domain("hold", "holds", "coins", _the(COLOURS, "box")),
    Domain("hold", "holds", "beans", _the(COLOURS, "jar")),
    Domain("have", "has", "apples", NAMES),
    Domain("read", "reads", "pages", NAMES),
    Domain("hold", "holds", "books", _the(("top", "upper", "middle", "lower", "left", "right"), "shelf")),
    Domain("carry", "carries", "people", tuple(f"bus {letter}" for letter in "ABCDEFGH")),
    Domain("have", "has", "cows", _the(("north", "south", "east", "west", "old", "new"), "field")),
    Domain("have", "has", "pupils", _the(("first", "second", "third", "fourth", "fifth", "sixth"), "class")),
)

SENTENCES: dict[str, tuple[str, ...]] = {
    "base": ("{E} {v} {n} {u}.", "{E} {v} exactly {n} {u}.", "We know that {e} {v} {n} {u}."),
    "more": (
        "{E} {v} {n} more {u} than {x}.",
        "{E} {v} {n} {u} more than {x}.",
        "Compared with {x}, {e} {v} {n} more {u}.",
    ),
    "fewer": (
        "{E} {v} {n} fewer {u} than {x}.",
        "{E} {v} {n} {u} fewer than {x}.",
        "Compared with {x}, {e} {v} {n} fewer {u}.",
    ),
    "twice": (
        "{E} {v} twice as many {u} as {x}.",
        "{E} {v} two times as many {u} as {x}.",
        "Compared with {x}, {e} {v} twice as many {u}.",
    ),
    "three times": (
        "{E} {v} three times as many {u} as {x}.",
        "{E} {v} three times the {u} of {x}.",
        "Compared with {x}, {e} {v} three times as many {u}.",
    ),
    "half": (
        "{E} {v} half as many {u} as {x}.",
        "{E} {v} half the {u} of {x}.",
        "Compared with {x}, {e} {v} half as many {u}.",
    ),
    "both": (
        "{E} {v} as many {u} as {x} and {y} together.",
        "{E} {v} as many {u} as {x} plus {y}.",
        "{E} {v} as many {u} as both {x} and {y}.",
    ),
}
"""What a user says of a quantity, by its kind. e: what it is called, v: verb, n: number, u: unit, x and y:
those that it refers to. The first wording is the one in which a sentence is restated."""

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split()
_TENS = ("", "", "twenty", "thirty", "forty")


def number_word(number: int) -> str:
    """0 to 49 as a word: "seven", "thirty-two"."""
    if number < 20:
        return _SMALL[number]
    tens, ones = divmod(number, 10)
    return f"{_TENS[tens]}-{_SMALL[ones]}" if ones else _TENS[tens]


def capital(text: str) -> str:
    """The text with a capital first letter; the rest stays."""
    return text[0].upper() + text[1:]
