"""Small pictures without a drawing library: rectangles of few colours on a clear ground, as PNG.

Knows pixels and the PNG format, nothing of what is drawn. An indexed picture of a thousand pixels by a
hundred takes a few kilobytes, and looks right on light and dark pages alike.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

CLEAR = 0
"""Index of the clear ground; colours count from 1."""


class Raster:
    """A picture of `width` × `height` pixels; `colours` are "#RRGGBB"."""

    def __init__(self, width: int, height: int, colours: Sequence[str]) -> None:
        if not (0 < width < 10_000 and 0 < height < 10_000 and len(colours) < 256):
            raise ValueError(f"a picture of {width} × {height} in {len(colours)} colours")
        self.width, self.height, self.colours = width, height, tuple(colours)
        self._rows = [bytearray(width) for _ in range(height)]

    def fill(self, x: float, y: float, width: float, height: float, colour: int) -> None:
        """Fill a rectangle, at least a pixel large, with colour number `colour`; what lies outside is cut."""
        left, top = max(0, round(x)), max(0, round(y))
        right = min(self.width, max(left + 1, round(x + width)))
        bottom = min(self.height, max(top + 1, round(y + height)))
        if left < right:
            run = bytes([colour]) * (right - left)
            for row in self._rows[top:bottom]:
                row[left:right] = run

    def pixel(self, x: int, y: int) -> int:
        """The colour number at a place."""
        return self._rows[y][x]

    def png(self) -> bytes:
        """The picture as a PNG file."""
        palette = b"\0\0\0" + b"".join(bytes.fromhex(colour[1:]) for colour in self.colours)
        lines = b"".join(b"\0" + bytes(row) for row in self._rows)
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 3, 0, 0, 0)
        chunks = [
            (b"IHDR", header),
            (b"PLTE", palette),
            (b"tRNS", b"\0"),  # colour 0 is clear, the others are not
            (b"IDAT", zlib.compress(lines, 6)),
            (b"IEND", b""),
        ]
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)

    def data_uri(self) -> str:
        """The picture as it stands in ``<img src="…">``."""
        return "data:image/png;base64," + base64.b64encode(self.png()).decode("ascii")


def _chunk(kind: bytes, data: bytes) -> bytes:
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)
