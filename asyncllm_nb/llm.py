"""`AsyncLLM`: what a notebook talks to. Turns text and Python objects into requests for the engine.

Knows names of models, text and chat templates; order, memory and steps are the engine's, drawing is
`dashboard`'s and `display`'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from torch import Tensor

from . import block_files, chat, export
from .engine import control, operations
from .engine.blocks import CacheBlock
from .engine.boundary import Boundary
from .engine.build import build_engine
from .engine.config import ModelConfig
from .engine.continuing import may_go_on
from .engine.instruments import Instruments
from .engine.integrity import check_integrity
from .engine.probing import probe
from .engine.requests import Encoding, Operation
from .engine.sampling import SamplingParams, parse_forbidden, stream_seed
from .engine.storing import restore
from .engine.streams import TokenStream
from .engine.text import StopRule
from .engine.trace import Trace
from .engine.transactions import Transaction
from .engine.views import NO_KEPT_LOGITS, check_block, check_length, check_view, check_write
from .inputs import Inputs, check_count, choice_ids, known_keywords, token_ids
from .models import resolve
from .notebook import close_earlier, install_displays, remember
from .snapshots import snapshot, stats

View = CacheBlock | Sequence[CacheBlock]
Logits = Literal["last", "all", "none"]
Stop = str | int | Collection[str | int]


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What `forward` returns: the block that was written, and logits, float32 on the engine's device.

    `logits`: [vocab] after the last token; [n, vocab] with ``logits="all"``; None with ``"none"``.
    """

    block: CacheBlock
    logits: Tensor | None

    def __repr__(self) -> str:
        shape = list(self.logits.shape) if self.logits is not None else None
        return f"<ForwardOutput block={self.block.name!r} logits={shape}>"

    def _repr_html_(self) -> str:
        return self.block._repr_html_()


