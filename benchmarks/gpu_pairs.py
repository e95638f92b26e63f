"""How exact pairs stay on a GPU over thousands of tokens: ``python -m benchmarks.gpu_pairs``.

Knows the kernels of one Gated DeltaNet layer in the shape of Qwen3.5-9B, and the recurrence as it is
written, in float64. If flash-linear-attention is installed, its chunked rule runs beside ours: with
[Â; B̂] stacked as one state, and values [0; v].

    python -m benchmarks.gpu_pairs --out benchmarks/results/gpu_pairs.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm_nb.kernels.gdn_chunk_triton import (
    CHUNK,
    Before,
    ManyRows,
    Prepared,
    convolve_many_rows,
    gated_delta_many_rows,
)
from asyncllm_nb.kernels.gdn_triton import LayerSizes, SingleRows, gated_delta_single_rows

from .gpu_steps import times
from .shapes import QWEN35_9B

COUNTS = (1, 64, 1000, 2048, 4000)
TIMED = 2048
KEY_HEADS, HEADS = QWEN35_9B["linear_num_key_heads"], QWEN35_9B["linear_num_value_heads"]
KEY_DIM, VALUE_DIM = QWEN35_9B["linear_key_head_dim"], QWEN35_9B["linear_value_head_dim"]
SIZES = LayerSizes(KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM)
QUERIES = KEY_HEADS * KEY_DIM
CHANNELS = 2 * QUERIES + HEADS * VALUE_DIM
GPU = torch.device("cuda")

Pairs = dict[int, Tensor]
"""[H, d_k + d_v, d_k] after so many tokens."""


class Layer(NamedTuple):
    """A layer's parameters, and what its projections say of n tokens."""

    projected: Tensor  # [n, C + H d_v + 2 H] bf16: what is convolved, z, b, a
    conv: Tensor  # [4, C] float32
    decay_rate: Tensor  # [H] float32
    dt_bias: Tensor  # [H] float32


def random_layer(count: int) -> Layer:
    """`count` tokens; scales as in `shapes`: heads forget 0.1 to 13 percent a token."""
    generator = torch.Generator(GPU).manual_seed(0)
    width = CHANNELS + HEADS * VALUE_DIM + 2 * HEADS
    projected = 0.5 * torch.randn(count, width, device=GPU, generator=generator)
    return Layer(
        projected.bfloat16(),
        0.5 * torch.randn(4, CHANNELS, device=GPU, generator=generator),
        -torch.linspace(0.001, 0.1, HEADS, device=GPU),
        torch.ones(HEADS, device=GPU),
    )


def memory(slots: int) -> tuple[Tensor, Tensor]:
    """Pairs [slots, H, d_k + d_v, d_k] float32 and raw rows [slots, 3, C] bf16 of empty blocks."""
    pair = torch.cat((torch.eye(KEY_DIM, device=GPU), torch.zeros(VALUE_DIM, KEY_DIM, device=GPU)))
    rows = torch.zeros(slots, 3, CHANNELS, dtype=torch.bfloat16, device=GPU)
    return pair.repeat(slots, HEADS, 1, 1), rows


def as_written(layer: Layer) -> Pairs:
    """X ← α X (I − β k kᵀ) + β [0; v] kᵀ, token by token in float64."""
    projected = layer.projected.double()
    rows = F.pad(projected[:, :CHANNELS], (0, 0, 3, 0)).unfold(0, 4, 1)  # [n, C, 4]
    convolved = F.silu((rows * layer.conv.double().T).sum(-1))
    key = convolved[:, QUERIES : 2 * QUERIES].unflatten(-1, (KEY_HEADS, KEY_DIM))
    key = key * torch.rsqrt(key.pow(2).sum(-1, keepdim=True) + 1e-6)
    key = key.repeat_interleave(HEADS // KEY_HEADS, 1)[:, :, None]  # [n, H, 1, d_k]
    value = F.pad(convolved[:, 2 * QUERIES :].unflatten(-1, (HEADS, VALUE_DIM)), (KEY_DIM, 0))[..., None]
    raw_beta, raw_step = projected[:, -2 * HEADS :].split(HEADS, dim=-1)
    beta = raw_beta.sigmoid()[..., None, None]
    alpha = (layer.decay_rate.double() * F.softplus(raw_step + layer.dt_bias.double())).exp()[..., None, None]
    pair, found = memory(1)[0][0].double(), {}
    for t in range(len(key)):
        decayed = alpha[t] * pair
        pair = torch.baddbmm(decayed, beta[t] * (value[t] - decayed @ key[t].mT), key[t])
        if t + 1 in COUNTS:
            found[t + 1] = pair
    return found


def by_tokens(layer: Layer) -> Pairs:
    """One row a step, as streams decode; two slots take turns."""
    pairs, rows = memory(3)
    out = layer.projected.new_empty(len(layer.projected), HEADS * VALUE_DIM)
    norm = torch.ones(VALUE_DIM, device=GPU)
    numbers = torch.arange(len(layer.projected), dtype=torch.int32, device=GPU)
    raw = numbers[:9].view(3, 1, 3)  # places of each slot's raw rows
    none, one = numbers[:1], numbers[1:2]
    found = {}
    for t in range(len(layer.projected)):
        read, write = (1 + (t - 1) % 2 if t else 0), 1 + t % 2
        requests = SingleRows(
            number=one,
            row=numbers[t : t + 1],
            read_slot=numbers[read : read + 1],
            write_slot=numbers[write : write + 1],
            chain=none[None],
            chain_length=none,
            history=raw[read],
            kept_old=raw[read].roll(-1),
        )
        gated_delta_single_rows(*layer, norm, pairs, rows, requests, out, SIZES, 1e-6)
        if t + 1 in COUNTS:
            found[t + 1] = pairs[write].clone()
    return found


def one_request(count: int) -> ManyRows:
    """`count` rows of one request, in an empty block; it writes slot 1."""

    def number(values: Sequence[int] | Tensor) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=GPU)

    def placed(rows: Tensor) -> Tensor:
        return number(torch.where(rows < 0, -4 - rows, rows))  # before the first: slot 0 of the pool

    chunks = [*range(0, count, CHUNK), count]
    return ManyRows(
        row=number(range(count)),
        windows=placed(torch.arange(count)[:, None] + torch.arange(-3, 1)),
        request_start=number([0, count]),
        chunk_start=number(chunks),
        request_chunk=number([0, len(chunks) - 1]),
        write_slot=number([1]),
        kept=placed(torch.arange(count - 3, count)[None]),
    )


