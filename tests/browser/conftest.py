"""One Chromium and one JupyterLab for all browser tests, and notebooks of their own in them.

Knows pytest and the harness. A test that fails leaves a picture of its page in build/browser, and its
report says what the page's console said and how the server's log ended.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from asyncllm_nb.testing import make_checkpoint
from browser.harness import Lab, Notebook, chromium

Open = Callable[..., Notebook]
"""``open_notebook(*cells, kernel="python3")``: a new notebook with a new kernel, in a new page."""

OVERLAYS = Path(sys.prefix) / "overlays"
PICTURES = "build/browser"

_names = (f"notebook-{number}.ipynb" for number in count(1))
_open: list[Notebook] = []
"""Notebooks that are open now, the newest last: what a failed test shows."""


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Chromium, until the last test of this folder: no event loop can run in its thread meanwhile."""
    with chromium() as running:
        yield running


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small checkpoints "llama" and "qwen3_5" (with Gated DeltaNet layers)."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen3_5"):
        make_checkpoint(folder / family, family, tokenizer=True)
    return folder


@pytest.fixture(scope="package")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab as it comes, but for news and autosave, with a kernel for each overlay."""
    with Lab(tmp_path_factory.mktemp("lab"), overlays=overlays()) as running:
        yield running


def overlays() -> dict[str, Path]:
    """Older versions of ipykernel, by the name of the folder that `make overlays` installed."""
    return {path.name: path for path in sorted(OVERLAYS.glob("ipykernel-*"))}


@pytest.fixture
def open_notebook(browser: Browser, lab: Lab) -> Iterator[Open]:
    """Opens notebooks that end with the test."""
    with notebooks(browser, lab) as open_notebook:
        yield open_notebook


@contextmanager
def notebooks(browser: Browser, lab: Lab) -> Iterator[Open]:
    """Opens notebooks; at the end their kernels are shut down and their pages closed."""
    with ExitStack() as stack:

        def open_notebook(*cells: str, kernel: str = "python3") -> Notebook:
            page = stack.enter_context(browser.new_context()).new_page()
            notebook = Notebook.open(page, lab, next(_names), *cells, kernel=kernel)
            _open.append(notebook)
            stack.callback(_open.remove, notebook)
            stack.callback(notebook.shut_down)
            return notebook

        yield open_notebook


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever stands in this folder drives a browser."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.browser)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and report.failed and _open:
        picture = item.config.rootpath / PICTURES / f"{item.name}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        _open[-1].page.screenshot(path=picture)
        report.sections.append(("picture of the page", str(picture)))
        report.sections.append(("console of the page", "\n".join(_open[-1].console[-40:])))
        report.sections.append(("log of the server", _open[-1].lab.log[-3000:]))
    return report
