"""Between tokens and text: encoding, incremental decoding, stop strings. Knows one tokenizer.

Knows nothing about blocks or sampling. Without a tokenizer text is '' and encoding text is an error
that says so.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

_REPLACEMENT = "\ufffd"
_MOST_UNFINISHED = 3
"""Bytes that a character may still lack to be whole, each of which may show as a replacement."""


class Codec:
    """A tokenizer as the engine uses it: no special tokens added, none hidden, nothing cleaned up."""

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._marker_ids = frozenset(added)
        self._markers = sorted((t.content for t in added.values()), key=len, reverse=True)

    def encode(self, text: str, control: bool = True) -> list[int]:
        """Token ids of `text`. `control=False`: marker strings in it stay plain text.

        Raises ValueError without a tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError(
                "this model folder has no tokenizer: pass token ids instead of text, "
                "or put the model's tokenizer.json into the folder"
            )
        if control:
            return self._encode(text)
        ids = self._encode(text, split_special_tokens=True)
        if self._marker_ids.isdisjoint(ids):
            return ids
        # Markers that the tokenizer does not count as special (Qwen's <think>) are still matched:
        # cut each after its first character, so that no piece holds a whole one.
        return [token_id for piece in self._cut_markers(text) for token_id in self._encode(piece)]

    def _encode(self, text: str, **options: bool) -> list[int]:
        assert self.tokenizer is not None
        return [int(i) for i in self.tokenizer.encode(text, add_special_tokens=False, **options)]

    def _cut_markers(self, text: str) -> list[str]:
        cuts = {0, len(text)}
        for marker in self._markers:
            at = text.find(marker)
            while at >= 0:
                cuts.add(at + 1)
                at = text.find(marker, at + 1)
        edges = sorted(cuts)
        return [text[a:b] for a, b in zip(edges, edges[1:], strict=False) if a < b]

    def decode_whole(self, ids: Sequence[int]) -> str:
        if self.tokenizer is None or not ids:
            return ""
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def decode(self, ids: Sequence[int], final: bool = True) -> str:
        """Text of `ids`; with ``final=False`` an unfinished character at the end is held back."""
        text = self.decode_whole(ids)
        return text if final else text[: len(text) - _num_unfinished(text)]


def _num_unfinished(text: str) -> int:
    """Replacement characters at the end that more bytes may still turn into a character."""
    count = len(text) - len(text.rstrip(_REPLACEMENT))
    return min(count, _MOST_UNFINISHED)


@dataclass(slots=True)
class IncrementalDecoder:
    """Turns tokens that come one by one into text that never shows half a character.

    Each token is decoded together with those since the last complete character and a few before (a
    tokenizer may put a space or not depending on what precedes), so the work per token is constant.
    """

    codec: Codec
    _ids: list[int] = field(default_factory=list)
    _context: int = 0  # ids[:_context] are no longer decoded
    _done: int = 0  # ids[:_done] have given their text whole
    _shown: int = 0  # characters of the text of ids[_done:] that were given

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; '' while a character is unfinished."""
        self._ids.append(token_id)
        text = self._open_text()
        return self._show(text, len(text) - _num_unfinished(text))

    def flush(self) -> str:
        """What is still held back, unfinished characters as U+FFFD."""
        text = self._open_text()
        return self._show(text, len(text))

    def _open_text(self) -> str:
        before = self.codec.decode_whole(self._ids[self._context : self._done])
        return self.codec.decode_whole(self._ids[self._context :])[len(before) :]

    def _show(self, text: str, end: int) -> str:
        new = text[self._shown : end]
        self._shown = max(self._shown, end)
        if end == len(text) and self._done < len(self._ids):
            self._context, self._done, self._shown = self._done, len(self._ids), 0
        return new


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends a stream besides its end tokens: strings, which may span tokens, and token ids."""

    strings: tuple[str, ...] = ()
    ids: frozenset[int] = frozenset()

    @staticmethod
    def parse(stop: str | int | Collection[str | int], codec: Codec) -> StopRule:
        """Check the `stop` argument of generate. Raises ValueError or TypeError."""
        if not isinstance(stop, str | int | Collection):
            raise TypeError(f"stop takes a string, a token id, or several, not {stop!r}")
        parts: Collection[str | int] = (stop,) if isinstance(stop, str | int) else tuple(stop)
        for part in parts:
            if isinstance(part, bool) or not isinstance(part, str | int):
                raise TypeError(f"stop takes strings and token ids, not {part!r}")
            if part == "":
                raise ValueError("stop: an empty string would stop at once; leave it out")
            if isinstance(part, str) and codec.tokenizer is None:
                raise ValueError("without a tokenizer stop takes token ids, not text")
        strings = tuple(part for part in parts if isinstance(part, str))
        return StopRule(strings, frozenset(part for part in parts if isinstance(part, int)))

    def find(self, text: str, num_new: int) -> int | None:
        """Where the earliest stop string starts that the last `num_new` characters complete."""
        found = [
            at
            for stop in self.strings
            if (at := text.find(stop, max(0, len(text) - num_new - len(stop) + 1))) >= 0
        ]
        return min(found, default=None)
