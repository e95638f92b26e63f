"""From records to the state of a moment: what a recording says about blocks, requests and coroutines.

Knows plain records, as `widgets/protocol.js` lists them, and nothing of the engine. The browser has the
same rules in `widgets/reducer.js`; a test holds the two together. Here they fold the records that a
bounded recording drops into the state that its rest starts from, and draw pictures without a browser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

State = dict[str, Any]
Record = dict[str, Any]

ENDED_KEPT = 64
"""Streams, coroutines and tool calls that have ended and are still shown."""


def empty_state() -> State:
    """The state before any record. Tables are keyed by strings, as JSON has them."""
    return {
        "step": 0,
        "at": 0,
        "passes": 0,
        "seconds": 0,
        "encoded": 0,
        "resent": 0,
        "error": "",
        "paused": False,
        "closed": False,
        "interval": 0,
        "pages": None,
        "slots": None,
        "blocks": {},
        "requests": {},
        "tasks": {},
        "waiting": [],
        "marks": [],
        "agents": {},
        "calls": {},
    }


def reduce(records: Iterable[Record], state: State | None = None) -> State:
    """`state` (None: an empty one) after `records`. Changes `state` in place."""
    state = empty_state() if state is None else state
    for record in records:
        apply(state, record)
    return state


def apply(state: State, record: Record) -> None:
    """Change `state` by one record. Types that it does not know change nothing."""
    state["at"] = record["at"]
    rule = RULES.get(record["t"])
    if rule is not None:
        rule(state, record)


def _block(s: State, e: Record) -> None:
    new = {"version": 0, "n": 0, "texts": [], "pages": [], "tx": [], "writer": None}
    s["blocks"][str(e["id"])] = {"id": e["id"], "name": e["name"], **new}


def _change(s: State, e: Record) -> None:
    block = s["blocks"].get(str(e["id"]))
    if block is None:
        return
    read = [text for source in e["from"] for text in _content_of(s, *source)]
    own = block["texts"] if e["op"] == "append" else []
    _set_content(block, own + read + e.get("x", []), e["version"], e["pages"])


def _free(s: State, e: Record) -> None:
    s["blocks"].pop(str(e["id"]), None)


def _begin(s: State, e: Record) -> None:
    for block in _named(s, e["blocks"]):
        saved = {key: block[key] for key in ("version", "n", "pages")}
        saved["texts"] = list(block["texts"])
        block["tx"] = [*block["tx"], {"tx": e["tx"], "saved": saved}]


def _end(s: State, e: Record) -> None:
    for block in s["blocks"].values():
        mine = next((one for one in block["tx"] if one["tx"] == e["tx"]), None)
        if mine is None:
            continue
        block["tx"] = [one for one in block["tx"] if one is not mine]
        for number, version, pages in e["restored"]:
            if number == block["id"]:
                _set_content(block, mine["saved"]["texts"], version, pages)


def _request(s: State, e: Record) -> None:
    told = {key: e[key] for key in ("r", "kind", "name", "view", "block", "task")}
    blank = {"state": "queued", "read": [], "input": [], "text": "", "tokens": 0}
    ending = {"reason": "", "error": "", "begun": e["at"], "ended": None}
    s["requests"][str(e["r"])] = {**told, **blank, **ending}


def _token(s: State, e: Record) -> None:
    request = s["requests"].get(str(e["r"]))
    if request is None:
        return
    request["text"] += e["x"]
    request["tokens"] += 1
    request["state"] = "body"
    for block in _named(s, [request["block"]]):
        _add_texts(block, [e["x"]])
        block["writer"] = e["r"]


def _stream(s: State, e: Record) -> None:
    if request := s["requests"].get(str(e["r"])):
        request["state"] = e["state"]


def _ended(s: State, e: Record) -> None:
    request = s["requests"].get(str(e["r"]))
    if request is None:
        return
    if request["kind"] != "stream":
        del s["requests"][str(e["r"])]
    request |= {"state": "ended", "reason": e["reason"], "error": e["error"], "ended": e["at"]}
    request["text"] += e["x"]
    for block in _named(s, [request["block"]]):
        if block["writer"] == e["r"]:
            block["writer"] = None
    _prune(s["requests"], lambda one: one["state"] == "ended")


def _task(s: State, e: Record) -> None:
    s["tasks"][str(e["k"])] = {key: e[key] for key in ("k", "name", "state", "line", "error")}
    _prune(s["tasks"], lambda one: one["state"] in ("done", "failed", "cancelled"))


def _step(s: State, e: Record) -> None:
    s |= {key: e[key] for key in ("pages", "slots", "encoded", "resent")}
    s |= {"step": e["n"], "waiting": e["wait"], "error": e["err"]}
    s["seconds"] += e["s"]
    if e["err"]:
        return
    s["passes"] += 1
    for row in e["rows"]:
        _row(s, row)


def _row(s: State, row: Record) -> None:
    request = s["requests"].get(str(row["r"]))
    if request is not None:
        request["read"] = row["v"]
        if row["k"] == "prefill":
            request["input"] = request["input"] + row["x"]
    if "c" not in row:
        return
    for block in _named(s, [row["b"]]):
        if row["k"] == "prefill" and request is not None:
            if request["kind"] == "replace":
                block |= {"texts": [], "n": 0}
            _add_texts(block, request["input"])
        block["version"], *pages = row["c"]
        if pages:
            block["pages"] = block["pages"][: pages[0]] + pages[1]
    if request is not None and request["kind"] != "stream":
        del s["requests"][str(row["r"])]


def _mark(s: State, e: Record) -> None:
    s["marks"] = [*s["marks"], {"n": e["n"], "note": e["note"]}]


def _agent(s: State, e: Record) -> None:
    table, key = s.setdefault("agents", {}), f"{e['a']}.{e['name']}"
    if e["state"] == "removed":
        table.pop(key, None)
    else:
        table[key] = {key: e[key] for key in ("a", "name", "state", "version", "k", "error")}


def _tool(s: State, e: Record) -> None:
    table, key = s.setdefault("calls", {}), f"{e['a']}.{e['c']}"
    told = {key: e[key] for key in ("a", "c", "name", "by", "args", "state", "reason")}
    table[key] = {**told, "begun": table[key]["begun"] if key in table else e["at"], "at": e["at"]}
    ended = [key for key, call in table.items() if call["state"] not in ("gate", "asking", "running")]
    for key in ended[:-ENDED_KEPT]:
        del table[key]


RULES: dict[str, Callable[[State, Record], None]] = {
    "block": _block,
    "change": _change,
    "free": _free,
    "begin": _begin,
    "end": _end,
    "request": _request,
    "token": _token,
    "stream": _stream,
    "ended": _ended,
    "task": _task,
    "step": _step,
    "pause": lambda s, e: s.update(paused=True),
    "resume": lambda s, e: s.update(paused=False),
    "speed": lambda s, e: s.update(interval=e["interval"]),
    "close": lambda s, e: s.update(closed=True),
    "mark": _mark,
    "agent": _agent,
    "tool": _tool,
}


def _named(s: State, ids: Iterable[int | None]) -> list[State]:
    """The blocks of `ids` that are there."""
    found = (s["blocks"].get(str(number)) for number in ids)
    return [block for block in found if block is not None]


def _add_texts(block: State, texts: list[str]) -> None:
    block["texts"].extend(texts)
    block["n"] += len(texts)


def _set_content(block: State, texts: list[str], version: int, pages: list[int]) -> None:
    block |= {"texts": list(texts), "n": len(texts), "version": version, "pages": list(pages)}


def _content_of(s: State, number: int, version: int, tokens: int) -> list[str]:
    """Texts of a block as it was at `version`: now, or when a transaction began that still goes on."""
    block = s["blocks"].get(str(number))
    if block is None:
        return []
    saved = (one["saved"] for one in block["tx"] if one["saved"]["version"] == version)
    source = block if block["version"] == version else next(saved, block)
    texts: list[str] = source["texts"][:tokens]
    return texts


def _prune(table: State, is_ended: Callable[[State], bool]) -> None:
    """Forget the oldest ended ones beyond ENDED_KEPT."""
    ended = [key for key in sorted(table, key=int) if is_ended(table[key])]
    for key in ended[:-ENDED_KEPT]:
        del table[key]
