"""Checks of plain arguments: tokens, choices, keywords. Raises before anything changes."""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

from torch import Tensor

from .engine.text import Codec

P = ParamSpec("P")
R = TypeVar("R")

Inputs = str | Sequence[int] | Tensor


def known_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: an unknown keyword raises TypeError with the nearest known name."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise AssertionError("a function that takes any keyword has no unknown ones")
    known = [name for name in parameters if name != "self"]

    def check(kwargs: dict[str, Any]) -> None:
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1, 0.55)
                hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
                shown = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
                raise TypeError(f"{shown}() has no keyword {name!r}: {hint}")

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def checked_async(*args: P.args, **kwargs: P.kwargs) -> Any:
            check(kwargs)
            return await function(*args, **kwargs)

        return cast(Callable[P, R], checked_async)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        check(kwargs)
        return function(*args, **kwargs)

    return checked


def known_name(name: str, names: Iterable[str], what: str) -> str:
    """`name`, if it is one of `names`; otherwise raises ValueError with the nearest one."""
    known = list(names)
    if name in known:
        return name
    close = difflib.get_close_matches(name, known, 1) if isinstance(name, str) else []
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known) or 'none'}"
    raise ValueError(f"{name!r} is no {what}: {hint}")


def check_count(name: str, value: object) -> None:
    """Raise TypeError or ValueError unless `value` is a whole number of 1 or more, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a whole number, 1 or more, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be 1 or more, not {value}")


def token_ids(inputs: Inputs, codec: Codec, vocab_size: int) -> list[int]:
    """Token ids of text, of a sequence of ids, or of a 1-D integer tensor; at least one.

    Raises ValueError for an empty input or an id outside the vocabulary, TypeError for anything else.
    """
    if isinstance(inputs, str):
        ids = codec.encode(inputs)
    elif isinstance(inputs, Tensor):
        if inputs.is_floating_point() or inputs.is_complex():
            raise TypeError(f"inputs take a tensor of token ids, integers, not {inputs.dtype}")
        if inputs.ndim != 1:
            raise ValueError(f"inputs take a 1-D tensor, not one of shape {list(inputs.shape)}")
        ids = [int(i) for i in inputs.tolist()]
    elif isinstance(inputs, Sequence) and not isinstance(inputs, bytes):
        ids = [_index(item) for item in inputs]
    else:
        if inspect.iscoroutine(inputs):
            inputs.close()
            raise TypeError("inputs take text or token ids, not a coroutine: did you forget await?")
        raise TypeError(f"inputs take text, token ids or a 1-D tensor, not {type(inputs).__name__}")
    if not ids:
        raise ValueError("inputs are empty: give at least one token")
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"{token_id} is no token id: the vocabulary has {vocab_size}")
    return ids


def _index(item: Any) -> int:
    try:
        return operator.index(item)
    except TypeError:
        raise TypeError(f"inputs take token ids, which are whole numbers, not {item!r}") from None


def choice_ids(choices: Sequence[str], codec: Codec) -> list[list[int]]:
    """Token ids of each choice of a probe. Raises ValueError or TypeError."""
    if isinstance(choices, str) or not all(isinstance(choice, str) for choice in choices):
        raise TypeError(f"choices take a sequence of strings, not {choices!r}")
    if not choices:
        raise ValueError("choices are empty: give at least one answer to score")
    if len(set(choices)) < len(choices):
        raise ValueError(f"choices must differ from each other: {list(choices)}")
    ids = [codec.encode(choice) for choice in choices]
    for choice, tokens in zip(choices, ids, strict=True):
        if not tokens:
            raise ValueError(f"choice {choice!r} has no token")
    return ids
