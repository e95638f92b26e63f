"""A dashboard in a page, seen from outside: what its panels say, what is painted, its buttons.

Knows the widgets' DOM and the view object that they leave at their element for debugging. Knows what
the kernel's own account of a run looks like, to compare.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page

from browser.harness import Notebook

BOARDS = ".allm"

PANELS = (
    "ledger",
    "controls",
    "streams",
    "agents",
    "views",
    "blocks",
    "timeline",
    "attention",
    "states",
    "scrubber",
)
"""All panels, in the dashboard's order."""

COLOURS = ("#0072B2", "#D55E00", "#00875F", "#A3539B", "#A87400", "#6A6FD8", "#CC3D66", "#767C86")
"""A block's colour: that of its id modulo their number."""


class Board:
    """The view at `number` of all views in the page."""

    def __init__(self, page: Page, number: int = 0) -> None:
        self.page, self.number = page, number
        self.root = page.locator(BOARDS).nth(number)

    def panel(self, name: str) -> Locator:
        return self.root.locator(f'[data-panel="{name}"]')

    def summary(self, name: str) -> str:
        """What a screen reader says of a panel."""
        return self.panel(name).locator(".allm-body").get_attribute("aria-label") or ""

    @property
    def status(self) -> str:
        return self.root.locator(".allm-status").inner_text()

    def ask(self, expression: str, argument: Any = None) -> Any:
        """Evaluate JavaScript in which `view` is the view object and `arg` the argument."""
        script = f"(root, arg) => {{ const view = root.__asyncllm_debug; return {expression}; }}"
        return self.root.evaluate(script, argument)

    def wait_for(self, expression: str, argument: Any = None) -> None:
        """Wait until an expression in `view` and `arg` holds."""
        script = f"""([number, arg]) => {{
          const view = document.querySelectorAll("{BOARDS}")[number]?.__asyncllm_debug;
          return view && ({expression});
        }}"""
        self.page.wait_for_function(script, arg=[self.number, argument])

    def look_at(self, name: str) -> None:
        """Scroll to a panel and wait until it is painted: panels off screen are not."""
        self.panel(name).scroll_into_view_if_needed()
        self.wait_for("view.visiblePanels().includes(arg)", name)
        self.wait_until_painted()

    def wait_until_painted(self) -> None:
        """Wait for one more painting."""
        painted = self.ask("(view.redraw(), view.painted)")
        self.wait_for("view.painted > arg", painted)

    def wait_for_records(self, number: int) -> None:
        """Wait until the records before `number` are here and painted."""
        self.wait_for("view.store.next >= arg", number)
        self.wait_until_painted()

    def state(self) -> dict[str, Any]:
        """The state that is drawn, as `engine.reducer` has it: texts end where their block ends."""
        state = self.ask("JSON.parse(JSON.stringify(view.store.state))")
        assert isinstance(state, dict)
        for block in state["blocks"].values():
            block["texts"] = block["texts"][: block["n"]]
        return state

    def records(self, kind: str) -> list[dict[str, Any]]:
        """All records of a type that have reached the page."""
        found = self.ask("view.store.records.filter(record => record.t === arg)", kind)
        assert isinstance(found, list)
        return found

    @property
    def step(self) -> int:
        """The newest step that has reached the page."""
        return int(self.ask("view.store.live.step"))

    def press(self, command: str, name: str | None = None) -> None:
        """Press a button of the controls; `name`: its words, where several do the same."""
        button = self.panel("controls").locator(f'button[data-command="{command}"]')
        (button.filter(has_text=name) if name else button).first.click()

    def wait_until_answered(self) -> None:
        """Wait until no control is queued."""
        self.wait_for("view.link.controls.every(entry => entry.status !== 'queued')")

    def answers(self) -> list[str]:
        """What became of the controls that were pressed, oldest first."""
        entries = self.ask("view.link.controls.map(one => [one.command, one.status, one.text])")
        return [" ".join(entry) for entry in entries]

    def table(self, name: str) -> list[list[str]]:
        """Rows of the table behind a panel; opens it."""
        self.look_at(name)
        panel = self.panel(name)
        if not panel.locator(".allm-table").is_visible():
            panel.locator(".allm-flip").click()
            self.wait_until_painted()
        script = "table => [...table.rows].map(row => [...row.cells].map(cell => cell.textContent))"
        rows = panel.locator(".allm-table table").evaluate(script)
        return [list(map(str, row)) for row in rows][1:]

    def pixels(self, name: str, colour: str) -> int:
        """How many pixels of a panel's canvases have just this colour (as CSS has it)."""
        script = """(panel, colour) => {
          const swatch = document.createElement("canvas").getContext("2d");
          swatch.fillStyle = colour;
          swatch.fillRect(0, 0, 1, 1);
          const wanted = [...swatch.getImageData(0, 0, 1, 1).data].slice(0, 3);
          let found = 0;
          for (const canvas of panel.querySelectorAll("canvas")) {
            if (!canvas.width || !canvas.height) continue;
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            for (let i = 0; i < data.length; i += 4)
              if (wanted.every((value, k) => data[i + k] === value) && data[i + 3] === 255) found += 1;
          }
          return found;
        }"""
        return int(self.panel(name).evaluate(script, colour))


def engine_truth(notebook: Notebook) -> dict[str, Any]:
    """The kernel's account of the run in its `llm`: the state after all records, and their number."""
    code = "import json; print(json.dumps([llm.trace.next, llm.trace.state(), llm.snapshot()]))"
    next_, state, snapshot = json.loads(notebook.run(code).text)
    return {"next": next_, "state": state, "snapshot": snapshot}


def lesson_cells(path: Path, model: Path | None = None) -> list[str]:
    """The code cells of a lesson; `model`: a folder with a model in place of the trained one."""
    document = json.loads(path.read_text(encoding="utf-8"))
    cells = ["".join(c["source"]) for c in document["cells"] if c["cell_type"] == "code"]
    return cells if model is None else [cell.replace('"tiny-hybrid"', repr(str(model))) for cell in cells]


ENGINE = """
import asyncio
import torch; torch.set_num_threads(1)
from asyncllm_nb import AsyncLLM

llm = AsyncLLM(MODEL, cache_tokens=8192)
prompt, notes = await llm.create_blocks("prompt", "notes")
await llm.forward(llm.chat_prompt("Hello?"), [prompt], logits="none")

async def talk(tokens):
    await llm.generate("so", [prompt, notes], max_tokens=tokens, temperature=1.0, forbid=[256, 257, 258])
"""
"""A cell that makes an engine `llm` with two blocks, and a coroutine that writes into one of them."""


def engine_cell(model: Path) -> str:
    """`ENGINE` with a model folder."""
    return ENGINE.replace("MODEL", repr(str(model)))
