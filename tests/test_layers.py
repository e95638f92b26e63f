"""Which folder may import what: kernels <- engine <- asyncllm_nb -> widgets.

Reads the source files; two tests import in a new process.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK_LIBRARIES = {"IPython", "anywidget", "ipykernel", "ipywidgets", "plotly"}

FORBIDDEN = {
    "kernels": {"asyncllm_nb", "engine", "widgets", "transformers", *NOTEBOOK_LIBRARIES},
    "engine": {"asyncllm_nb", "widgets", *NOTEBOOK_LIBRARIES},
    "widgets": {"asyncllm_nb", "engine", "kernels", "torch", "transformers"},
    "asyncllm_nb": set[str](),
}


def imported(folder: str, path: Path) -> Iterator[str]:
    """What a file of `folder` imports, by top-level name; other folders of ours by their own.

    `from ..kernels import rotary` in engine/ gives "kernels", `from .blocks import x` nothing, and
    `from .. import models` or `import asyncllm_nb.llm` gives "asyncllm_nb".
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")[0]
            if node.level == 0:
                yield module
            elif folder == "asyncllm_nb":
                yield from [module] if module in FORBIDDEN else []
            elif node.level > 1:
                names = [module] if module else [alias.name for alias in node.names]
                yield from (name if name in FORBIDDEN else "asyncllm_nb" for name in names)


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).glob("*.py"))


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_imports_follow_the_arrows(folder: str) -> None:
    broken = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files(folder)
        for name in sorted(set(imported(folder, path)) & FORBIDDEN[folder])
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_folders_are_imported_relatively(folder: str) -> None:
    """`import engine` from the root would make a second copy of every class in it."""
    absolute = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files(folder)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "x"))
        and str(node.module).split(".")[0] in FORBIDDEN
    ]
    assert not absolute, f"write `from ..folder import name` at {', '.join(absolute)}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from ..widgets import base", {"widgets"}),
        ("from .. import llm", {"asyncllm_nb"}),
        ("def f():\n    import ipywidgets.widgets as w", {"ipywidgets"}),
        ("from .blocks import CacheBlock", set()),
        ("from ..kernels.rotary import rotate", {"kernels"}),
    ],
)
def test_imported_sees_each_form(tmp_path: Path, source: str, expected: set[str]) -> None:
    (tmp_path / "module.py").write_text(source)
    assert set(imported("engine", tmp_path / "module.py")) == expected


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_package_loads_its_heavy_parts_when_they_are_used() -> None:
    code = "import sys, asyncllm_nb, asyncllm_nb.widgets; print('torch' in sys.modules)"
    assert run_python(code) == "False"


def test_the_folder_kernels_does_not_hide_the_package_of_that_name() -> None:
    """transformers probes for a package `kernels` and would import ours if it had an __init__."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    code = (
        "from transformers import LlamaConfig, LlamaForCausalLM as M;"
        "c = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, vocab_size=8,"
        " num_attention_heads=1, num_key_value_heads=1); print(M(c).config.model_type)"
    )
    assert run_python(code) == "llama"
