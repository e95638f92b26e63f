"""The text of each single token, for pictures that show tokens. Knows one tokenizer.

Their texts joined are the text of the whole. A tokenizer cannot be asked for that directly: some put a
space or not depending on what precedes, and a character may be spread over several tokens. Its last
token has it then, and the others have ''.
"""

from __future__ import annotations

from collections.abc import Sequence

from .text import Codec

REPLACEMENT = "\ufffd"


class TokenTexts:
    """Texts of tokens, each decoded once."""

    def __init__(self, codec: Codec | None) -> None:
        self._codec = codec
        self._known: dict[int, str] = {}

    def of(self, ids: Sequence[int]) -> list[str]:
        """One text for each of `ids`; '' without a tokenizer."""
        if self._codec is None or self._codec.tokenizer is None:
            return [""] * len(ids)
        texts = [self._text(token_id) for token_id in ids]
        start = None  # of a run of tokens that are parts of characters
        for index, text in enumerate([*texts, ""]):
            if REPLACEMENT in text:
                start = index if start is None else start
            elif start is not None:
                texts[start:index] = self._run(ids[start:index])
                start = None
        return texts

    def _text(self, token_id: int) -> str:
        text = self._known.get(token_id)
        if text is None:
            text = self._known[token_id] = self._behind_itself(token_id)
        return text

    def _behind_itself(self, token_id: int) -> str:
        """Its text where something precedes it."""
        assert self._codec is not None
        twice, once = self._codec.decode_whole([token_id] * 2), self._codec.decode_whole([token_id])
        return twice[len(once) :] if twice.startswith(once) else once

    def _run(self, ids: Sequence[int]) -> list[str]:
        assert self._codec is not None
        return [*[""] * (len(ids) - 1), self._codec.decode_whole(ids)]
