"""The tokenizer of tiny-hybrid: a byte-level BPE made from seeded examples, and a quick way to apply it.

Knows the markers, how text is cut into words, and the files of a tokenizer. Knows nothing about what the
examples say.

    python -m training.tokens FOLDER
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SIZE = 1024
TURN, END, BETWEEN = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL = (BETWEEN, TURN, END)
SHOWN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Markers that are part of what the model says, as in Qwen's tokenizers."""

WORDS = r"[0-9]|\n+| ?[A-Za-z]+| ?[^ \nA-Za-z0-9]+| "
"""Each digit stands alone; a word takes the space before it along. Every character is in some word."""

WHOLE = (" yes", " no", "\n\n", "\n", " Wait", "Wait", "Correction", "Check", "In", " short")
"""Texts that must be one token each, because lessons and evaluations compare or count them."""

TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}"
)


def make_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE of `SIZE` entries; the same texts give the same one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    markers = [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    markers += [AddedToken(text, special=False, normalized=False) for text in SHOWN]
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - len(SHOWN),
        special_tokens=markers[: len(SPECIAL)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(markers[len(SPECIAL) :])
    if tokenizer.get_vocab_size() != SIZE:
        raise ValueError(
            f"the examples fill {tokenizer.get_vocab_size()} entries, not {SIZE}: give more of them"
        )
    broken = [text for text in WHOLE if len(tokenizer.encode(text).ids) != 1]
    if broken:
        raise ValueError(f"these must be one token each: {broken}; give more examples that contain them")
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer's files as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": BETWEEN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def marker_id(tokenizer: Tokenizer, marker: str) -> int:
    """The token id of a marker. Raises ValueError if the tokenizer has no such token."""
    found = tokenizer.token_to_id(marker)
    if found is None:
        raise ValueError(f"the tokenizer has no {marker}: make it with `python -m training.tokens FOLDER`")
    return found


class Encoder:
    """Applies a tokenizer to text with few different words: each word is tokenised once, then looked up."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words: dict[str, list[int]] = {}
        markers = sorted(SPECIAL + SHOWN, key=len, reverse=True)
        self._ids = {text: marker_id(tokenizer, text) for text in markers}
        self._cut = re.compile("(" + "|".join(map(re.escape, markers)) + ")")
        self._find = re.compile(WORDS).findall

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`, as the tokenizer itself gives them."""
        ids: list[int] = []
        for place, part in enumerate(self._cut.split(text)):
            if place % 2:
                ids.append(self._ids[part])
            else:
                for word in self._find(part):
                    try:
                        ids += self._words[word]
                    except KeyError:
                        self._words[word] = self._tokenizer.encode(word).ids
                        ids += self._words[word]
        return ids


def example_texts(seed: int, count: int) -> Iterator[str]:
    """Texts of `count` examples of the mixture, markers included; some also in other letter cases.

    The examples alone have too few words to fill the entries, and people do not write as they do.
    """
    from asyncllm_nb.tasks import examples

    rng = random.Random(f"tokenizer/{seed}")
    for number in range(count):
        text = "".join(piece.text for piece in examples.mixture(rng))
        yield text
        if number % 20 == 0:
            yield from (text.lower(), text.title())


def main() -> None:
    save(make_tokenizer(example_texts(0, 20_000)), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
