"""Drawing tokens on a GPU without sorting and without the CPU, whatever the filters keep.

Knows probabilities and rows of options; what `sampling.look_at_beginning` leaves open is searched here. The
meaning is that of `sampling.sample`. Where a drawn number or a filter's border lies so close to the border
between two tokens that the rounding of float64 sums decides, either neighbour may come.

The bits of a probability are its key: an integer that grows with it. All that is looked for is the end of
a beginning of the order, so it is found like a word in a dictionary: a program adds up what the keys above
each of PARTS thresholds weigh (1 each for top-k, else their probabilities), goes on between the two
thresholds where the target is reached, and is done when there is one key left. Its equals share a
probability, so a division tells how many of them belong to the beginning. That is done for the end of
top-k, the end of top-p and the token drawn, as far as a row's options ask for it; what min-p keeps is known
and only has to be added up.

A row's vocabulary is shared by many programs, so sums of one set of thresholds are one launch (`_narrow`).
How many launches a row needs depends on its numbers, but a recorded step has a fixed number of them: PASSES
do for one search. What is then left of a row is done by one program for it (`_finish`). Each program finds
the state of the search from the state and the sums before it. Launches leave a row alone that was decided.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sampling import OPTIONS_WIDTH, logprobs_of, look_at_beginning

PASSES = 10
"""Launches that narrow a search down: one search of 248,320 tokens takes 9 or 10. Top-p is a second one,
which is seldom left to be done here; more launches would be in the way of all other steps."""

SHARE = 8192
"""Tokens of a row that one program adds up."""

PARTS = 8
"""Thresholds of a launch. More need fewer launches, and more time in each."""

STATE = 16
"""Room for the numbers of a state, float64."""

# What is searched or added up, in this order.
TOP_K = tl.constexpr(0)  # the end of top-k, by counts
TOP_K_MASS = tl.constexpr(1)  # what it keeps
TOP_P = tl.constexpr(2)  # the end of top-p
MIN_P_MASS = tl.constexpr(3)  # what is kept if min-p keeps the fewest
TOKEN = tl.constexpr(4)
DONE = tl.constexpr(5)

ALL_EQUALS = tl.constexpr(2147483648.0)  # more tokens of one probability than there are

LEAST_LEFT = tl.constexpr(2.0**-40)
"""Share of the mass that the drawn number stays below all of it, even if it was rounded to 1: so no rounding
of sums puts it beyond the last token."""


def sample_all(logits: Tensor, options: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `sample` draws; arguments and results are those of `sampling.sample_beginning`.

    Only rows whose logits are not finite, -inf aside, can be undecided. Can be recorded.
    """
    ids, decided, probs, total, peak = look_at_beginning(logits, options)
    search(probs, total, peak, options, ids, decided)
    return ids, logprobs_of(logits, ids), decided


