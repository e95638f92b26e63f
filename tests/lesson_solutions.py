"""The exercises of the lessons, solved: by the name of a lesson the source of a cell that is run in place of
its cell "exercise". Knows what each lesson has defined up to there.
"""

SOLUTIONS = {
    "01_thinker_and_writer": """
for block in (thought, quick):
    await llm.clear(block)
first = asyncio.Event()


async def hurry():
    await first.wait()
    await llm.generate("\\n</think>\\n\\nSo far:", [prompt, thought, quick], max_tokens=15)


await asyncio.gather(think_on(), hurry())
quick.text
""",
    "02_blocks_and_views": """
backwards = await llm.merge_blocks(late, early, name="backwards")
await llm.probe(question, [rule, backwards], choices=(" 64", " 72"))
""",
    "05_your_own_agent": """
await llm.clear(thinker)
agent.event("line").clear()


@agent.coroutine
async def think():
    opening = None if thinker.num_tokens else turns.answering
    stream = llm.generate(opening, [prompt, notes, thinker], max_tokens=260)
    async for line in stream.split("\\n\\n"):
        agent.event("line").set()
    return line


@agent.coroutine
async def write():
    writer = await agent.block("writer")
    await agent.event("line").wait()
    return await llm.generate("\\n\\nIn short,", [prompt, notes, thinker, writer], stop=".", max_tokens=30)


agent.start()
await agent
""",
    "11_self_editing": '''
better = """
async def answer():
    await llm.clear(work)
    return await llm.generate(None, [prompt, work], stop="Check", max_tokens=150)
"""
attempt = await editor.consider(better)

if attempt.accepted:
    agent.start()
    results = await agent
''',
    "12_four_bugs": """
start = await fresh()
line = asyncio.Event()


async def think():
    stream = llm.generate(None, [prompt, thinker], max_tokens=36, name="think")
    async for part in stream.split("\\n\\n"):
        line.set()


async def write():
    await line.wait()
    view = [prompt, thinker, writer]
    await llm.generate("\\n\\nIn short,", view, stop=".", max_tokens=20, name="write")


await asyncio.gather(think(), write())
tried = picture(start)
""",
    "04_an_input_arrives": """
steps_before = llm.trace.num_steps
mine = await sharded.run(llm, cases[:3], ks=(64,), routings=("after",), setup=Setup(summary=""))
""",
    "03_attention_and_states": """
twice = llm.encode(" twice")[0]


def look(reading):
    return reading.weights_by_block[2][..., third.token_ids.index(twice)].max()


instruments.mark(tokens[int(np.argmax([look(reading) for reading in readings]))].step)
""",
    "06_probe": """
for block in Agent(llm, "second monitor").blocks.values():
    await llm.clear(block)

second = monitor(llm, RULE, LINES, probe_reads_thinker=True, probe_note="\\n", name="second monitor")

for seen in (await second.start())["watch"]:
    print(f"{seen.chance:6.1%}  {seen.line}")
""",
    "07_parallel_streams": """
shared, lane = await llm.create_blocks("shared", "lane")
await llm.forward("A line.\\n\\n", [shared])
await llm.forward("Another line.\\n\\n", [lane])


async def move():
    async with llm.transaction(shared, lane):
        await llm.append_block(shared, lane)
        for _ in range(3):
            await looks.get()
        await llm.clear(lane)


await asyncio.gather(move(), read([shared, lane]))
""",
    "08_delegation": """
pair = delegation(llm, question, at_once=2, name="two at once")

results = await pair.start()
print(results["call"], cost(pair.blocks["prompt"]), sep="\\n\\n")
""",
    "09_interruptions": """
begun, spoken = len(llm.trace), []


def speak(token):
    spoken.append(str(token))
    if len(spoken) == 2:
        second.say(" no wait, plus ten?", to="heard")


asked = "what is six plus two?".split()
second = listener(llm, asked, speak=speak, name="second listener", enable_thinking=False)
(await second.start())["respond"]
""",
    "10_evolving_context": """
turns = Turns.of(llm, enable_thinking=False)
prompt, context = agent.blocks["prompt"], agent.blocks["context"]
mine = await llm.create_block("mine")
await llm.replace(context, page(16, 75), [prompt, context])


async def answer():
    version = None
    while version != context.version:
        await llm.clear(mine)
        version = context.version
        view = [prompt, context, mine]
        async for _ in llm.generate(QUESTION + turns.answering, view, max_tokens=30, name="answer"):
            if context.version != version:
                break
    return mine.text.splitlines()[-1], version


llm.pause()
answering = asyncio.create_task(answer())
await llm.step(6)
turning = asyncio.create_task(llm.replace(context, page(17, 88), [prompt, context]))
llm.resume()
await turning
await answering
""",
}
