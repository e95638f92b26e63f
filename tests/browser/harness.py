"""A real JupyterLab in a real Chromium: start the server, open a notebook, run cells, read outputs.

Knows Playwright and JupyterLab's own application object. Knows nothing of this package's widgets.
Nothing here waits by sleeping: every wait is for a condition in the page, with a deadline.

    with Lab(folder) as lab, chromium() as browser:
        notebook = Notebook.open(browser.new_page(), lab, "first.ipynb")
        assert notebook.run("1 + 1").text == "2"
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SIZE = {"width": 1500, "height": 1000}

TIMEOUT = 60.0
"""Seconds after which a wait fails; far more than anything here takes."""

NOTEBOOK_FAULT = "Cannot read properties of undefined (reading 'schema')"
"""Notebook 7 says this when it opens, whatever is in the document."""

QUIET: dict[str, dict[str, Any]] = {
    "@jupyterlab/apputils-extension/notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
    "@jupyterlab/notebook-extension/tracker": {"autoStartDefaultKernel": True},
}
"""User settings of each server: no news, no dialogs, and nothing is saved unless a test saves it."""


SUBSHELLS = "@jupyterlab/apputils-extension/kernels-settings"
"""The plugin whose setting `commsOverSubshells` is "perCommTarget" (the default) or "disabled"."""


class Lab:
    """One server process with settings, runtime files and a notebook folder of its own.

    `app`: "lab", or "notebook" for Notebook 7. `overlays`: folders with packages that hide those of
    the running interpreter; each is a kernel of that name beside "python3".
    """

    def __init__(
        self,
        folder: Path,
        *,
        app: str = "lab",
        overlays: Mapping[str, Path] | None = None,
    ) -> None:
        self.app = app
        self.root = folder / "notebooks"
        self.root.mkdir(parents=True)
        self._folder = folder
        self._log = folder / "server.log"
        self._environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "IPYTHONDIR": str(folder / "ipython"),
            "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_DATA_DIR": str(folder / "data"),
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
            "OMP_NUM_THREADS": "1",
        }
        for plugin, values in QUIET.items():
            self.write_settings(plugin, values)
        for name, overlay in (overlays or {}).items():
            self._write_kernel(name, overlay)

    def __enter__(self) -> Lab:
        module = "jupyterlab" if self.app == "lab" else "notebook"
        expose = "LabApp" if self.app == "lab" else "JupyterNotebookApp"
        command = [
            *(sys.executable, "-m", module, "--no-browser", "--allow-root"),
            f"--ServerApp.root_dir={self.root}",
            f"--ServerApp.port={_free_port()}",
            "--IdentityProvider.token=",
            f"--{expose}.expose_app_in_browser=True",
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=self._environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        try:
            self.url = self._wait_for_url()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server, which ends its kernels."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def page_url(self, notebook: str) -> str:
        """Where a notebook of `root` opens."""
        if self.app == "lab":
            return f"{self.url}lab/tree/{notebook}?reset"  # without the documents of other pages
        return f"{self.url}notebooks/{notebook}"

    def write_settings(self, plugin: str, values: Mapping[str, Any]) -> None:
        """Set the user settings of a plugin, for pages that are opened from now on."""
        path = self._folder / "settings" / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values), encoding="utf-8")

    @contextmanager
    def settings(self, plugin: str, **values: Any) -> Iterator[None]:
        """Pages that are opened inside have these user settings of a plugin."""
        self.write_settings(plugin, values)
        try:
            yield
        finally:
            self.write_settings(plugin, QUIET.get(plugin, {}))

    def _write_kernel(self, name: str, overlay: Path) -> None:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec = {
            "argv": command,
            "display_name": name,
            "language": "python",
            "env": {"PYTHONPATH": str(overlay)},
        }
        folder = self._folder / "data" / "kernels" / name
        folder.mkdir(parents=True)
        (folder / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")

    @property
    def log(self) -> str:
        """What the server and its kernels printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def _wait_for_url(self) -> str:
        """The server writes its address into a file, and answers there a little later."""
        info = self._folder / "runtime" / f"jpserver-{self._process.pid}.json"
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended at once:\n{self.log}")
            if (url := _address(info)) and _answers(f"{url}api/status"):
                return url
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)
        raise TimeoutError(f"the server does not start:\n{self.log}")