def prepared(
    layer: Layer, count: int, is_behind: bool = False
) -> tuple[Prepared, Callable[[], Tensor], Tensor]:
    """What the chunked rule takes of the first `count` tokens, the rule, behind a state or behind
    nothing, and the pair that it writes."""
    pairs, rows = memory(2)
    requests = one_request(count)
    made = convolve_many_rows(*layer, rows, requests, SIZES)
    state = torch.zeros(1, HEADS, VALUE_DIM, KEY_DIM, device=GPU)
    empty = torch.zeros(1, dtype=torch.int32, device=GPU)
    before = Before(state, empty + 1) if is_behind else None
    return made, lambda: gated_delta_many_rows(made, pairs, empty, before, requests), pairs[1]


def by_chunks(layer: Layer) -> Pairs:
    """All rows in one step, as a prompt is encoded."""
    found = {}
    for count in COUNTS:
        _, run, pair = prepared(layer, count)
        run()
        found[count] = pair
    return found


def errors(actual: Pairs, expected: Pairs) -> dict[str, dict[str, float]]:
    """The largest error of Â and of B̂, each as a share of its largest number."""

    def share(actual: Tensor, expected: Tensor) -> float:
        return ((actual.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-300)).item()

    return {
        str(count): {
            "a": share(pair[:, :KEY_DIM], expected[count][:, :KEY_DIM]),
            "b": share(pair[:, KEY_DIM:], expected[count][:, KEY_DIM:]),
        }
        for count, pair in actual.items()
    }


def gpu_times(run: Callable[[], Tensor]) -> dict[str, float]:
    """Milliseconds of `run` on the GPU alone: recorded, so that no launch is waited for."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return times(graph.replay, 30)


def beside_fla(layer: Layer, expected: Pairs) -> dict[str, Any]:
    """TIMED tokens by our chunks and by flash-linear-attention's, from the same prepared rows."""
    made, ours, _ = prepared(layer, TIMED, is_behind=True)  # as theirs is
    first = prepared(layer, TIMED)[1]
    found: dict[str, Any] = {"ours_ms": gpu_times(ours), "ours_behind_nothing_ms": gpu_times(first)}
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]
    except ImportError:
        return {**found, "fla": "not installed"}
    query, key = made.query[None].bfloat16(), made.key[None].bfloat16()
    value = F.pad(made.value, (KEY_DIM, 0))[None].bfloat16()
    gates = {"g": made.log_decay[None], "beta": made.beta[None]}
    stacked = memory(1)[0].mT.contiguous()  # [1, H, d_k, d_k + d_v]
    before = torch.zeros(HEADS, KEY_DIM, VALUE_DIM, dtype=torch.bfloat16, device=GPU)

    def theirs() -> Tensor:
        """The rule, and what is read through the state before: o = S y_first + y_second."""
        read, pair = chunk_gated_delta_rule(
            query, key, value, **gates, scale=1.0, initial_state=stacked, output_final_state=True
        )
        first, second = read[0].transpose(0, 1).split((KEY_DIM, VALUE_DIM), dim=-1)
        torch.baddbmm(second, first, before)
        return torch.as_tensor(pair)

    pair = theirs()[0].mT
    return {**found, "fla_ms": gpu_times(theirs), "fla_error": errors({TIMED: pair}, expected)[str(TIMED)]}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a JSON file for the numbers")
    file: Path | None = parser.parse_args().out
    layer = random_layer(max(COUNTS))
    expected = as_written(layer)
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    parts: dict[str, Callable[[], Any]] = {
        "by_tokens": lambda: errors(by_tokens(layer), expected),
        "by_chunks": lambda: errors(by_chunks(layer), expected),
        "beside_fla": lambda: beside_fla(layer, expected),
    }
    for name, measure in parts.items():
        found[name] = measure()
        print(name, json.dumps(found[name]), flush=True)
        if file is not None:
            file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
