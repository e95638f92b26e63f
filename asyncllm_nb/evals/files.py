"""JSON files that are there whole or not at all, with a line for each record, and what they are read into.

Knows numbers, strings, and the format and version that each file begins with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def write_json(file: str | os.PathLike[str], document: Mapping[str, Any]) -> Path:
    """Write `document`, replacing what was there in one go. Makes the folder. Returns the path."""
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.part")
    try:
        unfinished.write_text(_lines(document) + "\n", encoding="utf-8")
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return path


def read_json(
    file: str | os.PathLike[str], form: str, version: int, build: Callable[[Any], T], wrong: str
) -> T:
    """What `build` makes of a document that `write_json` wrote with this "format" and "version".

    Raises ValueError, "FILE `wrong`", for any other file.
    """
    try:
        document = json.loads(Path(file).read_text(encoding="utf-8"))
        if document["format"] != form or document["version"] != version:
            raise KeyError("format")
        return build(document)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} {wrong}") from error


def _lines(value: Any, indent: str = "") -> str:
    """JSON with a line for each member of an object and for each of a list of lists, so that versions of a
    file can be compared."""
    inner = indent + " "
    if isinstance(value, Mapping) and value:
        members = [f"{inner}{json.dumps(str(key))}: {_lines(member, inner)}" for key, member in value.items()]
        return "{\n" + ",\n".join(members) + f"\n{indent}}}"
    if isinstance(value, list) and value and all(isinstance(member, list) for member in value):
        return "[\n" + ",\n".join(f"{inner}{_one_line(member)}" for member in value) + f"\n{indent}]"
    return _one_line(value)


def _one_line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
