"""One Chromium and one JupyterLab for all browser tests; a page of its own for each test.

Knows pytest and the harness. A test that fails leaves a picture of its page, what the page's
console said, and the end of the server's log.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from itertools import count
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page

from asyncllm_nb.testing import make_checkpoint
from browser.harness import Lab, Notebook, chromium

Open = Callable[..., Notebook]

OVERLAYS = Path(sys.prefix) / "overlays"

_names = (f"notebook-{number}.ipynb" for number in count(1))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever stands in this folder drives a browser."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small checkpoints "llama" and "qwen3_5" (with Gated DeltaNet layers)."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen3_5"):
        make_checkpoint(folder / family, family, tokenizer=True)
    return folder


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab as it comes, but for news and autosave, with a kernel for each overlay."""
    with Lab(tmp_path_factory.mktemp("lab"), overlays=overlays()) as running:
        yield running


def overlays() -> dict[str, Path]:
    """Older versions of ipykernel, by the name of the folder that `make overlays` installed."""
    return {path.name: path for path in sorted(OVERLAYS.glob("ipykernel-*"))}


@pytest.fixture
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A new page in a new browser context; what its console says is kept for a failed test."""
    with browser.new_context() as context:
        page = context.new_page()
        said: list[str] = []

        def listen(message: ConsoleMessage) -> None:
            said.append(f"{message.type}: {message.text}")

        page.on("console", listen)
        page.on("pageerror", lambda error: said.append(f"uncaught: {error}"))
        request.node.stash[CONSOLE] = said
        request.node.stash[PAGE] = page
        yield page


@pytest.fixture
def open_notebook(page: Page, lab: Lab) -> Iterator[Open]:
    """Opens a new notebook with a kernel of its own in the test's page."""
    opened: list[Notebook] = []

    def open_notebook(*cells: str, kernel: str = "python3") -> Notebook:
        opened.append(Notebook.open(page, lab, next(_names), *cells, kernel=kernel))
        return opened[-1]

    yield open_notebook
    for notebook in opened[-1:]:  # the others are no longer open: a page shows one document
        notebook.shut_down()


CONSOLE = pytest.StashKey[list[str]]()
PAGE = pytest.StashKey[Page]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call" and report.failed and PAGE in item.stash:
        picture = item.config.rootpath / "build" / "browser" / f"{item.name}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        item.stash[PAGE].screenshot(path=picture)
        report.sections.append(("picture of the page", str(picture)))
        report.sections.append(("console of the page", "\n".join(item.stash[CONSOLE][-40:])))
        lab = item.funcargs.get("lab") if isinstance(item, pytest.Function) else None
        if isinstance(lab, Lab):
            report.sections.append(("log of the server", lab.log[-4000:]))
    return report
