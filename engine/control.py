"""Pause, step, drain and close: how a person holds the engine's clock.

Knows the engine and its server. A step is one forward pass; drawing from kept logits and block
operations are not steps.
"""

from __future__ import annotations

from .engine import Engine
from .serving import Drain, StepCall


def pause(engine: Engine) -> None:
    """Make no further step. The one that runs ends; what is asked for waits."""
    engine.check_thread()
    if not engine.paused:
        engine.trace.add("pause")
    engine.paused = True
    drains, engine.server.drains = engine.server.drains, []
    for drain in drains:
        if not drain.future.done():
            drain.future.set_exception(_paused(engine))
    engine.notify()


def resume(engine: Engine) -> None:
    """Go on after `pause`."""
    engine.check_thread()
    if engine.paused:
        engine.trace.add("resume")
    engine.paused = False
    engine.forget_pause_notice()
    engine.wake()
    engine.notify()


def set_speed(engine: Engine, interval: float) -> None:
    """Let at least `interval` seconds pass from one step to the next; 0: as fast as it goes."""
    if not 0 <= interval <= 60:
        raise ValueError(f"an interval between steps is 0 to 60 seconds, not {interval!r}")
    engine.step_interval = interval
    engine.trace.add("speed", interval=interval)
    engine.wake()
    engine.notify()


async def step(engine: Engine, n: int) -> int:
    """Pause, then make `n` steps, with turns of the loop between them. Returns how many were made:
    fewer when nothing is left that can run."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"step takes the number of steps, 1 or more, not {n!r}")
    engine.check_usable()
    pause(engine)
    call = StepCall(n, engine.loop.create_future())
    engine.server.step_calls.append(call)
    engine.wake()
    try:
        return await engine.wait(call.future, steps=True)
    finally:
        if call in engine.server.step_calls:  # cancelled while it waited
            engine.server.step_calls.remove(call)


async def drain(engine: Engine) -> None:
    """Return when nothing is queued or running and every yielded token is encoded. A stream that
    nobody is asking for a token does not hold it up. Raises RuntimeError while paused."""
    engine.check_usable()
    if engine.paused:
        raise _paused(engine)
    call = Drain(engine.current_transaction(), engine.loop.create_future())
    engine.server.drains.append(call)
    engine.wake()
    await engine.wait(call.future)


async def close(engine: Engine) -> None:
    """End all streams as "cancelled", fail all waiters, and give the memory back."""
    if not engine.closed and engine.is_bound:
        engine.check_usable()
        engine.paused = True  # the running step is the last
        await engine.server.between_steps()
    engine.close_now()


def _paused(engine: Engine) -> RuntimeError:
    return RuntimeError(f"engine {engine.name!r} is paused and would never drain: call resume() first")
