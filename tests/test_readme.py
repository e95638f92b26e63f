"""The README's cells run exactly as printed, in a real kernel with the real small model."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

README = Path(__file__).resolve().parent.parent / "README.md"
CELL = re.compile(r"^```python\n(# In \[\d+\]\n.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.kernel
@pytest.mark.timeout(600)
def test_readme_cells_run_as_printed(tmp_path: Path) -> None:
    sources = CELL.findall(README.read_text(encoding="utf-8"))
    assert len(sources) == 5
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, sources)])
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=500, kernel_name="python3", resources=resources).execute()
    printed = "".join(
        output.text
        for cell in notebook.cells
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stdout"
    )
    assert printed.endswith("{'think': None}\n")
    assert printed.count("In short,") == 0, "what is given to generate is not yielded"
    assert len(printed.split()) >= 5 and "." in printed, f"the writer wrote {printed!r}"


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_documents_name_files_that_exist(document: str) -> None:
    text = (README.parent / document).read_text(encoding="utf-8")
    named = {*re.findall(r"`([\w./-]+/[\w.-]*)`", text), *re.findall(r"\]\(([\w./-]+)\)", text)}
    assert named
    later = {"tests/gpu/", "tests/browser/"}
    missing = {name for name in named - later if not (README.parent / name).exists()}
    assert not missing
