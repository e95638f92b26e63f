"""What reading shared blocks costs on tiny-hybrid, for the record: ``python -m benchmarks.approximation``.

Knows where results are kept; what is measured, and how, is `asyncllm_nb.evals.approximation`'s.

    python -m benchmarks.approximation                 measure; renew results/ and the table in RESULTS.md
    python -m benchmarks.approximation --table-only    renew the table from the file in results/
"""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncllm_nb.evals import approximation
from asyncllm_nb.evals.divergence import Result

FOLDER = Path(__file__).resolve().parent
KEPT, PAGE = FOLDER / "results" / "approximation.json", FOLDER / "RESULTS.md"
PROBLEMS = 60

BEGIN = "<!-- the table of approximation.json begins -->"
END = "<!-- the table of approximation.json ends -->"


def markdown(result: Result) -> str:
    """The table, below a line that says how many numbers stand behind each of it."""
    scene = result.scenes[0]
    some = result.summary(scene, "as is")
    assert some is not None
    settings = result.settings
    about = (
        f"{settings['model']}, {some.problems} problems a view, continuations of at most "
        f"{settings['length']} tokens behind what is given; nats, mean (worst)."
    )
    return f"{about}\n\n{result.overview().markdown()}"


def put_into(page: Path, result: Result) -> None:
    """Replace the table between the two marks of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{page} needs the lines {BEGIN!r} and {END!r}: the table goes in between")
    page.write_text(f"{before}{BEGIN}\n\n{markdown(result)}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.approximation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--table-only", action="store_true", help="measure nothing")
    parser.add_argument("--processes", default="1", help="that share the work")
    options = parser.parse_args()
    if not options.table_only:
        arguments = ("--problems", str(PROBLEMS), "--concurrency", "16", "--threads", "1", "--out", str(KEPT))
        approximation.main((*arguments, "--processes", options.processes))
    put_into(PAGE, Result.from_json(KEPT))


if __name__ == "__main__":
    main()
