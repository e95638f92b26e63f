"""Every panel shows lesson 01's run as the kernel tells it: words, tables, pixels, any moment of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from browser.board import COLOURS, PANELS, Board, engine_truth, lesson_cells
from browser.conftest import notebooks
from browser.harness import Lab, Notebook

LESSON = Path(__file__).parents[2] / "notebooks" / "01_thinker_and_writer.ipynb"

BLOCKS = ("prompt", "thinker", "writer")


class Run:
    """Lesson 01 after thinker and writer have run, the dashboard open, and the kernel's account of it."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook = notebook
        self.board = Board(notebook.page)
        self.truth = engine_truth(notebook)
        self.board.wait_for_records(self.truth["next"])

    @property
    def state(self) -> dict[str, Any]:
        return dict(self.truth["state"])

    def block(self, name: str) -> dict[str, Any]:
        found = [b for b in self.state["blocks"].values() if b["name"] == name]
        assert len(found) == 1
        return dict(found[0])

    def colour(self, name: str) -> str:
        return COLOURS[self.block(name)["id"] % len(COLOURS)]


@pytest.fixture(scope="module")
def run(browser: Browser, lab: Lab, models: Path) -> Iterator[Run]:
    with notebooks(browser, lab) as open_notebook:
        cells = [c for c in lesson_cells(LESSON, models / "llama") if "replay(" not in c]
        cells = cells[: next(i for i, cell in enumerate(cells) if "Turns.of(" in cell)]  # a second problem
        notebook = open_notebook(*cells)
        for number in range(len(cells)):
            notebook.run(number)
        yield Run(notebook)
        assert not notebook.faults


def test_page_and_kernel_have_the_same_state(run: Run) -> None:
    assert run.board.state() == run.state
    assert run.board.status.startswith("live")
    blocks = {block["name"]: block for block in run.truth["snapshot"]["blocks"]}
    assert set(blocks) == set(BLOCKS)
    for name in BLOCKS:  # and it is what the engine itself says
        block = run.block(name)
        assert (block["n"], block["version"]) == (blocks[name]["tokens"], blocks[name]["version"])
        assert len(block["pages"]) == blocks[name]["pages"]


@pytest.mark.parametrize("name", PANELS)
def test_panel_has_a_title_a_summary_and_a_table(run: Run, name: str) -> None:
    run.board.look_at(name)
    panel = run.board.panel(name)
    title = panel.locator("h4").text_content()
    assert title and panel.get_attribute("aria-label") == title
    assert len(run.board.summary(name)) > 4
    assert run.board.table(name) or name in ("agents", "controls", "scrubber", "states")
    assert not panel.locator(".allm-error").first.is_visible()


def test_ledger(run: Run) -> None:
    run.board.look_at("ledger")
    encoded, resent = run.state["encoded"], run.state["resent"]
    stats = run.notebook.run("stats = llm.stats(); print(stats['tokens_encoded'], stats['steps'])")
    assert [encoded, run.state["passes"]] == [int(number) for number in stats.text.split()]
    assert resent > encoded
    big = run.board.panel("ledger").locator(".allm-big").inner_text()
    assert big == f"{encoded:,} · {resent:,} · {resent / encoded:.1f}×"
    assert dict(run.board.table("ledger"))["forward passes"] == f"{run.state['passes']:,}"


def test_streams(run: Run) -> None:
    run.board.look_at("streams")
    cards = run.board.panel("streams").locator(".allm-card")
    heads = [card.locator("div").first.inner_text() for card in cards.all()]
    assert [head.split()[0] for head in heads] == ["think", "write"]
    assert all("✓ done" in head for head in heads)
    for card, name in zip(cards.all(), ("thinker", "writer"), strict=True):
        text = "".join(run.block(name)["texts"])
        assert card.locator("pre").evaluate("pre => pre.textContent") == text


def test_views(run: Run) -> None:
    rows = {who: reads for who, _, reads, _ in run.board.table("views")}
    numbers = {name: run.block(name)["n"] for name in BLOCKS}
    prompt, thinker, writer = (f"{name} ({numbers[name]})" for name in BLOCKS)
    assert rows == {"think": f"{prompt} → {thinker} ✎", "write": f"{prompt} → {thinker} → {writer} ✎"}
    # The pictures of blocks are as long as their tokens; those of ended streams are pale.
    painted = {name: part_width(run.board, name) for name in BLOCKS}
    assert painted["thinker"] / painted["prompt"] == pytest.approx(
        numbers["thinker"] / numbers["prompt"], rel=0.05
    )


def part_width(board: Board, name: str) -> int:
    """Pixels of a block in the last row of the views."""
    script = """(panel, id) => {
      const canvas = panel.querySelector("canvas");
      const ratio = window.devicePixelRatio || 1;
      const y = canvas.height - 6 * ratio; // below the labels, inside the last row
      const data = canvas.getContext("2d").getImageData(0, y, canvas.width, 1).data;
      const runs = [];
      let last = "";
      for (let i = 0; i < data.length; i += 4) {
        const colour = data.slice(i, i + 4).join();
        if (colour !== last) runs.push([colour, 0]);
        runs.at(-1)[1] += 1;
        last = colour;
      }
      return runs.filter(([colour, length]) => length > 8 && !colour.endsWith(",0")).map(([, n]) => n);
    }"""
    widths = board.panel("views").evaluate(script)
    return int(widths[BLOCKS.index(name)])