def search(
    probs: Tensor, total: Tensor, peak: Tensor, options: Tensor, ids: Tensor, decided: Tensor,
    *, share: int = SHARE, passes: int = PASSES,
) -> None:  # fmt: skip
    """Draw the rows of `ids` [n] int64 that are not `decided` [n] bool, both in place.

    The others are those of `sampling.Beginning`; `options` [n, OPTIONS_WIDTH] float64, contiguous. `share`
    tokens, a power of two, are added up by one program, `passes` times.
    """
    rows, vocab = probs.shape
    shares = triton.cdiv(vocab, share)
    if shares == 1:  # then one program is as fast
        passes = 0
    keys, flags = probs.view(torch.int32), decided.view(torch.uint8)
    row_data = (keys, options, total, peak.contiguous(), flags)
    states = total.new_empty((max(passes, 1), rows, STATE))
    sums = total.new_empty((max(passes, 1), rows, shares, PARTS))
    found = ids.new_empty((rows, 2), dtype=torch.int32)
    counts = ids.new_empty((rows, shares), dtype=torch.int32)
    sizes = {"WIDTH": OPTIONS_WIDTH, "STATE": STATE, "PARTS": PARTS, "SHARES": triton.next_power_of_2(shares)}
    for index in range(passes):
        before = max(index - 1, 0)
        _narrow[(rows, shares)](
            *row_data, states[before], sums[before], states[index], sums[index], vocab, shares,
            FIRST=index == 0, SHARE=share, LANES=min(256, share // 8), num_warps=8, **sizes,
        )  # fmt: skip
    _finish[(rows,)](
        *row_data, states[-1], sums[-1], found, vocab, shares,
        FIRST=passes == 0, LANES=512, num_warps=16, **sizes,
    )  # fmt: skip
    _count[(rows, shares)](keys, total, flags, found, counts, vocab, shares, SHARE=share, num_warps=8)
    _take[(rows,)](
        keys, total, flags, found, counts, ids, vocab, shares,
        SHARE=share, SHARES=sizes["SHARES"], num_warps=8,
    )  # fmt: skip


@triton.jit
def _is_open(flags: tl.tensor, total: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Is there something to search? Not if the row is decided, or if a probability is NaN."""
    return (tl.load(flags + row) == 0) & (tl.load(total + row) > 0)


@triton.jit
def _key(probability: tl.tensor) -> tl.tensor:
    """An integer that orders as probabilities do, once they are float32."""
    return probability.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _probability(key: tl.tensor) -> tl.tensor:
    return key.to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _thresholds(low: tl.tensor, high: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """[PARTS] keys above `low`, evenly spaced; those from `high` on do not count."""
    return low + (1 + tl.arange(0, PARTS)) * tl.cdiv(high - low, PARTS + 1)


@triton.jit
def _weigh(
    total: tl.tensor, keys: tl.tensor, threshold: tl.tensor, phase: tl.tensor, LANES: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """`total` [PARTS, LANES] and what those of `keys` [4 * LANES] weigh that reach `threshold` [PARTS]."""
    even, odd = tl.split(tl.reshape(keys, (LANES, 2, 2)))
    for pair in tl.static_range(2):
        a, b = tl.split(even if pair == 0 else odd)  # [LANES]
        for index in tl.static_range(2):
            key = a if index == 0 else b
            weight = tl.where(phase == TOP_K, 1.0, _probability(key))
            total += tl.where(key[None, :] >= threshold[:, None], weight[None, :], 0.0)
    return total


@triton.jit
def _add_up(
    keys: tl.tensor, start: tl.tensor, end: tl.tensor, phase: tl.tensor, low: tl.tensor, high: tl.tensor,
    vocab: tl.tensor, PARTS: tl.constexpr, LANES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[PARTS] what the tokens from `start` to `end` weigh whose keys reach each threshold."""
    threshold = _thresholds(low, high, PARTS)
    total = tl.zeros((PARTS, LANES), tl.float64)
    token = tl.arange(0, 4 * LANES)  # four neighbours are one load of a lane
    for first in range(start, end, 8 * LANES):
        place = first + token
        a = tl.load(keys + place, mask=place < vocab, other=-1)
        place += 4 * LANES
        b = tl.load(keys + place, mask=place < vocab, other=-1)  # two are on their way at once
        total = _weigh(total, a, threshold, phase, LANES)
        total = _weigh(total, b, threshold, phase, LANES)
    return tl.sum(total, 1)


@triton.jit
def _enter(
    phase: tl.tensor, limit: tl.tensor, limit_count: tl.tensor, mass: tl.tensor,
    asked: tl.tensor, peak: tl.tensor, row: tl.tensor, vocab: tl.tensor, WIDTH: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """The state in which `phase`, or the first after it that the row's options ask for, begins.

    A state is: the phase; the keys between which its end lies, low <= end < high; what tokens from
    `high` on weigh and what those from `low` on do, if known; the target, which is reached in between; the
    last kept key, as far as filters were applied, how many tokens of that key are kept, and the mass kept.
    """
    top_k = tl.load(asked + row * WIDTH + 1)  # in the order of sampling.OPTIONS
    top_p = tl.load(asked + row * WIDTH + 2).to(tl.float32).to(tl.float64)
    min_p = tl.load(asked + row * WIDTH + 3).to(tl.float32)
    uniform = tl.load(asked + row * WIDTH + 4).to(tl.float32).to(tl.float64)
    most = tl.load(peak + row)
    if (phase == TOP_K) & ((top_k <= 0) | (top_k >= vocab)):
        phase = phase * 0 + TOP_P
    if (phase == TOP_P) & (top_p >= 1):
        phase = phase * 0 + MIN_P_MASS
    if phase == MIN_P_MASS:
        lowest = _key(min_p * most)
        if lowest > limit:
            limit = lowest
            limit_count = limit_count * 0 + ALL_EQUALS
        else:
            phase = phase * 0 + TOKEN
    target = tl.where(phase == TOP_P, top_p * mass, tl.minimum(uniform * mass, mass - mass * LEAST_LEFT))
    # The tokens from the one searched to the end weigh more than the rest of the mass, so this one weighs
    # more than what each would if they were all tokens.
    low = _key(0.99 * (mass - target) / vocab)
    low = tl.where(phase == TOKEN, tl.maximum(low, limit), low)
    high = _key(most) + 1
    if phase == TOP_K:
        low = low * 0
        target = top_k
    if (phase == TOP_K_MASS) | (phase == MIN_P_MASS):  # no search: `limit` is the key
        low = limit - 1
        high = limit + 2
    low = tl.minimum(low, high - 1)  # whatever a row holds, a search has an end
    before = mass * 0
    reached = before + float("inf")
    return phase, low, high, before, reached, target, limit, limit_count, mass


@triton.jit
def _start(
    asked: tl.tensor, total: tl.tensor, peak: tl.tensor, row: tl.tensor, vocab: tl.tensor,
    WIDTH: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """The first state of a row: all that has a probability is kept."""
    mass = tl.load(total + row)
    phase = (row * 0).to(tl.int32)
    return _enter(phase, phase + 1, mass * 0 + ALL_EQUALS, mass, asked, peak, row, vocab, WIDTH)


@triton.jit
def _advance(
    phase: tl.tensor, low: tl.tensor, high: tl.tensor, before: tl.tensor, reached: tl.tensor,
    target: tl.tensor, limit: tl.tensor, limit_count: tl.tensor, mass: tl.tensor,
    sums: tl.tensor, asked: tl.tensor, peak: tl.tensor, row: tl.tensor, vocab: tl.tensor,
    WIDTH: tl.constexpr, PARTS: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """The state after the state's thresholds were added up to `sums` [PARTS]."""
    threshold = _thresholds(low, high, PARTS)
    is_used = threshold < high
    is_enough = tl.where(phase == TOKEN, sums > target, sums >= target)
    is_known = (phase == TOP_K_MASS) | (phase == MIN_P_MASS)
    is_enough = is_used & tl.where(is_known, threshold <= limit, is_enough)
    low = tl.maximum(low, tl.max(tl.where(is_enough, threshold, low)))
    is_above = is_used & (threshold > low)
    high = tl.min(tl.where(is_above, threshold, high))
    reached = tl.minimum(reached, tl.min(tl.where(is_enough, sums, reached)))
    before = tl.maximum(before, tl.max(tl.where(is_above, sums, before)))
    if (phase < DONE) & (high - low <= 1):
        each = _probability(low)
        missing = (target - before) / tl.where(low > 0, each, 1.0)  # not of tokens that have no probability
        if phase == TOP_K:
            limit = tl.maximum(low, 1)
            limit_count = tl.where(low > 0, target - before, ALL_EQUALS)
        if phase == TOP_K_MASS:
            mass = tl.minimum(before + limit_count * each, reached)
        if phase == TOP_P:
            count = tl.maximum(tl.ceil(missing), 1.0)
            if (low > limit) | ((low == limit) & (count < limit_count)):
                limit = low
                limit_count = count
                mass = tl.minimum(before + count * each, reached)
        if phase == MIN_P_MASS:
            mass = reached
        if phase == TOKEN:  # the last kept token is the last that can be drawn
            count = tl.floor(missing) + 1.0
            limit_count = tl.where(low == limit, tl.minimum(count, limit_count), count)
            phase = phase * 0 + DONE
        else:
            phase, low, high, before, reached, target, limit, limit_count, mass = _enter(
                phase + 1, limit, limit_count, mass, asked, peak, row, vocab, WIDTH
            )
    return phase, low, high, before, reached, target, limit, limit_count, mass


@triton.jit
def _go_on(
    asked: tl.tensor, total: tl.tensor, peak: tl.tensor, states: tl.tensor, sums: tl.tensor,
    row: tl.tensor, vocab: tl.tensor, shares: tl.tensor, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    STATE: tl.constexpr, PARTS: tl.constexpr, SHARES: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """The row's state after the launch before this one."""
    if FIRST:
        return _start(asked, total, peak, row, vocab, WIDTH)
    state = states + row * STATE
    phase = tl.load(state).to(tl.int32)
    share, part = tl.arange(0, SHARES), tl.arange(0, PARTS)
    place = (row * shares + share[:, None]) * PARTS + part[None, :]
    is_used = (share[:, None] < shares) & (phase < DONE)  # nothing was added up for what is done
    added = tl.sum(tl.load(sums + place, mask=is_used, other=0.0), 0)  # [PARTS]
    return _advance(
        phase, tl.load(state + 1).to(tl.int32), tl.load(state + 2).to(tl.int32), tl.load(state + 3),
        tl.load(state + 4), tl.load(state + 5), tl.load(state + 6).to(tl.int32), tl.load(state + 7),
        tl.load(state + 8), added, asked, peak, row, vocab, WIDTH, PARTS,
    )  # fmt: skip


@triton.jit
def _narrow(
    keys: tl.tensor, asked: tl.tensor, total: tl.tensor, peak: tl.tensor, flags: tl.tensor,
    old_states: tl.tensor, old_sums: tl.tensor, states: tl.tensor, sums: tl.tensor, vocab: tl.tensor,
    shares: tl.tensor,
    FIRST: tl.constexpr, SHARE: tl.constexpr, LANES: tl.constexpr,
    WIDTH: tl.constexpr, STATE: tl.constexpr, PARTS: tl.constexpr, SHARES: tl.constexpr,
) -> None:  # fmt: skip
    row, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if _is_open(flags, total, row):
        phase, low, high, before, reached, target, limit, limit_count, mass = _go_on(
            asked, total, peak, old_states, old_sums, row, vocab, shares, FIRST, WIDTH, STATE, PARTS, SHARES
        )
        if share == 0:
            state = states + row * STATE
            tl.store(state, phase.to(tl.float64))
            tl.store(state + 1, low.to(tl.float64))
            tl.store(state + 2, high.to(tl.float64))
            tl.store(state + 3, before)
            tl.store(state + 4, reached)
            tl.store(state + 5, target)
            tl.store(state + 6, limit.to(tl.float64))
            tl.store(state + 7, limit_count)
            tl.store(state + 8, mass)
        if phase < DONE:
            start = share * SHARE
            added = _add_up(keys + row * vocab, start, start + SHARE, phase, low, high, vocab, PARTS, LANES)
            tl.store(sums + (row * shares + share) * PARTS + tl.arange(0, PARTS), added)


@triton.jit
def _finish(
    keys: tl.tensor, asked: tl.tensor, total: tl.tensor, peak: tl.tensor, flags: tl.tensor,
    states: tl.tensor, sums: tl.tensor, found: tl.tensor, vocab: tl.tensor, shares: tl.tensor,
    FIRST: tl.constexpr, LANES: tl.constexpr,
    WIDTH: tl.constexpr, STATE: tl.constexpr, PARTS: tl.constexpr, SHARES: tl.constexpr,
) -> None:  # fmt: skip
    """The search to its end: the key of the token drawn, and which of its equals it is, from 1."""
    row = tl.program_id(0).to(tl.int64)
    if _is_open(flags, total, row):
        phase, low, high, before, reached, target, limit, limit_count, mass = _go_on(
            asked, total, peak, states, sums, row, vocab, shares, FIRST, WIDTH, STATE, PARTS, SHARES
        )
        while phase < DONE:
            added = _add_up(keys + row * vocab, 0, vocab, phase, low, high, vocab, PARTS, LANES)
            phase, low, high, before, reached, target, limit, limit_count, mass = _advance(
                phase, low, high, before, reached, target, limit, limit_count, mass,
                added, asked, peak, row, vocab, WIDTH, PARTS,
            )  # fmt: skip
        tl.store(found + 2 * row, low)
        tl.store(found + 2 * row + 1, tl.minimum(tl.maximum(limit_count, 1.0), 1.0 * vocab).to(tl.int32))


@triton.jit
def _equals(
    keys: tl.tensor, found: tl.tensor, row: tl.tensor, share: tl.tensor, vocab: tl.tensor,
    SHARE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[SHARE] 1 for each token of a share that has the key which was found, else 0."""
    token = share * SHARE + tl.arange(0, SHARE)
    key = tl.load(keys + row * vocab + token, mask=token < vocab, other=-1)
    return (key == tl.load(found + 2 * row)).to(tl.int32)


@triton.jit
def _count(
    keys: tl.tensor, total: tl.tensor, flags: tl.tensor, found: tl.tensor, counts: tl.tensor,
    vocab: tl.tensor, shares: tl.tensor, SHARE: tl.constexpr,
) -> None:  # fmt: skip
    row, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if _is_open(flags, total, row):
        tl.store(counts + row * shares + share, tl.sum(_equals(keys, found, row, share, vocab, SHARE)))


@triton.jit
def _take(
    keys: tl.tensor, total: tl.tensor, flags: tl.tensor, found: tl.tensor, counts: tl.tensor, ids: tl.tensor,
    vocab: tl.tensor, shares: tl.tensor, SHARE: tl.constexpr, SHARES: tl.constexpr,
) -> None:  # fmt: skip
    """Which token it is, from how many of its equals stand in each share."""
    row = tl.program_id(0).to(tl.int64)
    if _is_open(flags, total, row):
        share = tl.arange(0, SHARES)
        count = tl.load(counts + row * shares + share, mask=share < shares, other=0)
        equals = tl.sum(count)
        if equals > 0:  # else the rounding of sums misled the search: never seen, and the row stays open
            wanted = tl.minimum(tl.load(found + 2 * row + 1), equals)
            is_before = tl.cumsum(count, 0) < wanted
            own = tl.sum(is_before.to(tl.int32))
            wanted -= tl.sum(tl.where(is_before, count, 0))
            is_equal = _equals(keys, found, row, own, vocab, SHARE)
            is_it = (is_equal > 0) & (tl.cumsum(is_equal, 0) == wanted)
            token = own * SHARE + tl.sum(tl.where(is_it, tl.arange(0, SHARE), 0))
            tl.store(ids + row, token.to(tl.int64))
            tl.store(flags + row, (equals > 0).to(tl.uint8))
