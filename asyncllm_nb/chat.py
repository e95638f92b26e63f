"""Conversations as tokens, through the chat template of a model's tokenizer. Knows one codec."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Sequence
from typing import Any

from .engine.text import Codec

Message = dict[str, Any]

_OWN = ("system", "generation_prompt")
"""What a conversation's tokens take that is not the template's."""
_ANYWHERE = ("enable_thinking",)
"""Switches that any model may be given: one that cannot think needs none to keep it from that."""

_HERE = "\u2063asyncllm-nb-open-turn\u2063"
"""Stands for what the assistant has said so far while a template is rendered around it."""


def chat_prompt(
    codec: Codec,
    messages: str | Sequence[Message],
    system: str | None,
    generation_prompt: bool,
    template_args: dict[str, Any],
) -> list[int]:
    """Token ids of a conversation; a string is what the user says.

    Raises ValueError if the model has no tokenizer or no chat template, TypeError for anything else.
    """
    said = _messages(messages)
    if system is not None:
        said.insert(0, {"role": "system", "content": system})
    if not said:
        raise ValueError("chat_prompt needs at least one message")
    return codec.encode(_render(codec, said, generation_prompt, template_args))


def _messages(messages: object) -> list[Message]:
    """A new list of messages; a string is one of the user's. Raises TypeError."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if isinstance(messages, Sequence) and all(isinstance(m, dict) and "role" in m for m in messages):
        return list(messages)
    raise TypeError(
        'chat_prompt takes text, or messages like {"role": "user", "content": "Hello"}, '
        f"not {messages!r:.80}"
    )


def turn(codec: Codec, text: str, role: str) -> list[int]:
    """Token ids that close the open turn, say `text` as `role`, and open the assistant's turn again."""
    if not isinstance(text, str) or not isinstance(role, str):
        raise TypeError(f"turn takes text and a role, not {text!r} and {role!r}")
    before = [{"role": "user", "content": "."}, {"role": "assistant", "content": _HERE}]
    rendered = _render(codec, [*before, {"role": role, "content": text}], True, {})
    _, found, rest = rendered.partition(_HERE)
    if not found:
        raise ValueError(
            "this model's chat template does not show what the assistant said, so turns cannot be added "
            "to a running one: write the markers yourself with encode()"
        )
    return codec.encode(rest)


def _render(
    codec: Codec, messages: list[Message], generation_prompt: bool, arguments: dict[str, Any]
) -> str:
    tokenizer = codec.tokenizer
    if tokenizer is None:
        raise ValueError("this model folder has no tokenizer, and so no chat template: pass token ids")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "this model's tokenizer has no chat template (it is no chat model): use encode() and write "
            "the prompt yourself"
        )
    _check_arguments(tokenizer, arguments)
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=generation_prompt, **arguments
    )
    assert isinstance(text, str)
    return text


def _check_arguments(tokenizer: Any, arguments: dict[str, Any]) -> None:
    """Raise TypeError for a keyword that nothing reads: a template would pass over it in silence."""
    template = arguments.get("chat_template") or tokenizer.chat_template
    mentioned = set(re.findall(r"[A-Za-z_]\w*", str(template)))
    taken = {*mentioned, *inspect.signature(tokenizer.apply_chat_template).parameters}
    for name in arguments:
        if name not in taken and name not in _ANYWHERE:
            near = difflib.get_close_matches(name, [*_OWN, *_ANYWHERE, *sorted(mentioned)], 1, 0.7)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"there is no keyword {name!r}, and this model's chat template reads none{hint}")
