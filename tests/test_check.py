"""`check`: each judgement, from plain facts, and the whole report in and outside a kernel."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from kernel_harness import Kernel
from packaging.requirements import Requirement
from packaging.version import Version

from asyncllm_nb.check import (
    Line,
    Report,
    State,
    check,
    controls_line,
    loop_line,
    nesting_line,
    no_gpu_line,
    package_line,
    python_line,
    requirements,
)
from asyncllm_nb.host import host_name

JUPYTER = "JupyterLab or Notebook"


@pytest.mark.parametrize(
    ("version", "state"), [((3, 11, 0), "ok"), ((3, 14, 2), "ok"), ((3, 10, 9), "problem")]
)
def test_python_line(version: tuple[int, ...], state: State) -> None:
    line = python_line(version, "Linux")
    assert line.state == state and ("3.11" in line.fix) == (state == "problem")


@pytest.mark.parametrize(
    ("version", "needed", "state", "words"),
    [
        ("2.0", "anywidget>=1.5", "ok", "2.0"),
        ("2.0rc1", "anywidget>=1.5", "ok", "2.0rc1"),
        ("1.4", "anywidget>=1.5", "problem", "1.4, but >=1.5 is needed"),
        (None, "anywidget>=1.5", "problem", "not installed"),
        ("1.4", None, "ok", "1.4"),
        (None, None, "ok", "not needed"),
    ],
)
def test_package_line(version: str | None, needed: str | None, state: State, words: str) -> None:
    line = package_line("anywidget", version, Requirement(needed) if needed else None)
    assert line.state == state and words in line.text
    if state == "problem":
        assert line.fix == '%pip install -U "anywidget>=1.5", then restart the kernel'


def test_a_missing_triton_is_no_problem() -> None:
    assert package_line("triton", None, Requirement("triton>=3.2")).state == "ok"


def test_requirements_are_those_of_this_system() -> None:
    declared = ["one>=1", "two>=2; platform_system == 'Nowhere'", "three; extra == 'test'"]
    assert list(requirements(declared)) == ["one"]


@pytest.mark.parametrize(
    ("version", "host", "state"),
    [
        ("7.4.0", "VS Code", "ok"),
        ("7.4.0", JUPYTER, "ok"),
        ("7.3.1", JUPYTER, "ok"),
        ("7.3.1", "VS Code", "note"),
        ("6.31.0", JUPYTER, "note"),
        ("6.29.5", JUPYTER, "problem"),
    ],
)
def test_controls_line(version: str, host: str, state: State) -> None:
    line = controls_line(Version(version), host)
    assert line.state == state and ("ipykernel>=7.4" in line.fix) == (state != "ok")


@pytest.mark.parametrize(
    ("patched", "by_successor", "state"),
    [(False, False, "ok"), (True, True, "ok"), (True, False, "problem")],
)
def test_nesting_line(patched: bool, by_successor: bool, state: State) -> None:
    assert nesting_line(patched, by_successor).state == state


async def test_loop_line_accepts_the_loops_of_asyncio() -> None:
    assert loop_line(asyncio.get_running_loop()).state == "ok"
    assert loop_line(None).state == "ok"


def test_loop_line_notes_other_loops() -> None:
    class OtherLoop(asyncio.AbstractEventLoop):
        pass

    line = loop_line(OtherLoop())  # type: ignore[abstract]
    assert line.state == "note" and "OtherLoop" in line.text and "await" in line.fix


@pytest.mark.parametrize(("cuda", "state"), [(None, "ok"), ("13.0", "note")])
def test_no_gpu_line(cuda: str | None, state: State) -> None:
    assert no_gpu_line(cuda).state == state


REPORT = Report(
    (
        Line("Python", "ok", "3.12"),
        Line("thing", "note", "is <odd>"),
        Line("other", "problem", "is broken", "mend & restart"),
    )
)


def test_report_as_text() -> None:
    assert repr(REPORT).split("\n") == [
        "   asyncllm_nb  1 problem",
        "✓  Python       3.12",
        "●  thing        is <odd>",
        "✗  other        is broken  -> mend & restart",
    ]
    assert not REPORT.ok and Report(REPORT.lines[:2]).ok


def test_report_as_html() -> None:
    html = REPORT._repr_html_()
    assert "is &lt;odd&gt;" in html and "mend &amp; restart" in html
    words = re.sub(r"<[^>]*>", " ", html)
    assert "problem" in words and "note" in words  # the colour is not the only sign


def test_check_outside_a_kernel() -> None:
    report = check()
    lines = {line.topic: line for line in report.lines}
    assert report.ok, report
    assert "no notebook" in lines["host"].text and "controls" not in lines
    assert {"torch", "transformers", "anywidget", "CPU", "GPU", "event loop"} <= set(lines)


@pytest.mark.kernel
def test_check_in_a_kernel(tmp_path: Path) -> None:
    with Kernel(tmp_path, JPY_SESSION_NAME="a.ipynb", VSCODE_PID="", VSCODE_CWD="") as kernel:
        kernel.run_ok("import asyncllm_nb")
        cell = kernel.run_ok("asyncllm_nb.check()")
        (shown,) = cell.displays
        assert "all well" in shown["data"]["text/html"]
        assert "JupyterLab or Notebook" in shown["data"]["text/html"]
        assert re.search("controls +act at once", shown["data"]["text/plain"])
        kernel.run_ok("import asyncio; asyncio._nest_patched = True")
        (shown,) = kernel.run_ok("asyncllm_nb.check()").displays
        assert "nest_asyncio.apply()" in shown["data"]["text/plain"]


def test_host_name_outside_a_kernel() -> None:
    assert host_name() == "no notebook (plain Python)"