class AsyncLLM:
    """One language model whose memory several coroutines share.

    Parameters
    ----------
    model: a bundled name ("smollm2"), a hub id, or a folder with config.json and safetensors files.
    name: what it is called; in a notebook, a second engine of one model needs another name.
    device: "auto" (CUDA if there is one), "cpu" or "cuda".
    dtype: "auto" (the checkpoint's on CUDA, float32 on a CPU), "float32", "bfloat16" or "float16".
    cache_tokens: how many tokens all blocks together may hold; None: what free memory allows.
    max_blocks: how many blocks may hold tokens, with one more for each that is being written (models
        with Gated DeltaNet layers only); None: what free memory allows.
    max_batch_tokens: most tokens in one forward pass; None: 2048 on CUDA, 256 on a CPU.
    seed: what streams without a seed of their own derive theirs from.
    boundary: which rows the convolution of a block's first three tokens looks back on (models with Gated
        DeltaNet layers): those before the block when it was "written", or, "recomputed", those before it in
        the view that reads it; slower, on a CPU only.

    Raises ModelError for a checkpoint that cannot be loaded, ValueError for anything else.
    """

    @known_keywords
    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        name: str = "llm",
        device: str = "auto",
        dtype: str = "auto",
        cache_tokens: int | None = None,
        max_blocks: int | None = None,
        max_batch_tokens: int | None = None,
        seed: int = 0,
        boundary: Boundary = "written",
    ) -> None:
        folder = resolve(model)
        close_earlier(str(folder), name)
        self._model = os.fspath(model)
        self._engine, self._budget = build_engine(
            folder,
            model=self._model,
            name=name,
            device=device,
            dtype=dtype,
            cache_tokens=cache_tokens,
            max_blocks=max_blocks,
            max_batch_tokens=max_batch_tokens,
            seed=seed,
            boundary=boundary,
        )
        self._agents = self._engine.agents  # by name: `Agent` finds those that were made before
        self._engine.trace.export = export.to_html
        install_displays(self._engine)
        remember(self._engine, str(folder))

    # ---- blocks ---------------------------------------------------------------------------------

    @known_keywords
    async def create_block(self, name: str | None = None) -> CacheBlock:
        """A new, empty block. A name that a live block has gets ``·2`` added."""
        self._engine.check_usable()
        if name is not None and not isinstance(name, str):
            raise TypeError(f"a block's name is a string, not {name!r}")
        if name == "":
            raise ValueError("a block's name is not empty; leave it out to have one chosen")
        return self._engine.make_block(name, self._engine.current_transaction())

    async def create_blocks(self, *names: str | int) -> list[CacheBlock]:
        """New, empty blocks: ``create_blocks(3)`` or ``create_blocks("prompt", "thinker")``."""
        if len(names) == 1 and isinstance(names[0], int):
            check_count("the number of blocks", names[0])
            return [await self.create_block() for _ in range(names[0])]
        if not names or not all(isinstance(name, str) for name in names):
            raise TypeError("create_blocks takes a number, or the names of the blocks")
        return [await self.create_block(str(name)) for name in names]

    @known_keywords
    async def forward(
        self,
        inputs: Inputs,
        cache_view: View | None = None,
        *,
        write_to: CacheBlock | None = None,
        logits: Logits = "last",
    ) -> ForwardOutput:
        """Encode `inputs` behind a view, into its last block.

        Parameters
        ----------
        inputs: text, token ids or a 1-D tensor; not empty.
        cache_view: blocks to read, in order; the last is written. None: a new block, read alone.
        write_to: the written block, if it is not in the view yet: it is added at the end.
        logits: "last" (float32 [vocab]), "all" ([n, vocab]) or "none".

        Raises ValueError or TypeError for wrong use and CacheFullError, before anything has changed.
        """
        engine = self._engine
        engine.check_usable()
        if logits not in ("last", "all", "none"):
            raise ValueError(f"logits must be 'last', 'all' or 'none', not {logits!r}")
        ids = token_ids(inputs, engine.codec, engine.config.vocab_size)
        view = check_view(engine, cache_view, write_to)
        check_length(engine, view, len(ids))
        if view:
            rows = await self._encode("forward", ids, view, logits_mode=logits)
        else:
            view = (engine.make_block(None, engine.current_transaction()),)
            try:
                rows = await self._encode("forward", ids, view, logits_mode=logits)
            except BaseException:
                engine.discard_block(view[0])
                raise
        if logits == "none":
            return ForwardOutput(view[-1], None)
        return ForwardOutput(view[-1], rows if logits == "all" else rows[-1])

    @known_keywords
    async def replace(self, block: CacheBlock, inputs: Inputs, cache_view: View | None = None) -> CacheBlock:
        """Clear `block` and encode `inputs` into it, in one change: readers see the old or the new.

        `cache_view`: the blocks to read meanwhile; None: nothing but the block itself.
        """
        engine = self._engine
        engine.check_usable()
        ids = token_ids(inputs, engine.codec, engine.config.vocab_size)
        check_block(engine, block)
        view = check_view(engine, cache_view, block)
        check_length(engine, view[:-1], len(ids))
        await self._encode("replace", ids, view, replaces=True)
        return block

    async def _encode(
        self,
        name: str,
        ids: list[int],
        view: tuple[CacheBlock, ...],
        *,
        logits_mode: Logits = "last",
        replaces: bool = False,
    ) -> Tensor:
        engine = self._engine
        encoding = Encoding(
            name=name,
            order=engine.next_order(),
            transaction=engine.current_transaction(),
            future=engine.loop.create_future(),
            writes=(view[-1]._record,),
            kind="prefill",
            tokens=ids,
            view=view[:-1],
            target=view[-1],
            replaces=replaces,
            logits_mode=logits_mode,
        )
        engine.check_ever_fits(encoding)
        rows: Tensor = await engine.result(encoding)
        return rows

    @known_keywords
    async def merge_blocks(
        self, left: CacheBlock, right: CacheBlock, *, name: str | None = None
    ) -> CacheBlock:
        """A new block that reads as `left` followed by `right`. Pages are shared, not copied."""
        self._check_blocks(left, right)
        name = name or f"{left.name}+{right.name}"
        made: CacheBlock = await self._operate(operations.merge(self._engine, left, right, name))
        return made

    @known_keywords
    async def append_block(self, left: CacheBlock, right: CacheBlock) -> CacheBlock:
        """The same into `left`, which is returned; `right` stays as it is."""
        self._check_blocks(left, right)
        check_write(self._engine, left)
        made: CacheBlock = await self._operate(operations.append(self._engine, left, right))
        return made

    @known_keywords
    async def fork(self, block: CacheBlock, *, name: str | None = None) -> CacheBlock:
        """A copy that shares pages until one of the two is written."""
        self._check_blocks(block)
        made: CacheBlock = await self._operate(operations.fork(self._engine, block, name))
        return made

    @known_keywords
    async def clear(self, block: CacheBlock) -> CacheBlock:
        """Make `block` empty."""
        self._check_blocks(block)
        check_write(self._engine, block)
        await self._operate(operations.clear(self._engine, block))
        return block

    @known_keywords
    async def free_block(self, block: CacheBlock) -> None:
        """Give a block's memory back. Using the block afterwards raises ValueError."""
        self._check_blocks(block)
        transaction = self._engine.current_transaction()
        if transaction is not None:
            transaction.check_free(block)
        check_write(self._engine, block)
        await self._operate(operations.free(self._engine, block))

    def transaction(self, *blocks: CacheBlock) -> Transaction:
        """``async with llm.transaction(a, b):`` the blocks change together or not at all.

        On any exception they are as they were; others read them as at the start until the end.
        """
        for block in blocks:
            check_block(self._engine, block)
        if not blocks or len(set(blocks)) < len(blocks):
            raise ValueError("transaction takes one or more distinct blocks, which may be written inside")
        return Transaction(self._engine, blocks)

    @known_keywords
    async def save_blocks(self, file: str | os.PathLike[str], blocks: Sequence[CacheBlock]) -> Path:
        """Write what `blocks` hold at one moment into one file, while streams go on. Returns its path."""
        return await block_files.save(self._engine, file, blocks)

    @known_keywords
    async def load_blocks(self, file: str | os.PathLike[str]) -> list[CacheBlock]:
        """New blocks that hold what `save_blocks` wrote: their next tokens are the same.

        Raises ValueError for a damaged file and for the memory of another model, CacheFullError if the
        blocks cannot fit; nothing has changed then.
        """
        stored, _ = await block_files.opened(self._engine, file)
        return await restore(self._engine, stored)

    def _check_blocks(self, *blocks: CacheBlock) -> None:
        self._engine.check_usable()
        for block in blocks:
            check_block(self._engine, block)

    async def _operate(self, operation: Operation) -> Any:
        return await self._engine.result(operation)

    # ---- tokens ---------------------------------------------------------------------------------

    @known_keywords
    def generate(
        self,
        inputs: Inputs | None = None,
        cache_view: View | None = None,
        *,
        write_to: CacheBlock | None = None,
        max_tokens: int | None = None,
        stop: Stop = (),
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        forbid: Stop = (),
        name: str | None = None,
    ) -> TokenStream:
        """Tokens behind a view, one by one, into its last block: an async iterator of `Token`.

        Parameters
        ----------
        inputs: text, token ids or a 1-D tensor to encode first; None: go on after the last token of
            the view.
        cache_view, write_to: as in `forward`; the view is read anew at each step.
        max_tokens: how many tokens at most; None: until an end token, or the model's last position.
        stop: a string, a token id, or several; the one that ends the stream is part of it.
        temperature: 0 is greedy. top_p, top_k, min_p: filters; 1, 0 and 0 filter nothing.
        seed: the same seed and the same reads give the same tokens; None: from the engine's seed and
            the number of streams so far.
        forbid: token ids, or strings of one token, that are never drawn.
        name: what it is called everywhere; None: the coroutine whose task first reads it.

        Nothing runs before the stream is read. Raises as `forward` does.
        """
        engine = self._engine
        engine.check_open()
        check_count("max_tokens", max_tokens)
        ids = None
        if inputs is not None:
            ids = token_ids(inputs, engine.codec, engine.config.vocab_size)
        view = check_view(engine, cache_view, write_to)
        sampling = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=stream_seed(seed, engine.seed, engine.num_streams),
            forbidden=parse_forbidden(forbid, engine.codec, engine.config.vocab_size),
        )
        stop_rule = StopRule.parse(stop, engine.codec)
        check_length(engine, view, len(ids or ()))
        transaction = engine.current_transaction()
        if ids is None and not may_go_on(engine, view, transaction):
            raise ValueError(NO_KEPT_LOGITS)
        if not view:
            view = (engine.make_block(None, transaction),)
        return TokenStream(engine, view, ids, sampling, stop_rule, max_tokens, name, transaction)

    @known_keywords
    async def probe(
        self, question: Inputs, cache_view: View, choices: Sequence[str] = ("yes", "no")
    ) -> dict[str, float]:
        """How probable each of `choices` is behind `question`, under a view; they sum to 1.

        Changes no block. Choices are tokenised as given (" yes" differs from "yes"); one of several
        tokens is scored by its whole log-probability.
        """
        engine = self._engine
        engine.check_usable()
        ids = token_ids(question, engine.codec, engine.config.vocab_size)
        view = check_view(engine, cache_view, None, writes=False)
        scored = choice_ids(choices, engine.codec)
        check_length(engine, view, len(ids) + max(len(tokens) for tokens in scored) - 1)
        return dict(zip(choices, await probe(engine, ids, view, scored), strict=True))

    # ---- the clock ------------------------------------------------------------------------------

    def pause(self) -> None:
        """Make no further step; what is asked for waits."""
        control.pause(self._engine)

    def resume(self) -> None:
        """Go on after `pause`."""
        control.resume(self._engine)

    @known_keywords
    async def step(self, n: int = 1) -> int:
        """Pause, then make `n` steps. Returns how many were made: fewer when nothing can run."""
        return await control.step(self._engine, n)

    async def drain(self) -> None:
        """Return when nothing is queued or running and every yielded token is encoded.

        A stream that nobody asks for a token does not hold it up. Raises RuntimeError while paused.
        """
        await control.drain(self._engine)

    async def close(self) -> None:
        """End the streams, fail the waiters with EngineClosedError, and give all memory back."""
        await control.close(self._engine)

    async def __aenter__(self) -> Self:
        self._engine.check_usable()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- text -----------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer as transformers loads it; None if the folder has none."""
        return self._engine.codec.tokenizer

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self._engine.config

    def chat_prompt(
        self,
        messages_or_text: str | Sequence[chat.Message],
        *,
        system: str | None = None,
        generation_prompt: bool = True,
        **template_args: Any,
    ) -> list[int]:
        """Token ids of a conversation in the model's chat template; a string is what the user says.

        `generation_prompt`: open the assistant's turn at the end. Other keywords go to the template.
        """
        codec = self._engine.codec
        return chat.chat_prompt(codec, messages_or_text, system, generation_prompt, template_args)

    @known_keywords
    def turn(self, text: str, role: str = "user") -> list[int]:
        """Token ids that close the open turn, say `text`, and open the assistant's turn again."""
        return chat.turn(self._engine.codec, text, role)

    @known_keywords
    def encode(self, text: str, control: bool = True) -> list[int]:
        """Token ids of `text`. ``control=False``: marker strings in it, as in text from files, tools or
        people, stay plain text."""
        if not isinstance(text, str):
            raise TypeError(f"encode takes text, not {type(text).__name__}")
        return self._engine.codec.encode(text, control)

    # ---- observing ------------------------------------------------------------------------------

    @property
    def blocks(self) -> dict[str, CacheBlock]:
        """The live blocks by name, oldest first."""
        return self._engine.blocks

    @property
    def trace(self) -> Trace:
        """The record of every step."""
        return self._engine.trace

    @property
    def instruments(self) -> Instruments:
        """What can be measured of a run: shares of attention, transitions, states. Off until asked for."""
        return self._engine.instruments

    def stats(self) -> dict[str, Any]:
        """Numbers of this moment: memory (bytes, pages, slots), steps, tokens, what waits."""
        return stats(self._engine, self._model, self._budget)

    def snapshot(self) -> dict[str, Any]:
        """What the dashboard draws, as plain numbers and strings."""
        return snapshot(self._engine)

    def observe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback()` on the engine's loop after each step and state change; it must be quick.

        Returns a function that ends it.
        """
        observers = self._engine.observers
        observers.append(callback)

        def unsubscribe() -> None:
            if callback in observers:
                observers.remove(callback)

        return unsubscribe

    def dashboard(self, *panels: str, **options: Any) -> Any:
        """The live dashboard, as a cell's last expression: all panels, or those named, in that order.

        Options: pin="right" or "bottom" keeps it at that edge while the notebook scrolls; theme "auto",
        "light" or "dark". The same widget each time: running the cell again makes no second one.
        """
        from .watching import watch
        from .widgets import Dashboard

        if panels:
            options["panels"] = list(panels)
        return watch(self._engine).widget(Dashboard, **options)

    def attach(self, widget: Any) -> None:
        """Show this engine in a widget of `asyncllm_nb.widgets`; ``Streams(llm)`` calls it."""
        from .watching import watch

        watch(self._engine).attach(widget)

    def check_integrity(self) -> None:
        """Assert that every page and slot is counted once per holder. For tests; between steps."""
        check_integrity(self._engine)

    def __repr__(self) -> str:
        engine = self._engine
        how = "closed" if engine.closed else f"{len(engine.blocks)} blocks"
        return f"<AsyncLLM {self._model!r} {engine.name!r} on {engine.runner.device}, {how}>"

    def _repr_html_(self) -> str | None:
        show = self._engine.show_html
        return show(self) if show else None
