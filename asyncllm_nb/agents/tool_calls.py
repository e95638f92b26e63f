"""A tool call as the simplest delegation: the helper is a Python function, and its result a block.

Blocks, and who reads them (each line is a view; the last block is written):

    prompt caller 1                           until a call is complete
    prompt caller 1 result 1 caller 2         goes on behind the result, until the next call
    prompt caller 1 result 1 caller 2 result 2 caller 3
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..agent import Agent
from .calculator import calc
from .common import Question, agent_of, ask, start_over

if TYPE_CHECKING:
    from ..llm import AsyncLLM


def tool_calls(
    llm: AsyncLLM | Agent,
    question: Question,
    tools: Sequence[Callable[[str], Any]] = (calc,),
    *,
    pattern: str = r"<tool_call>(\w+)\((.*)\)</tool_call>$",
    call_end: str = "</tool_call>",
    result: tuple[str, str] = ("<tool_response>", "</tool_response>"),
    max_calls: int = 12,
    max_tokens: int = 200,
    name: str = "tool calls",
) -> Agent:
    """An agent with a coroutine "call", whose result is the whole text, results of tools included.

    tools: functions of one text, by whose names the model calls them. Each becomes a tool of the agent; one
        that the agent has under that name already, with a gate or an approval, is taken as it is.
    pattern: what a call looks like at the end of the text: its name, and its argument.
    call_end: what ends a call. result: what stands before and behind a result.
    max_calls: how many calls there may be; more raise RuntimeError.
    max_tokens: most tokens of one block.

    What goes wrong in a call, the model is told as its result, and a denied one too.
    """
    if callable(tools) or not all(callable(tool) for tool in tools):
        raise TypeError(f"tools are several functions of one text, such as [calc], not {tools!r:.60}")
    agent = agent_of(llm, name)
    llm = agent.llm
    for tool in tools:
        if tool.__name__ not in agent.tools:
            agent.tool(tool)

    async def answer_of(called: re.Match[str]) -> str:
        """What the tool returns, as text."""
        tool = agent.tools.get(called[1])
        if tool is None:
            return f"error: there is no tool {called[1]}, only {', '.join(agent.tools)}"
        try:
            return str(await tool(called[2]))
        except Exception as error:
            return f"error: {error}"

    @agent.coroutine
    async def call() -> str:
        await start_over(agent, "caller ", "result ")
        view = [await ask(agent, question), await agent.block("caller 1")]
        number = 0
        while True:
            await llm.generate(None, view, stop=call_end, max_tokens=max_tokens, name="caller")
            called = re.search(pattern, view[-1].text)
            if called is None:
                return "".join(block.text for block in view[1:])
            number += 1
            if number > max_calls:
                raise RuntimeError(f"the caller makes more than max_calls={max_calls} calls")
            said = llm.encode(await answer_of(called), control=False)  # whatever it is, it is no marker
            view = [*view, await agent.block(f"result {number}")]
            await llm.forward([*llm.encode(result[0]), *said, *llm.encode(result[1])], view, logits="none")
            view = [*view, await agent.block(f"caller {number + 1}")]

    return agent
