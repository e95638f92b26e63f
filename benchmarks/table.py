"""The results as a table for people: what was measured, beside what, and which aims were reached.

Knows the shape of the results that `cpu` writes. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER = ("measured", "here", "beside it", "ratio", "aim")

BEGIN, END = "<!-- the table of cpu.json begins -->", "<!-- the table of cpu.json ends -->"

Row = tuple[str, str, str, str, str]


def rows(results: dict[str, Any]) -> Iterator[Row]:
    """One line for each thing that was measured."""
    yield from _decoding(results["decode"])
    for length, compared in results["prefill"].items():
        yield _speeds(f"encode {length} tokens, tokens/s", compared, "transformers")
    yield from _starting(results["first_token"])
    yield from _lag(results["loop_lag"])
    yield from _sharing(results["sharing"])


def _decoding(decode: dict[str, Any]) -> Iterator[Row]:
    single = decode["1"]["median_ours"]
    for streams, compared in decode.items():
        if "shared" in streams:
            yield _speeds(f"decode, {streams}, tokens/s", compared, "a prompt each")
            continue
        least = 1.0 if streams == "1" else None
        name = f"decode, {streams} stream{'s' * (streams != '1')}, tokens/s"
        yield _speeds(name, compared, "transformers", least)
    if "8" in decode:
        many = decode["8"]["median_ours"]
        yield (
            *("8 streams by one", f"{many:.1f}", f"{single:.1f} one stream"),
            *(f"{many / single:.2f}", _aim("≥ 3", many / single >= 3)),
        )


def _speeds(name: str, compared: dict[str, Any], other: str, least: float | None = None) -> Row:
    low, high = compared["ratio_range"]
    ratio = compared["ratio"]
    return (
        name,
        f"{compared['median_ours']:.1f}",
        f"{compared['median_theirs']:.1f} {other}",
        f"{ratio:.2f} ({low:.2f} to {high:.2f})",
        "" if least is None else _aim(f"≥ {least:g}", ratio >= least),
    )


def _starting(first: dict[str, Any]) -> Iterator[Row]:
    for name, key, most in (
        ("first token after the call, s", "from_call", 5.0),
        ("first token with imports, s", "from_import", None),
    ):
        compared = first[key]
        ours, theirs = compared["median_ours"], compared["median_theirs"]
        aim = "" if most is None else _aim(f"≤ {most:g} s", ours <= most)
        yield (
            *(name, f"{ours:.1f}", f"{theirs:.1f} transformers"),
            *(f"{compared['ratio']:.2f}", aim),
        )


def _lag(lag: dict[str, Any]) -> Iterator[Row]:
    here, loop, idle = lag["worker_thread"], lag["on_the_loop"], lag["idle"]
    yield (
        f"loop lag p95 with steps of {here['step']:.0f} ms, ms",
        f"{here['p95']:.1f}",
        f"{loop['p95']:.1f} steps on the loop",
        f"{here['p95'] / loop['p95']:.2f}",
        _aim("≤ 20 ms", here["p95"] <= 20),
    )
    yield "loop lag p95 with no steps, ms", f"{idle['p95']:.1f}", "", "", ""


def _sharing(sharing: dict[str, Any]) -> Iterator[Row]:
    shared = sharing["shared"]
    for name, other in (("text", "passing text"), ("prefix", "text, prefix cached")):
        cost = sharing[name]
        for what, key, form in (("tokens encoded", "encoded", ",.0f"), ("s", "seconds", ".1f")):
            yield (
                f"writer reads thinker, {what}",
                f"{shared[key]:{form}}",
                f"{cost[key]:{form}} {other}",
                f"1 : {cost[key] / shared[key]:.1f}",
                "",
            )


def _aim(aim: str, is_met: bool) -> str:
    return f"{aim}: {'yes' if is_met else 'NO'}"


def text(results: dict[str, Any]) -> str:
    """Columns for a terminal."""
    lines = [HEADER, *rows(results)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    padded = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in lines]
    return "\n".join(line.rstrip() for line in [padded[0], "-" * sum(widths), *padded[1:]])


def markdown(results: dict[str, Any]) -> str:
    """The same in Markdown, below a line about the machine."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    about = (
        f"{machine['date']}, {machine['processor']} ({machine['vector_instructions']}), "
        f"cores: {machine['cores']}, threads: {machine['threads']}, load before the run "
        f"{machine['load']}; {versions}."
    )
    lines = [HEADER, ("---",) * len(HEADER), *rows(results)]
    return "\n".join([about, "", *(f"| {' | '.join(line)} |" for line in lines)])


def put_into(page: Path, results: dict[str, Any]) -> None:
    """Replace the table between the two marks of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{page} needs the lines {BEGIN!r} and {END!r}: the table goes in between")
    page.write_text(f"{before}{BEGIN}\n\n{markdown(results)}\n\n{END}{after}", encoding="utf-8")
