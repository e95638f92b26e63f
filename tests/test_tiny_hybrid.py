"""The bundled model: what its folder holds, that it is what transformers makes of it, and what it answers.

No number of the model stands here, so that a better one of the same shape takes its place.
"""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm_nb import AsyncLLM, models
from asyncllm_nb.engine.text import Codec
from asyncllm_nb.tasks import KINDS, make_example
from asyncllm_nb.tasks.pieces import NO_THINKING, THINK
from asyncllm_nb.testing import assert_close_logits
from training.card import ACCURACY, LOG, card, read_log

FOLDER = models.resolve("tiny-hybrid")
LARGEST = 16 * 10**6
"""Bytes of the weights, so that git and a wheel can carry them."""

EASY = (
    "The red box holds 12 coins. The blue box holds 7 more coins than the red box. The green box holds twice "
    "as many coins as the blue box. How many coins does the green box hold?"
)


@functools.cache
def codec() -> Codec:
    return Codec(tokenizer())


@functools.cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER)


def small() -> AsyncLLM:
    return AsyncLLM("tiny-hybrid", cache_tokens=4096, max_blocks=12)


def texts(count: int) -> list[str]:
    """Of all kinds in turn."""
    rng = random.Random("bundled")
    examples = [make_example(rng, KINDS[number % len(KINDS)]) for number in range(count)]
    return ["".join(piece.text for piece in example) for example in examples]


def test_folder_holds_all_that_the_model_needs_and_is_small() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (FOLDER / "model.safetensors").stat().st_size <= LARGEST


def test_end_and_padding_tokens_are_the_tokenizers() -> None:
    for name in ("config.json", "generation_config.json"):
        config = json.loads((FOLDER / name).read_text(encoding="utf-8"))
        ids = [config["eos_token_id"], config["pad_token_id"]]
        assert tokenizer().convert_ids_to_tokens(ids) == ["<|im_end|>", "<|endoftext|>"]
    assert len(tokenizer()) == json.loads((FOLDER / "config.json").read_text())["vocab_size"] == 1024


async def test_logits_are_those_of_transformers() -> None:
    async with small() as llm:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
        for text in texts(7):
            ids = llm.encode(text)
            output = await llm.forward(ids, logits="all")
            with torch.inference_mode():
                expected = model(torch.tensor([ids]), use_cache=False).logits[0]
            assert output.logits is not None
            assert_close_logits(output.logits, expected, trained=True)


async def test_cut_into_blocks_it_says_the_same() -> None:
    async with small() as llm:
        ids = llm.encode(texts(1)[0])
        whole = (await llm.forward(ids, logits="all")).logits
        first, second, third = await llm.create_blocks(3)
        await llm.forward(ids[:37], first)
        await llm.forward(ids[37:38], [first, second])
        rest = await llm.forward(ids[38:], [first, second, third], logits="all")
        assert whole is not None and rest.logits is not None
        assert_close_logits(rest.logits, whole[38:], trained=True)


async def test_answers_an_easy_problem() -> None:
    async with small() as llm:
        stream = llm.generate(llm.chat_prompt(EASY), max_tokens=150)
        text = await stream
        assert text.endswith("\n</think>\n\nThe green box holds 38 coins."), text
        refers, work = "The blue box: 7 more than the red box; the red box holds 12", "12 + 7 = 19"
        assert f"\n\n{refers}, {work}, so the blue box holds 19 coins.\n\n" in text
        assert stream.stop_reason == "eos"


async def test_watches_a_log() -> None:
    async with small() as llm:
        log = "<|im_start|>user\nRule: warn if the pump temperature is above 70.\nLog:\n"
        block = await llm.create_block()
        for line, warns in (("09:14 pump temperature 21", False), ("09:16 pump temperature 95", True)):
            await llm.forward(f"{log}{line}\n", block)
            log = ""
            chances = await llm.probe("Warn?", block, (" yes", " no"))
            assert (chances[" yes"] > 0.9) == warns and (chances[" no"] > 0.9) != warns


# ---- text ---------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.text(max_size=60))
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    for control in (True, False):
        ids = codec().encode(text, control=control)
        assert codec().decode(ids) == text
        assert all(0 <= token < 1024 for token in ids)


@pytest.mark.parametrize(
    "text", ["naïve café", "数学 42", "👩‍👩‍👧", "\x00\x7f\u2028 \t", "a  b\r\n\n\n c", "<|im_end|> <think>"]
)
def test_this_text_comes_back_from_its_tokens(text: str) -> None:
    assert codec().decode(codec().encode(text)) == text


def test_tokens_are_those_that_were_trained() -> None:
    """Digits and answers stand alone; our tokens are transformers'; no text of the tasks is spelled out."""
    for text in texts(35):
        ids = codec().encode(text)
        assert ids == tokenizer()(text)["input_ids"]
        assert len(ids) < 0.5 * len(text)
    split = tokenizer().convert_ids_to_tokens(codec().encode("12 + 345"))
    assert [token.strip("Ġ") for token in split if token != "Ġ"] == ["1", "2", "+", "3", "4", "5"]
    for text in (" yes", " no", "\n\n", "<think>", "</think>", "<|im_start|>", "<tool_call>"):
        assert len(codec().encode(text)) == 1, text


def test_chat_template_writes_turns_as_they_were_trained() -> None:
    answer = "<think>\nNo.\n</think>\n\nHo."
    said = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": answer}]
    expected = f"<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"

    def rendered(messages: list[dict[str, str]], **options: Any) -> str:
        text: str = tokenizer().apply_chat_template(messages, tokenize=False, **options)
        return text

    assert rendered(said) == expected
    assert rendered(said, add_generation_prompt=True) == expected + THINK
    assert rendered(said, add_generation_prompt=True, enable_thinking=True) == expected + THINK
    assert rendered(said, add_generation_prompt=True, enable_thinking=False) == expected + NO_THINKING


async def test_turns_of_an_engine_are_those_of_the_tasks() -> None:
    async with small() as llm:
        assert llm.chat_prompt("Hi.") == llm.encode(f"<|im_start|>user\nHi.<|im_end|>\n{THINK}")
        assert llm.turn("Stop.") == llm.encode(f"<|im_end|>\n<|im_start|>user\nStop.<|im_end|>\n{THINK}")
        assert llm.chat_prompt("Hi.", enable_thinking=False) == llm.encode(
            f"<|im_start|>user\nHi.<|im_end|>\n{NO_THINKING}"
        )


# ---- what is said about it ----------------------------------------------------------------------


def test_card_is_written_from_the_numbers_of_this_model() -> None:
    """When it is not: `python -m training.evaluate --out training/accuracy.json`, then `training.card`."""
    accuracy = json.loads(ACCURACY.read_text(encoding="utf-8"))
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == card(FOLDER, read_log(LOG), accuracy)


def test_card_refuses_the_accuracies_of_other_weights(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    accuracy = json.loads(ACCURACY.read_text(encoding="utf-8"))
    assert "# tiny-hybrid" in card(tmp_path, read_log(LOG), accuracy)
    weights = bytearray((FOLDER / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match="those of other weights"):
        card(tmp_path, read_log(LOG), accuracy)
