"""What the evaluations found, as a section of Markdown, from the files that they wrote. Knows no model.

    python -m asyncllm_nb.evals.report benchmarks/results

The files in that folder are made by

    python -m asyncllm_nb.evals.sharded --out benchmarks/results/sharded.json
    python -m asyncllm_nb.evals.sequential --out benchmarks/results/sequential.json
    python -m asyncllm_nb.evals.logs --out benchmarks/results/logs.json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .logs import Watch
from .results import Result
from .sequential import Comparison

TEXT = """\
## What an input does that arrives while the model thinks

`python -m asyncllm_nb.evals.sharded --problems {problems}`: held-out problems, greedy; outcomes per problem
stand in `results/sharded.json`. A correction arrives when the thinker has made k tokens: *before*, right
behind the problem and in front of the thinking; *after*, as a turn behind the thinking so far; *writer*, as a
turn that only the writer reads. Everything computed stays. Of the writer's answer the last whole number
counts. *Taken up*: the last line of the thinking that is no check gives the answer after the correction.
*Arrived*: the correction came before the thinking had ended; where it did not, it was never said. In brackets
stand Wilson's 95 % intervals.

{sharded}

Means over the same runs. Forward passes count from the moment when the problem was encoded:

{work}

### Writing while thinking, or afterwards

`python -m asyncllm_nb.evals.sequential --problems {compared}`: no correction comes. *Shared*: the writer sums
up paragraphs while the thinker goes on. *Sequential*: the same, when the thinker has ended. *Answer only*: no
summaries. Shared and sequential differ in {differing} problems in whether the answer is right; word for word
their answers are the same in {same}.

{sequential}

### Watching a log

`python -m asyncllm_nb.evals.logs --logs {logs} --lines {lines}`: held-out logs. A line comes after every
{pace} tokens of a thinker that explains older ones. The *watcher* encodes it and asks "Warn?" by a probe; the
*sequential* loop reads all lines first, then explains each in text. Delay: forward passes from when a line
was due until its warning was known.

{watch}
"""


def section(folder: Path) -> str:
    """The section, as Markdown, of the files in `folder`."""
    result = Result.from_json(folder / "sharded.json")
    compared = Comparison.from_json(folder / "sequential.json")
    watch = Watch.from_json(folder / "logs.json")
    return TEXT.format(
        problems=result.settings["problems"],
        sharded=result.table().markdown(),
        work=result.work_table().markdown(),
        compared=len(next(iter(compared.ways.values())).runs),
        differing=len(compared.differing("shared", "sequential")),
        same=compared.same_words("shared", "sequential"),
        sequential=compared.table().markdown(),
        logs=watch.settings["logs"],
        lines=max(line.index for line in watch.lines) + 1,
        pace=watch.settings["pace"],
        watch=watch.table().markdown(),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m asyncllm_nb.evals.report", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, help="has sharded.json, sequential.json and logs.json")
    options = parser.parse_args(arguments)
    try:
        print(section(options.folder))
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
