"""The widget classes: one for each panel, and the `Dashboard` with all. Knows names of panels only."""

from __future__ import annotations

from .base import Widget


class Ledger(Widget):
    """Tokens encoded, tokens that passing text would have encoded, passes, tokens per second."""

    PANELS = ("ledger",)


class Controls(Widget):
    """Run, pause, step, speed; cancel a coroutine; put a message into a block."""

    PANELS = ("controls",)


class Scrubber(Widget):
    """Go back to any recorded step, mark it, return to live."""

    PANELS = ("scrubber",)


class Streams(Widget):
    """The text of each coroutine as it comes, and what the coroutine does now."""

    PANELS = ("streams",)


class Agents(Widget):
    """Coroutines and tool calls of agents: start, stop and restart them, approve and deny."""

    PANELS = ("agents",)


class Views(Widget):
    """For each coroutine the blocks that it reads, in order; the written one outlined."""

    PANELS = ("views",)


class Blocks(Widget):
    """Each block as a lane of its pages: tokens, version, writer, readers, share of the pool."""

    PANELS = ("blocks",)


class Timeline(Widget):
    """One column per step, one cell per request in it; a click opens the step."""

    PANELS = ("timeline",)


class Attention(Widget):
    """The share of attention of each block: over time, per layer and head, and token by token."""

    PANELS = ("attention",)


class States(Widget):
    """Gated DeltaNet states: per head, what each block left in it, and how much of the past gets through."""

    PANELS = ("states",)


class Dashboard(Widget):
    """All panels, or those named in `panels`, in the order named."""

    PANELS = (
        "ledger",
        "controls",
        "streams",
        "agents",
        "views",
        "blocks",
        "timeline",
        "attention",
        "states",
        "scrubber",
    )


class Replay(Widget):
    """A recording that plays by itself: all panels but the controls. Its source is no engine."""

    PANELS = ("scrubber", "ledger", "streams", "agents", "views", "blocks", "timeline", "attention", "states")
