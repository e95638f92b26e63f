"""The marks around turns in a model's chat template, apart from what is said, so that a turn can stay open.

Knows chat templates. Knows no blocks and no agent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..llm import AsyncLLM

_SAID, _ANSWERED = "\u2063what-the-user-says\u2063", "\u2063what-the-assistant-says\u2063"
"""Stand for these while a template is rendered around them."""


@dataclass(frozen=True)
class Turns:
    """Marks, as text: before what the user says first; behind what the user says, which opens the
    assistant's turn; and from what the assistant says to what the user says next."""

    opening: str
    answering: str
    next: str

    @staticmethod
    def of(llm: AsyncLLM, *, system: str | None = None, **template_args: Any) -> Turns:
        """Those of the model's chat template, to which `template_args` go.

        Raises ValueError for a model without one, and for one that hides what is said.
        """
        llm.chat_prompt(".", system=system, **template_args)  # says what is missing

        def rendered(*messages: tuple[str, str], answer: bool) -> str:
            said = [{"role": role, "content": content} for role, content in messages]
            text = llm.tokenizer.apply_chat_template(
                said, tokenize=False, add_generation_prompt=answer, **template_args
            )
            return str(text)

        first = [("system", system)] if system is not None else []
        one = rendered(*first, ("user", _SAID), answer=True).split(_SAID)
        more = rendered(("user", "."), ("assistant", _ANSWERED), ("user", _SAID), answer=False)
        between = more.partition(_ANSWERED)[2].partition(_SAID)
        if len(one) != 2 or not between[1]:
            raise ValueError(
                "this model's chat template does not show exactly what is said, so turns cannot stay open: "
                "use a model with a plain chat template, or write the agent with its markers yourself"
            )
        return Turns(one[0], one[1], between[0])
