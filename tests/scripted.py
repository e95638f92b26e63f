"""A model that says what a test wants: real steps, blocks and order, and only the drawn tokens are given."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import pytest

from asyncllm_nb import AsyncLLM, Token, TokenStream

_take = TokenStream._take


def script(patch: pytest.MonkeyPatch, llm: AsyncLLM, texts: Mapping[str, str]) -> None:
    """From now on streams into the block of a name draw the tokens of its text, and end where it ends.

    A stream into any other block fails.
    """
    left = {block: deque(llm.encode(text)) for block, text in texts.items()}

    def take_from_script(stream: TokenStream) -> Token | None:
        ids = left[stream.block.name]
        if not ids:
            stream.finish("eos")
            return None
        stream._sampled = (ids[0], 0.0)
        token = _take(stream)
        if token is not None:
            ids.popleft()
        return token

    patch.setattr(TokenStream, "_take", take_from_script)
