"""Who holds which page and which slot. Knows small integers; no tensors, no model, no coroutine.

Two counts for a page. *References* say that its content is still read by somebody: a block, a forward
that works on a snapshot, a transaction that may go back. *Owners* are the blocks among them. The one
owner of a partly filled page may go on filling it in place, since everybody else reads only the tokens
that were there; with two owners the one that writes copies the page first.
"""

from __future__ import annotations

from collections.abc import Iterable


class Pool:
    """Hands out the numbers 1 … size, counts references, takes a number back with its last one.

    Number 0 is a constant that belongs to nobody (the zero page, the identity slot): taking and
    dropping it does nothing, so callers need no special case for empty blocks.
    """

    def __init__(self, size: int, what: str) -> None:
        self.size = size
        self.what = what
        self.references = [0] * (size + 1)
        self._free = list(range(size, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free number with one reference. The caller has checked `num_free`."""
        assert self._free, f"no free {self.what}: admission did not check"
        number = self._free.pop()
        assert self.references[number] == 0
        self.references[number] = 1
        return number

    def hold(self, number: int) -> None:
        """One more reference to a number that somebody holds already."""
        if number:
            assert self.references[number] > 0, f"{self.what} {number} is free"
            self.references[number] += 1

    def drop(self, number: int) -> None:
        """One reference less; the last one frees the number."""
        if number:
            assert self.references[number] > 0, f"{self.what} {number} is free already"
            self.references[number] -= 1
            if self.references[number] == 0:
                self._free.append(number)

    def check(self, expected: dict[int, int]) -> None:
        """Assert that exactly the numbers of `expected` are held, as often as it says."""
        actual = {number: count for number, count in enumerate(self.references) if count}
        assert actual == expected, f"{self.what}s: counted {actual}, expected {expected}"
        assert sorted(self._free) == [n for n in range(1, self.size + 1) if n not in actual]


class PagePool(Pool):
    """A pool that also counts the owners of each page."""

    def __init__(self, size: int) -> None:
        super().__init__(size, "page")
        self.owners = [0] * (size + 1)

    def take(self) -> int:
        """A free page with one reference and one owner: the block that it is taken for."""
        page = super().take()
        assert self.owners[page] == 0
        self.owners[page] = 1
        return page

    def own(self, pages: Iterable[int]) -> None:
        """One more block has these pages."""
        for page in pages:
            self.hold(page)
            self.owners[page] += 1

    def disown(self, pages: Iterable[int]) -> None:
        """One block less has these pages."""
        for page in pages:
            assert self.owners[page] > 0, f"page {page} has no owner"
            self.owners[page] -= 1
            self.drop(page)
