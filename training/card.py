"""Writes the model card of tiny-hybrid from what was measured: its log, its accuracies, its files.

    python -m training.card [FOLDER]

Knows the words of the card and where each number stands. Measures nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

from safetensors import safe_open

from asyncllm_nb.evals.statistics import Share
from asyncllm_nb.evals.tables import Table
from asyncllm_nb.tasks.arithmetic import LARGEST, SMALLEST
from asyncllm_nb.tasks.examples import SHARES
from asyncllm_nb.tasks.pieces import HELD_OUT_ONE_IN

from .optimizer import BETAS, CLIP, DECAY, MOMENTUM
from .step import GIVEN_WEIGHT

HERE = Path(__file__).resolve().parent
BUNDLE = HERE.parent / "asyncllm_nb" / "tiny_hybrid"
LOG, ACCURACY = HERE / "log.jsonl", HERE / "accuracy.json"
WEIGHTS = "model.safetensors"

CONTENTS = {
    "a": "word problems of 3 to 6 steps, thought through line by line and checked; corrections of a given "
    "number in the prompt, in the thinking, or as a turn of their own",
    "b": "summaries: after each step, after several, or behind a thinking that was cut",
    "c": "logs: a rule, lines, yes or no after a line, explanations",
    "d": "a thinking that is stopped anywhere, and what is answered then",
    "e": "problems with a calculator that is called in the text",
    "f": "sub-questions that are opened, answered and used",
    "g": "spoken sums that arrive word by word, when to answer, and changes in the middle of the answer",
}

CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# tiny-hybrid

A language model of {millions} million parameters with the architecture of Qwen3.5's text models: Gated
DeltaNet layers, and gated full attention in every {interval}th. It comes with asyncllm_nb, so that everybody
can watch a trained hybrid share its memory, on any computer and without a download. It solves made-up tasks
whose answers can be scored, and nothing else. `transformers` loads the same folder.

```python
from asyncllm_nb import AsyncLLM
from asyncllm_nb.tasks import make_problem
import random

llm = AsyncLLM("tiny-hybrid")
problem = make_problem(random.Random(1), held_out=True)
print(await llm.generate(llm.chat_prompt(problem.text), max_tokens=300))
```

## Architecture

{sizes}

The tokenizer is a byte-level BPE with one token for each digit. Turns are marked as in Qwen's models; the
chat template opens `<think>` for the assistant, and closes it again with `enable_thinking=False`.

## Data

Ordinary sequential text only, made by the seeded code of `asyncllm_nb.tasks`. No text interleaves streams or
knows of cache blocks: that memory is shared between coroutines is new to the model. One task instance in
{one_in} is held out by a hash, and no training text is made of it.

{data}

## Training

From scratch on {device}: {tokens} million tokens in {steps} steps and {seconds} seconds, without the start.
{rows}Muon (momentum {momentum}) moves the matrices of the layers, AdamW (betas {betas}) all else; weight
decay is {decay}, on those matrices only, and gradients are clipped to {clip}. The rate {rate}rises at
first and falls to 0 with the clock. Products are computed in bfloat16, weights and states kept in float32.
A token that a user says or a tool returns counts {given} of one that the model says. The log is
`training/log.jsonl` in the repository, and `training/README.md` says how to train it again.

## Accuracy

On {examples} held-out examples of each sort, greedy, in {dtype}, sequentially: each text stands in one block.
An answer counts if it is right word for word; where a sort asks more than once about an example, each answer
counts. The interval is Wilson's, 95 %.

{accuracy}

## Limits

- It knows the sentences of its tasks, in {vocab} word pieces. Other wordings, other units and larger numbers
  are beyond it, and it says something all the same.
- Numbers are whole; without the calculator a quantity is {smallest} to {largest}, and a problem has six steps
  at most. Each sentence follows from earlier ones, and the last quantity is asked for: it does not look
  ahead, and goes on to the last one whatever the question says.
- A correction gives one of the problem's numbers anew. One that says "three times" for "twice" is passed
  over, and a check that has passed the number already does not come back to it.
- It makes little of a text that begins unlike those of its tasks, such as a block that was written with
  nothing before it. Two streams that write lines of one problem at the same time, each in sight of the
  other's, may take a sign or a number from the wrong one.
- Hardly any training text has more than 660 tokens; there are {positions} positions, but what it does far
  beyond that length was not looked at.
- It was trained on nothing that people wrote. It has no facts, and it is no measure of what larger models do.

## Licence

Apache-2.0, as the rest of the package.
"""


