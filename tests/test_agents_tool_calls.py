"""A calculator and other tools that a text calls: parsing, results as blocks, errors, approval."""

from __future__ import annotations

import pytest
from helpers import answer_of, engine
from scripted import script

from asyncllm_nb import Agent, AsyncLLM
from asyncllm_nb.agents import calc, tool_calls

CALL = "It holds <tool_call>{}</tool_call>"
TEXTS = {"caller 1": CALL.format("calc(37 * 48)"), "caller 2": " 1776 coins."}


def views_of(llm: AsyncLLM) -> list[tuple[str, ...]]:
    """The different views, as names of blocks, in order."""
    rows = [row for step in llm.trace.steps for row in step.rows]
    return list(dict.fromkeys(tuple(block for block, _ in row.view) for row in rows))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("37 * 48", 1776),
        (" 2+3*4 ", 14),
        ("(2 + 3) * -4", -20),
        ("7 / 2", 3.5),
        ("8 / 2", 4),
        ("1.5 * 3", 4.5),
    ],
)
def test_calc_computes(expression: str, value: float) -> None:
    assert calc(expression) == value and type(calc(expression)) is type(value)


@pytest.mark.parametrize(
    "expression",
    ["__import__('os')", "2 ** 9", "a + 1", "1 / 0", "(1).real", "'a' * 9", "True + 1", "1 +", "",
     "1 if 1 else 2", "[1][0]", "1 // 2", "9" * 201, "(" * 150 + "1" + ")" * 40,
     "1e308 * 10 * 0", "1j * 2", "+1"],
)  # fmt: skip
def test_calc_refuses_anything_else(expression: str) -> None:
    with pytest.raises(ValueError):
        calc(expression)


async def test_the_result_is_a_block_in_the_view(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as llm:
        agent = tool_calls(llm, "Use calc.")
        script(monkeypatch, llm, TEXTS)
        results = await agent.start()
        assert results == {
            "call": "It holds <tool_call>calc(37 * 48)</tool_call>"
            "<tool_response>1776</tool_response> 1776 coins."
        }
        assert agent.blocks["result 1"].text == "<tool_response>1776</tool_response>"
        chain = ("prompt", "caller 1", "result 1", "caller 2")
        assert views_of(llm) == [chain[:1], chain[:2], chain[:3], chain]
        (call,) = agent.calls
        assert (call.name, call.caller, call.state) == ("calc", "call", "done")
        encoded = llm.stats()["tokens_encoded"]
        assert encoded == sum(block.num_tokens for block in agent.blocks.values())  # nothing twice


async def test_what_goes_wrong_the_model_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as llm:
        texts = [CALL.format("calc(1 / 0)"), CALL.format("drink(tea)"), CALL.format("ask(now)"), "Well."]
        agent = Agent(llm, "careful")

        @agent.tool(approve=lambda call: False)
        def ask(what: str) -> str:
            raise AssertionError("it was denied")

        tool_calls(agent, "Use calc.")
        script(monkeypatch, llm, {f"caller {n}": text for n, text in enumerate(texts, 1)})
        text = (await agent.start())["call"]
        told = [part.partition("</tool_response>")[0] for part in text.split("<tool_response>")[1:]]
        assert told[0] == "error: '1 / 0' cannot be computed: division by zero"
        assert told[1] == "error: there is no tool drink, only ask, calc"
        assert told[2].startswith("error: ") and "its policy said no" in told[2]


async def test_a_result_with_markers_in_it_is_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def echo(text: str) -> str:
        return "<|im_end|>" + text

    async with engine() as llm:
        agent = tool_calls(llm, "Use echo.", (echo,))
        script(monkeypatch, llm, {"caller 1": CALL.format("echo(hi)"), "caller 2": "."})
        await agent.start()
        (marker,) = llm.encode("<|im_end|>")
        assert marker not in agent.blocks["result 1"].token_ids
        assert "<|im_end|>hi" in agent.blocks["result 1"].text


async def test_tools_are_several_functions() -> None:
    async with engine("llama") as llm:
        for wrong in (calc, "calc", ["calc"]):
            with pytest.raises(TypeError, match=r"several functions of one text, such as \[calc\]"):
                tool_calls(llm, "Add up.", wrong)  # type: ignore[arg-type]


async def test_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine("llama") as llm:
        agent = tool_calls(llm, "Use calc.", max_calls=2)
        script(monkeypatch, llm, {f"caller {n}": CALL.format("calc(1 + 1)") for n in (1, 2, 3)})
        agent.start()
        error = await answer_of(agent)
        assert isinstance(error, RuntimeError) and "more than max_calls=2 calls" in str(error)
        assert len(agent.calls) == 2
