"""What a sandboxed coroutine may have done for it: its calls, checked, paid for, and carried out.

Runs in the parent and knows one `AsyncLLM`, the blocks that were given and those made inside. Every
argument comes from code that nobody trusts: blocks are numbers in a table of this run, keywords are
named one by one, and what a call costs is known before it is begun. Knows nothing of processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from .engine.blocks import CacheBlock
from .engine.streams import TokenStream
from .llm import AsyncLLM
from .sandbox_limits import Limits, Use, Violation
from .sandbox_wire import Message

CALLS = frozenset(
    "block create_block forward generate next cancel probe merge_blocks append_block fork replace clear "
    "free_block encode turn chat_prompt".split()
)
"""What may be called: each by the method ``call_...`` of that name."""
ERROR_CHARACTERS = 2_000
NAME_CHARACTERS = 60
BLOCK_FACTS = ("id", "num_tokens", "span", "version", "token_ids", "text")


@dataclass
class _Held:
    block: CacheBlock
    writable: bool
    made: bool  # inside


@dataclass
class _Read:
    """A stream, and the task that reads it for as long as the child may ask: its engine's consumer."""

    stream: TokenStream
    asked: asyncio.Queue[asyncio.Future[Message]] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None


class Calls:
    """The calls of one run.

    `reply` sends a message to the child; `stop` ends the run, and is called at most once from here.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        blocks: Mapping[str, CacheBlock],
        *,
        writes: frozenset[str],
        label: str,
        limits: Limits,
        reply: Callable[[Message], Coroutine[Any, Any, None]],
        stop: Callable[[Violation], None],
    ) -> None:
        self.use = Use()
        self._llm, self._label, self._limits = llm, label, limits
        self._reply, self._stop = reply, stop
        self._held: dict[int, _Held] = {}
        self._reads: dict[int, _Read] = {}
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()  # readers of streams that are over
        self.given = [(self._hold(b, n in writes, made=False), n) for n, b in blocks.items()]

    # ---- the run --------------------------------------------------------------------------------

    def begin(self, message: Message) -> None:
        """Carry out a call in a task of its own. Raises Violation for what no proxy would send."""
        self.use.calls += 1
        if self._limits.calls is not None and self.use.calls > self._limits.calls:
            raise Violation("calls", f"made more than its {self._limits.calls} calls")
        call, number = message.pop("call", None), message.pop("id", None)
        if call == "drop":
            self._drop(message)
            return
        if not isinstance(call, str) or call not in CALLS or not isinstance(number, int):
            raise Violation("messages", "sent a call that does not exist")
        if len(self._tasks) >= self._limits.at_once:
            raise Violation("calls", f"made more than {self._limits.at_once} calls at once")
        task = asyncio.create_task(self._serve(getattr(self, f"call_{call}"), number, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(
        self, handler: Callable[..., Coroutine[Any, Any, Any]], number: int, arguments: Message
    ) -> None:
        try:
            answer: Message = {"value": await handler(**arguments)}
        except Violation as violation:
            self._stop(violation)
            return
        except Exception as error:  # raised inside, where the call was made
            answer = {"error": [type(error).__name__, str(error)[:ERROR_CHARACTERS]]}
        await self._reply({"id": number, **answer})

    async def close(self) -> None:
        """End what still runs and let go of every block."""
        for read in self._reads.values():
            self._end(read)
        self._reads.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._ending, return_exceptions=True)
        self._held.clear()  # a block that nobody refers to is freed

    # ---- tables and prices ----------------------------------------------------------------------

    def _hold(self, block: CacheBlock, writable: bool, made: bool) -> int:
        self._number += 1
        self._held[self._number] = _Held(block, writable, made)
        return self._number

    def _made(self, block: CacheBlock) -> list[Any]:
        """What the child gets to know of a block that was made for it."""
        return [self._hold(block, writable=True, made=True), block.name]

    def _room(self) -> None:
        made = sum(held.made for held in self._held.values()) + len(self._reads)
        if made >= self._limits.at_once:
            raise RuntimeError(f"{made} blocks and streams are held: free some before making more")

    def _spend(self, tokens: int) -> None:
        most = self._limits.tokens
        if most is not None and self.use.tokens + tokens > most:
            raise Violation("tokens", f"wanted more than its {most} tokens")
        self.use.tokens += tokens

    def _get(self, number: Any) -> CacheBlock:
        if not isinstance(number, int) or number not in self._held:
            raise ValueError(f"{number!r} is no block of this coroutine; it may have been freed")
        return self._held[number].block

    def _writable(self, number: Any) -> CacheBlock:
        block = self._get(number)
        if not self._held[number].writable:
            raise ValueError(f"block {block.name!r} may only be read by this coroutine")
        return block

    def _view(self, numbers: Any) -> list[CacheBlock] | None:
        if numbers is None:
            return None
        if not isinstance(numbers, list):
            raise TypeError("a view is a list of blocks")
        return [self._get(number) for number in numbers]

    def _written(self, view: Any, write_to: Any) -> tuple[list[CacheBlock] | None, CacheBlock | None]:
        """A view and the block to write; checks that it may be."""
        target = None if write_to is None else self._writable(write_to)
        if write_to is None and isinstance(view, list) and view:
            self._writable(view[-1])
        return self._view(view), target

    def _paid(self, inputs: Any) -> list[int]:
        """Token ids of an input, which is paid for."""
        ids = self._llm.encode(inputs) if isinstance(inputs, str) else inputs
        if not isinstance(ids, list):
            raise TypeError("inputs are text or a list of token ids")
        self._spend(len(ids))
        return ids

    def _name(self, name: Any) -> str | None:
        if name is not None and (not isinstance(name, str) or len(name) > NAME_CHARACTERS):
            raise ValueError(f"a name is a string of at most {NAME_CHARACTERS} characters")
        return name

    def _drop(self, message: Message) -> None:
        """The child has let go of a block or a stream."""
        block, stream = message.get("block"), message.get("stream")
        if isinstance(block, int) and block in self._held and self._held[block].made:
            del self._held[block]
        if isinstance(stream, int) and stream in self._reads:
            self._end(self._reads.pop(stream))

    # ---- blocks ---------------------------------------------------------------------------------

    async def call_block(self, *, block: Any, what: Any) -> Any:
        if what not in BLOCK_FACTS:
            raise ValueError(f"a block has {', '.join(BLOCK_FACTS)}, not {what!r}")
        return getattr(self._get(block), what)

    async def call_create_block(self, *, name: Any) -> list[Any]:
        self._room()
        return self._made(await self._llm.create_block(self._name(name)))

    async def call_forward(self, *, inputs: Any, view: Any, write_to: Any) -> list[Any]:
        blocks, target = self._written(view, write_to)
        if blocks or target:
            number = write_to if write_to is not None else view[-1]
            out = await self._llm.forward(self._paid(inputs), blocks, write_to=target, logits="none")
            return [number, out.block.name]
        self._room()
        return self._made((await self._llm.forward(self._paid(inputs), logits="none")).block)

    async def call_merge_blocks(self, *, left: Any, right: Any, name: Any) -> list[Any]:
        self._room()
        first, second = self._get(left), self._get(right)
        self._spend(first.num_tokens + second.num_tokens)
        return self._made(await self._llm.merge_blocks(first, second, name=self._name(name)))

    async def call_append_block(self, *, left: Any, right: Any) -> None:
        first, second = self._writable(left), self._get(right)
        self._spend(second.num_tokens)
        await self._llm.append_block(first, second)

    async def call_fork(self, *, block: Any, name: Any) -> list[Any]:
        self._room()
        return self._made(await self._llm.fork(self._get(block), name=self._name(name)))

    async def call_replace(self, *, block: Any, inputs: Any, view: Any) -> None:
        await self._llm.replace(self._writable(block), self._paid(inputs), self._view(view))

    async def call_clear(self, *, block: Any) -> None:
        await self._llm.clear(self._writable(block))

    async def call_free_block(self, *, block: Any) -> None:
        freed = self._get(block)
        if not self._held[block].made:
            raise ValueError(f"block {freed.name!r} was given; free only blocks that were made here")
        del self._held[block]
        await self._llm.free_block(freed)

    # ---- tokens ---------------------------------------------------------------------------------

    async def call_generate(
        self,
        *,
        inputs: Any,
        view: Any,
        write_to: Any,
        max_tokens: Any,
        stop: Any,
        temperature: Any,
        top_p: Any,
        top_k: Any,
        min_p: Any,
        seed: Any,
        forbid: Any,
        name: Any,
    ) -> list[Any]:
        self._room()
        blocks, target = self._written(view, write_to)
        called = self._name(name)
        stream = self._llm.generate(
            None if inputs is None else self._paid(inputs),
            blocks,
            write_to=target,
            max_tokens=max_tokens,
            stop=stop,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            forbid=forbid,
            name=self._label if called is None else f"{self._label} {called}",
        )
        if blocks or target:
            block = [write_to if write_to is not None else view[-1], stream.block.name]
        else:
            block = self._made(stream.block)
        self._number += 1
        read = self._reads[self._number] = _Read(stream)
        read.task = asyncio.create_task(self._read(self._number, read))
        return [self._number, block]

    async def call_next(self, *, stream: Any) -> Message:
        if not isinstance(stream, int) or stream not in self._reads:
            raise ValueError("the stream has ended")
        self._spend(1)
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._reads[stream].asked.put_nowait(answer)
        return await answer

    async def _read(self, number: int, read: _Read) -> None:
        stream = read.stream
        while not stream.ended:
            asked = await read.asked.get()
            message: Message = {}
            try:
                token = await stream.__anext__()
                message["token"] = [str(token), token.id, token.logprob, token.step]
            except StopAsyncIteration:
                pass
            except Exception as error:
                if not asked.done():
                    asked.set_exception(error)
            finally:  # cancelled, too: somebody may still wait for the answer
                if stream.ended:
                    message["end"] = [stream.stop_reason, stream.text]
                if not asked.done():
                    asked.set_result(message)
        self._reads.pop(number, None)
        self._end(read)

    async def call_cancel(self, *, stream: Any) -> None:
        read = self._reads.pop(stream, None) if isinstance(stream, int) else None
        if read is not None:
            self._end(read)
            await read.stream.cancel()

    def _end(self, read: _Read) -> None:
        """The stream is over for the child; whoever asked for another token is told so."""
        read.stream.finish("cancelled")
        if read.task is not None and read.task is not asyncio.current_task():
            read.task.cancel()
            self._ending.add(read.task)
            read.task.add_done_callback(self._ending.discard)
        while not read.asked.empty():
            asked = read.asked.get_nowait()
            if not asked.done():
                asked.set_result({"end": [read.stream.stop_reason, read.stream.text]})

    async def call_probe(self, *, question: Any, view: Any, choices: Any) -> list[Any]:
        blocks = self._view(view)
        if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
            raise TypeError("choices are a list of strings")
        ids = self._paid(question)
        sizes = [len(self._llm.encode(choice)) for choice in choices]
        # Each choice of several tokens is a forward pass with the question before it.
        self._spend(sum(sizes) + len(ids) * sum(size > 1 for size in sizes))
        found = await self._llm.probe(ids, blocks or [], choices)
        return list(found.items())

    # ---- text -----------------------------------------------------------------------------------

    # Tokenising takes the event loop's time, so it is paid for as well.

    async def call_encode(self, *, text: Any, control: Any) -> list[int]:
        return self._paid(self._llm.encode(text, control=bool(control)))

    async def call_turn(self, *, text: Any, role: Any) -> list[int]:
        return self._paid(self._llm.turn(text, role))

    async def call_chat_prompt(
        self, *, messages: Any, system: Any, generation_prompt: Any, enable_thinking: Any
    ) -> list[int]:
        # No other argument of the template: one of them is a template, which is a program.
        more = {} if enable_thinking is None else {"enable_thinking": bool(enable_thinking)}
        return self._paid(
            self._llm.chat_prompt(messages, system=system, generation_prompt=bool(generation_prompt), **more)
        )