def read_log(file: Path) -> list[dict[str, Any]]:
    """The lines of a training log."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def card(folder: Path, log: list[dict[str, Any]], accuracy: dict[str, Any]) -> str:
    """The card of the model in `folder`.

    Raises ValueError if the accuracies are those of other weights.
    """
    weights = (folder / WEIGHTS).read_bytes()
    if hashlib.sha256(weights).hexdigest() != accuracy["weights"]:
        raise ValueError(
            f"the accuracies are those of other weights than {folder / WEIGHTS}: run "
            f"`python -m training.evaluate {folder} --out {ACCURACY}` first"
        )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with safe_open(folder / WEIGHTS, "np") as file:
        count = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    first, last = log[0], log[-1]
    shape = f"A step has {first['rows']} rows of {first['length']} tokens. " if "rows" in first else ""
    return CARD.format(
        millions=round(count / 1e6, 1),
        interval=config["full_attention_interval"],
        sizes=_sizes(config, count, len(weights)),
        one_in=HELD_OUT_ONE_IN,
        data=_data(),
        device=f"one {first['device']}" if "device" in first else "one GPU",
        tokens=round(last["tokens"] / 1e6),
        steps=f"{last['step']:,}",
        seconds=round(last["seconds"]),
        rows=shape,
        momentum=MOMENTUM,
        betas=" and ".join(map(str, BETAS)),
        decay=DECAY,
        clip=CLIP,
        rate=f"reaches {first['highest_rate']}: it " if "highest_rate" in first else "",
        given=GIVEN_WEIGHT,
        examples=accuracy["examples"],
        dtype=accuracy["dtype"],
        accuracy=_accuracy(accuracy),
        smallest=SMALLEST,
        largest=LARGEST,
        vocab=f"{config['vocab_size']:,}",
        positions=f"{config['max_position_embeddings']:,}",
    )


def _sizes(config: dict[str, Any], count: int, size: int) -> str:
    linear = config["layer_types"].count("linear_attention")
    rotary = config["rope_parameters"]["partial_rotary_factor"]
    rows = [
        ("parameters", f"{count:,}, bfloat16, {size / 1e6:.1f} MB; embeddings tied"),
        ("vocabulary", f"{config['vocab_size']:,}"),
        ("hidden size", f"{config['hidden_size']}; feed-forward {config['intermediate_size']}"),
        ("layers", f"{linear} Gated DeltaNet, {config['num_hidden_layers'] - linear} full attention"),
        (
            "Gated DeltaNet",
            f"{config['linear_num_value_heads']} heads of {config['linear_key_head_dim']} x "
            f"{config['linear_value_head_dim']}, convolution of {config['linear_conv_kernel_dim']}",
        ),
        (
            "full attention",
            f"{config['num_attention_heads']} heads of {config['head_dim']}, "
            f"{config['num_key_value_heads']} for keys and values, gated, rotary on {rotary:.0%} of a head",
        ),
        ("positions", f"{config['max_position_embeddings']:,}"),
    ]
    return Table.of(("what", "size"), rows).markdown()


def _data() -> str:
    rows = [(f"({kind})", CONTENTS[kind], f"{share:.0%}") for kind, share in SHARES.items()]
    return Table.of(("kind", "texts", "share of the tokens"), rows).markdown()


def _accuracy(accuracy: dict[str, Any]) -> str:
    rows = []
    for result in accuracy["results"]:
        share = Share(result["right"], result["of"])
        low, high = share.interval
        rows.append(
            (
                f"({result['kind']})",
                result["what"],
                f"{share.hits} of {share.of}",
                f"{share.value:.1%}",
                f"{low:.1%} to {high:.1%}",
            )
        )
    return Table.of(("kind", "asked", "right", "share", "interval"), rows).markdown()


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m training.card", description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=BUNDLE)
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--accuracy", type=Path, default=ACCURACY)
    chosen = parser.parse_args(arguments)
    accuracy = json.loads(chosen.accuracy.read_text(encoding="utf-8"))
    text = card(chosen.folder, read_log(chosen.log), accuracy)
    (chosen.folder / "README.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
