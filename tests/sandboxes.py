"""What the tests of the sandbox share: where there is none they assert the error that says so.

Knows the sandbox's public names, and of this process its children and its folders.
"""

from __future__ import annotations

import re
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import scratch

from asyncllm_nb import AsyncLLM, CacheBlock, SandboxUnavailable, seccomp
from asyncllm_nb.sandbox import Limits, Ran, Sandbox
from asyncllm_nb.sandbox_process import check_available

QUICK = Limits(seconds=20.0, cpu_seconds=5, tokens=500, calls=2000)
"""For tests: generous for what is honest, and soon over for what is not."""


def function(body: str, name: str = "work") -> str:
    """The source of a coroutine with this body."""
    return f"async def {name}():\n" + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ") + "\n"


async def run(
    llm: AsyncLLM,
    body: str,
    blocks: dict[str, CacheBlock] | None = None,
    limits: Limits = QUICK,
    **options: Any,
) -> Ran:
    """How a coroutine with this body ends in the sandbox."""
    return await Sandbox("work", function(body), llm, blocks or {}, limits=limits, **options).run()


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """There is a sandbox, and nothing of it is left afterwards; or the error names the reason."""
    reason = seccomp.unavailable()
    if reason is not None:
        with pytest.raises(SandboxUnavailable, match=re.escape(reason)):
            check_available()
        pytest.skip(f"SandboxUnavailable was raised, as it has to be here: {reason}")
    scratch()  # the checkpoints' folder stands elsewhere
    folders = tmp_path / "sandboxes"
    folders.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folders))
    before = psutil.Process().children(recursive=True)
    yield
    assert psutil.Process().children(recursive=True) == before
    assert not list(folders.iterdir())
