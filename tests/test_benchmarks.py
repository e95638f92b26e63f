"""The CPU's benchmark: that it runs whole, that both sides do the same work, and what its table says.

No speed is asserted: what is checked holds on any machine, however busy.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import checkpoint

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The numbers and the output of a quick run on a tiny checkpoint."""
    file = tmp_path_factory.mktemp("benchmark") / "cpu.json"
    command = [sys.executable, "-m", "benchmarks.cpu", "--quick", "--threads", "1"]
    command += ["--model", str(checkpoint("llama")), "--output", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text(encoding="utf-8")), done.stdout


def numbers(value: Any) -> list[float]:
    """All numbers in a document."""
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return [number for part in parts for number in numbers(part)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def test_cpu_measures_everything(run: tuple[dict[str, Any], str]) -> None:
    results, _ = run
    assert list(results["decode"]) == ["1", "2", "8", "8 streams, one shared prompt"]
    assert {"torch", "transformers", "python"} <= set(results["machine"]["versions"])
    measured = ("decode", "prefill", "first_token", "sharing")
    assert all(number > 0 for name in measured for number in numbers(results[name]))
    assert results["loop_lag"]["worker_thread"]["step"] >= 100
    assert results["loop_lag"]["on_the_loop"]["step"] >= 100
    assert results["loop_lag"]["idle"]["step"] == 0


def test_cpu_compares_the_same_tokens(run: tuple[dict[str, Any], str]) -> None:
    results, _ = run
    assert [results["decode"][streams]["same_tokens"] for streams in ("1", "2", "8")] == [True] * 3


def test_cpu_counts_the_tokens_that_each_way_of_reading_encodes(
    run: tuple[dict[str, Any], str],
) -> None:
    """3 portions of 20 thoughts behind a prompt of 20; the writer opens 3 notes and writes 8 tokens each."""
    results, _ = run
    opening = len("\n\nIn short,")  # the tiny tokenizer knows bytes only
    prompt, thoughts, notes, written = 20, 60, 3, 8
    added = [number * (opening + written) for number in (1, 2, 3)]
    encoded = {name: cost["encoded"] for name, cost in results["sharing"].items()}
    assert encoded["shared"] == prompt + thoughts + notes * (opening + written)
    assert encoded["prefix"] == 2 * (prompt + thoughts) + sum(added)
    assert encoded["text"] == prompt + thoughts + 3 * prompt + (20 + 40 + 60) + sum(added)


def test_table_has_a_line_for_each_measurement(run: tuple[dict[str, Any], str]) -> None:
    _, output = run
    for line in ("decode, 1 stream,", "decode, 8 streams,", "8 streams by one", "encode 33 tokens"):
        assert f"\n{line}" in output
    for line in ("first token after the call", "loop lag p95", "writer reads thinker"):
        assert f"\n{line}" in output


def run_python(code: str, *arguments: str) -> str:
    """What `code` prints. In another process: the root folder is no place to import from here."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_table_is_put_between_the_marks_of_a_page(run: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    numbers_file, page = tmp_path / "cpu.json", tmp_path / "page.md"
    numbers_file.write_text(json.dumps(run[0]), encoding="utf-8")
    code = (
        "import json, sys; from pathlib import Path; from benchmarks import table\n"
        "page = Path(sys.argv[2]); results = json.loads(Path(sys.argv[1]).read_text())\n"
        "page.write_text(f'before\\n{table.BEGIN}\\nold\\n{table.END}\\nafter\\n')\n"
        "table.put_into(page, results); table.put_into(page, results)\n"
    )
    run_python(code, str(numbers_file), str(page))
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert text.count("| decode, 1 stream, tokens/s |") == 1


def test_rounds_are_taken_in_turns_and_compared_round_by_round() -> None:
    code = (
        "import asyncio; from benchmarks.rounds import in_turns, percentile\n"
        "calls = []\n"
        "def side(name, numbers):\n"
        "    async def measure():\n"
        "        calls.append(name); return float(numbers.pop(0))\n"
        "    return measure\n"
        "compared = asyncio.run(in_turns(side('a', [9, 1, 20, 6]), side('b', [9, 1, 10, 2]), 3))\n"
        "print(''.join(calls), compared.ratios, compared.ratio)\n"
        "print(percentile(range(1, 101), 0.95), percentile([5.0], 0.95), percentile([1, 2, 3], 0.5))\n"
    )
    assert run_python(code) == "ababbaab [1.0, 2.0, 3.0] 2.0\n95 5.0 2\n"
