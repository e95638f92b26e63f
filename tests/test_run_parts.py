"""The driver behind `make test`: every test file runs in exactly one part, and none is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from run_parts import PARTS, TESTS, Part, Result, chosen, count_outcomes, report, run_all


def test_every_test_file_is_in_exactly_one_part() -> None:
    for file in sorted(TESTS.rglob("test_*.py")):
        names = [part.name for part in PARTS if file in part.files()]
        assert len(names) == 1, f"tests/run_parts.py runs {file.relative_to(TESTS)} in {names}"


def test_gpu_and_browser_tests_stand_in_their_folders() -> None:
    for kind in ("gpu", "browser"):
        for file in TESTS.glob("test_*.py"):
            if file != Path(__file__).resolve():
                text = file.read_text(encoding="utf-8")
                assert f"mark.{kind}" not in text, f"move {file.name} to {kind}/"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("=== 2 failed, 5 passed in 0.31s ===", {"failed": 2, "passed": 5}),
        ("= 1 passed, 3 deselected, 2 errors in 65.20s (0:01:05) =", {"passed": 1, "error": 2}),
        ("7 skipped in 0.01s", {"skipped": 7}),
        ("no tests ran in 0.01s", {}),
        ("interrupted", {}),
    ],
)
def test_count_outcomes_reads_pytests_closing_line(line: str, expected: dict[str, int]) -> None:
    assert count_outcomes(f"3 failed as text\n{line}\nsaid at exit") == expected


def test_report_sums_up_and_names_what_failed() -> None:
    engine = Part("engine", 0.01, rest=True)
    results = [
        Result(Part("lint", 1, command=("ruff",)), "2 passed over\n", 1, 0.2),
        Result(engine, "...\n=== 3 passed, 1 xfailed in 9s ===", 0, 9.0),
        Result(engine, "=== 2 failed, 1 error in 9s ===", 1, 0.1),
    ]
    lint, first, second, total = report(results).splitlines()
    assert lint.startswith("lint") and "FAILED" in lint
    assert "OVER ITS BUDGET" in first and "3 passed, 1 xfailed in 9s" in first
    assert "FAILED" in second
    assert total == "3 passed, 3 failed, 1 skipped"


def test_run_all_gives_the_exit_status_of_each(capfd: pytest.CaptureFixture[str]) -> None:
    parts = [Part("good", 1, command=("this",)), Part("bad", 1, command=("that",), alone=True)]
    good, bad = run_all(parts)
    assert good.status == 0 and "The Zen of Python" in good.output
    assert bad.status == 1 and "No module named that" in bad.output
    printed = capfd.readouterr().out
    assert printed.index("The Zen") < printed.index("bad: started")


def test_chosen_refuses_unknown_parts() -> None:
    with pytest.raises(SystemExit, match="no part nonsense with tests; there are: lint, types"):
        chosen(["lint", "nonsense"])
    assert [part.name for part in chosen(["lint"])] == ["lint"]
    assert chosen(["lint"])[0].argv() == [sys.executable, "-m", "ruff", "check", "."]
