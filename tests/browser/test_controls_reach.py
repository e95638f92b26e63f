"""When a widget's custom messages reach Python: what `check()` says of it, for each ipykernel.

Knows a widget of one button. The answer decides what the dashboard's controls can promise.
"""

from __future__ import annotations

import pytest

from browser.conftest import Open
from browser.harness import SUBSHELLS, Lab, Notebook

PRESSES = 5

WIDGET = '''
import anywidget, asyncio, threading

class Button(anywidget.AnyWidget):
    _esm = """export default { render({ model, el }) {
      const button = document.createElement("button");
      button.className = "pressed-by-the-test";
      button.onclick = () => model.send({});
      el.append(button);
    } }"""

    def __init__(self):
        super().__init__()
        self.loop = asyncio.get_running_loop()
        self.presses = []
        self.enough = asyncio.Event()
        self.on_msg(lambda *message: self.loop.call_soon_threadsafe(self.heard))

    def heard(self):
        self.presses.append(awaiting)
        if len(self.presses) == 5:
            self.enough.set()

awaiting = False
button = Button()
button
'''

AWAITING = """
awaiting = True
print("awaiting")
try:
    await asyncio.wait_for(button.enough.wait(), PATIENCE)
except TimeoutError:
    pass
awaiting = False
"""

AFTERWARDS = """
await button.enough.wait()
print(button.presses.count(True))
"""

AT_ONCE = {
    ("python3", "perCommTarget"): True,
    ("python3", "disabled"): True,
    ("ipykernel-7.3.0", "perCommTarget"): True,
    ("ipykernel-7.3.0", "disabled"): False,
    ("ipykernel-6.31.0", "perCommTarget"): False,
}


@pytest.mark.parametrize(("kernel", "subshells"), AT_ONCE)
def test_messages_reach_python_during_an_awaiting_cell(
    lab: Lab, open_notebook: Open, kernel: str, subshells: str
) -> None:
    with lab.settings(SUBSHELLS, commsOverSubshells=subshells):
        notebook = open_notebook(WIDGET, kernel=kernel)
    notebook.run(0)
    at_once = AT_ONCE[kernel, subshells]
    during = press_while_awaiting(notebook, patience=20 if at_once else 1)
    assert during == (PRESSES if at_once else 0)
    if subshells == "perCommTarget":
        said = notebook.run("import asyncllm_nb; asyncllm_nb.check()").text
        assert ("act at once while a cell" in said) == at_once


def press_while_awaiting(notebook: Notebook, patience: int) -> int:
    """Press the button during a cell that waits for it. Returns how often it was heard meanwhile."""
    cell = notebook.start(AWAITING.replace("PATIENCE", str(patience)))
    notebook.wait_for_text(cell, "awaiting")
    for _ in range(PRESSES):
        notebook.page.click(".pressed-by-the-test")
    notebook.finish(cell)
    return int(notebook.run(AFTERWARDS).text)