def test_blocks(run: Run) -> None:
    run.board.look_at("blocks")
    for name in BLOCKS:
        block = run.block(name)
        row = run.board.panel("blocks").locator(f'[data-block="{block["id"]}"]')
        assert name in row.inner_text()
        share = 100 * len(block["pages"]) / 512
        assert f"{block['n']} tokens · v{block['version']} · {share:.1f} %" in row.inner_text()
        row.focus()
        run.board.wait_until_painted()
        assert "".join(block["texts"])[-20:] in row.locator(".allm-peek").evaluate("e => e.textContent")
        row.blur()
    free = run.board.panel("blocks").locator(".allm-free").inner_text()
    assert f"free: {run.state['pages']} of 512 pages" in free
    painted = [run.board.pixels("blocks", run.colour(name)) for name in BLOCKS]
    numbers = [run.block(name)["n"] for name in BLOCKS]
    for some, number in zip(painted, numbers, strict=True):
        assert some / painted[0] == pytest.approx(number / numbers[0], rel=0.12)


def test_timeline_opens_a_step(run: Run) -> None:
    run.board.look_at("timeline")
    canvas = run.board.panel("timeline").locator("canvas")
    box = canvas.bounding_box()
    assert box is not None
    canvas.click(position={"x": box["width"] - 100, "y": 20})
    run.board.wait_until_painted()
    detail = run.board.panel("timeline").locator(".allm-detail")
    number = int(re.findall(r"Step (\d+)", detail.inner_text())[0])
    wanted = run.notebook.run(
        f"[step] = [s for s in llm.trace.steps if s.number == {number}]\n"
        "for row in step.rows: "
        "print(row.name, row.kind, row.block, row.context, row.num_tokens, *row.token_ids)"
    ).text.splitlines()
    assert wanted
    shown = [row.inner_text().split("\t") for row in detail.locator("tr").all()][1:]
    assert [[r[0], r[1].split()[0], r[2], r[4], r[5], r[7]] for r in shown] == [
        line.split(maxsplit=5) for line in wanted
    ]
    canvas.press("Escape")


def test_timeline_has_a_cell_for_each_row(run: Run) -> None:
    run.board.look_at("timeline")
    shown = """(() => {
      const { first, last } = view.places.find(one => one.panel.name === "timeline").ctx.local.span;
      return view.store.steps.slice(first, last).flatMap(step => step.record.rows.map(row => row.b));
    })()"""
    written = run.board.ask(shown)
    rows = [written.count(run.block(name)["id"]) for name in ("thinker", "writer")]
    painted = [run.board.pixels("timeline", run.colour(name)) for name in ("thinker", "writer")]
    assert min(rows) > 9
    assert painted[0] / painted[1] == pytest.approx(rows[0] / rows[1], rel=0.1)


def test_attention(run: Run) -> None:
    run.board.look_at("attention")
    summary = run.board.summary("attention")
    shares = {name: float(share) for name, share in re.findall(r"(\w+) ([\d.]+) %", summary)}
    assert set(shares) == set(BLOCKS)
    assert sum(shares.values()) == pytest.approx(100, abs=2)
    for name in BLOCKS:
        assert run.board.pixels("attention", run.colour(name)) > 20


def test_states_of_a_model_without_any(run: Run) -> None:
    run.board.look_at("states")
    assert "no Gated DeltaNet layers" in run.board.panel("states").inner_text()


def test_scrubber_shows_any_moment(run: Run) -> None:
    board, notebook = run.board, run.notebook
    board.look_at("scrubber")
    scrubber = board.panel("scrubber")
    numbers = notebook.run("print(*[step.number for step in llm.trace.steps])").text.split()
    slider = scrubber.locator("input[type=range]")
    for at in (0, len(numbers) // 3, len(numbers) - 2):
        slider.fill(str(at))
        board.wait_for("view.store.cursor === arg", int(numbers[at]))
        board.wait_until_painted()
        assert board.state() == moment(notebook, int(numbers[at]))
        assert f"showing step {numbers[at]}" in board.status
    board.look_at("blocks")
    block = board.state()["blocks"][str(run.block("thinker")["id"])]
    assert f"{block['n']} tokens" in board.panel("blocks").inner_text()
    scrubber.get_by_label("Return to live").click()
    board.wait_for("view.store.cursor === null")
    assert board.state() == run.state


def moment(notebook: Notebook, step: int) -> Any:
    """The state just after a step, as the kernel's own replay has it."""
    code = f"""
import json
from asyncllm_nb.engine.reducer import reduce
records = llm.trace.plain(0)
end = max(i for i, record in enumerate(records) if record["t"] == "step" and record["n"] == {step})
print(json.dumps(reduce(records[:end + 1])))
"""
    return json.loads(notebook.run(code).text)


def test_each_widget_stands_alone(run: Run) -> None:
    """One after another below the dashboard; each shows what the dashboard's panel shows."""
    run.notebook.run("from asyncllm_nb import widgets")
    for number, name in enumerate(PANELS, start=1):
        run.notebook.run(f"widgets.{name.title()}(llm)")
        alone = Board(run.notebook.page, number)
        alone.wait_for_records(run.truth["next"])
        alone.look_at(name)
        run.board.look_at(name)
        assert alone.summary(name) == run.board.summary(name)
        assert alone.root.locator("[data-panel]").count() == 1