def _address(info: Path) -> str:
    """The URL in a server's info file; "" while there is none."""
    try:
        return str(json.loads(info.read_text(encoding="utf-8"))["url"])
    except (FileNotFoundError, json.JSONDecodeError):  # not written yet, or not to its end
        return ""


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=TIMEOUT):
            return True
    except URLError:
        return False


def _free_port() -> int:
    """A port nobody listens at. Should another take it first, the server tries the next ones."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium, headless, with a new profile."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


# What runs in the page. `panel` is the widget of the open notebook document.
PAGE_SCRIPT = """
window.harness = {
  get panel() {
    const shell = window.jupyterapp?.shell;
    const documents = shell ? [...shell.widgets('main')] : [];
    return documents.find(one => one.context && one.content?.model?.sharedModel?.cells) ?? null;
  },
  get kernel() {
    const panel = this.panel;
    return panel?.context?.sessionContext?.session?.kernel ?? null;
  },
  get ready() {
    return this.panel?.content?.model?.sharedModel !== undefined
      && this.panel.context.isReady && this.kernel?.connectionStatus === 'connected'
      && this.kernel?.status === 'idle';
  },
  runs: {},
  add(source) {
    const model = this.panel.content.model.sharedModel;
    const index = model.cells.length;
    model.insertCell(index, {cell_type: 'code', source, metadata: {trusted: true}});
    return index;
  },
  async start(index) {
    const run = this.runs[index] = {done: false, error: ''};
    const content = this.panel.content;
    content.activeCellIndex = index;
    content.deselectAll?.();
    window.jupyterapp.commands.execute('notebook:run-cell').then(
      () => { run.done = true; },
      error => { run.done = true; run.error = String(error); },
    );
  },
  outputs(index) { return this.panel.content.model.sharedModel.cells[index].getOutputs(); },
  output(index) { return this.panel.content.widgets[index].outputArea.node; },
};
"""


@dataclass(frozen=True)
class Outputs:
    """What a cell's model holds: nbformat's list of outputs."""

    raw: list[dict[str, Any]]

    @property
    def text(self) -> str:
        """All that was printed, and results as plain text."""
        parts = []
        for output in self.raw:
            if output["output_type"] == "stream":
                parts.append(_joined(output["text"]))
            elif output["output_type"] in ("execute_result", "display_data"):
                parts.append(_joined(output["data"].get("text/plain", "")))
        return "".join(parts)

    @property
    def error(self) -> str:
        """The traceback that the cell shows; "" if there is none."""
        errors = [output for output in self.raw if output["output_type"] == "error"]
        return "\n".join(errors[-1]["traceback"]) if errors else ""

    def data(self, mime: str) -> list[str]:
        """All displayed data of one type, in order."""
        bundles = [output["data"] for output in self.raw if "data" in output]
        return [_joined(bundle[mime]) for bundle in bundles if mime in bundle]


def _joined(text: Any) -> str:
    return "".join(text) if isinstance(text, list) else str(text)


class Notebook:
    """A notebook that is open in a page."""

    def __init__(self, page: Page, lab: Lab, name: str) -> None:
        self.page, self.lab, self.name = page, lab, name
        self.console: list[str] = []  # what the page's scripts said
        page.on("console", lambda said: self.console.append(f"{said.type}: {said.text}"))
        page.on("pageerror", lambda error: self.console.append(f"uncaught: {error}"))

    @property
    def faults(self) -> list[str]:
        """Errors that scripts of the page did not catch."""
        uncaught = (line for line in self.console if line.startswith("uncaught:"))
        return [line for line in uncaught if not line.endswith(NOTEBOOK_FAULT)]

    @classmethod
    def open(cls, page: Page, lab: Lab, name: str, *cells: str, kernel: str = "python3") -> Notebook:
        """Open `name`, made with these cells if it is not there, and wait for its kernel."""
        path = lab.root / name
        if not path.exists():
            write_notebook(path, cells, kernel)
        page.set_default_timeout(1000 * TIMEOUT)
        page.set_viewport_size({"width": SIZE["width"], "height": SIZE["height"]})
        page.add_init_script(PAGE_SCRIPT)
        notebook = cls(page, lab, name)
        page.goto(lab.page_url(name))
        notebook.wait_ready()
        return notebook

    def wait_ready(self) -> None:
        """Wait until the document is open and its kernel idle."""
        self.page.wait_for_function("window.harness.ready")

    def reload(self) -> None:
        """Load the page anew; the kernel lives on."""
        self.page.reload()
        self.wait_ready()

    # ---- cells ----------------------------------------------------------------------------------

    def add(self, source: str) -> int:
        """Add a cell at the end. Returns its index."""
        return int(self.page.evaluate("source => window.harness.add(source)", source))

    def start(self, cell: str | int) -> int:
        """Run a cell (a new one, if source is given) without waiting for its end."""
        index = self.add(cell) if isinstance(cell, str) else cell
        self.page.evaluate("index => window.harness.start(index)", index)
        return index

    def finish(self, index: int) -> Outputs:
        """Wait until a started cell has ended, however it ended."""
        self.page.wait_for_function("index => window.harness.runs[index].done", arg=index)
        return self.outputs(index)

    def run(self, cell: str | int) -> Outputs:
        """Run a cell that has to succeed."""
        outputs = self.finish(self.start(cell))
        assert not outputs.error, outputs.error
        return outputs

    def is_done(self, index: int) -> bool:
        """Has a started cell ended?"""
        return bool(self.page.evaluate("index => window.harness.runs[index].done", index))

    def outputs(self, index: int) -> Outputs:
        """The outputs of a cell at this moment."""
        return Outputs(self.page.evaluate("index => window.harness.outputs(index)", index))

    def wait_for_text(self, index: int, text: str) -> None:
        """Wait until the outputs of a cell, as the page shows them, hold `text`."""
        self.page.wait_for_function(
            "([index, text]) => window.harness.output(index).textContent.includes(text)",
            arg=[index, text],
        )

    # ---- the application ------------------------------------------------------------------------

    def command(self, name: str, **arguments: Any) -> None:
        """Execute one of the application's commands to its end."""
        self.page.evaluate(
            "async ([name, args]) => { await window.jupyterapp.commands.execute(name, args); }",
            [name, arguments],
        )

    def save(self) -> dict[str, Any]:
        """Save the notebook and return what the file holds."""
        self.page.evaluate("() => window.harness.panel.context.save()")
        document = json.loads((self.lab.root / self.name).read_text(encoding="utf-8"))
        assert isinstance(document, dict)
        return document

    def select(self, index: int) -> None:
        """Make a cell the active one."""
        script = "index => { window.harness.panel.content.activeCellIndex = index; }"
        self.page.evaluate(script, index)

    def scroll_to(self, index: int) -> None:
        """Bring a cell into view."""
        self.page.evaluate(
            "index => window.harness.panel.content.scrollToItem(index)",
            index,
        )

    def set_theme(self, name: str) -> None:
        """Change the application's theme and wait until it is there."""
        self.command("apputils:change-theme", theme=name)
        self.page.wait_for_function(
            "name => document.body.dataset.jpThemeName === name"
            " && !document.querySelector('#jupyterlab-splash')",
            arg=name,
        )

    def shut_down(self) -> None:
        """End the kernel, so that it takes no time from later tests."""
        self.page.evaluate("async () => { await window.harness.kernel?.shutdown(); }")


def write_notebook(path: Path, cells: Sequence[str], kernel: str = "python3") -> None:
    """Write a notebook of code cells."""
    document = {
        "cells": [
            {
                "cell_type": "code",
                "id": f"cell-{number}",
                "metadata": {},
                "source": source,
                "outputs": [],
                "execution_count": None,
            }
            for number, source in enumerate(cells)
        ],
        "metadata": {"kernelspec": {"display_name": kernel, "language": "python", "name": kernel}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    path.write_text(json.dumps(document), encoding="utf-8")
