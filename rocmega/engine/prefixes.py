"""Prompts' beginnings that stay in the cache after their requests, for others that begin the same.

What is shared are whole prefill chunks, known by all tokens up to their end. A chunk is computed alone and always at
the same position with the same shape, so whoever uses it has, to the last bit, what he would have computed. Single
pages would not do: how a product sums may depend on how many rows it has.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from rocmega.cache import PageAllocator

ROOT = 0  # the node of no tokens
Key = tuple[int, tuple[int, ...]]  # the node of what comes before, and the chunk's tokens


@dataclass(frozen=True)
class Node:
    """A chunk in the cache; `pages` are those of its own tokens."""

    number: int
    pages: tuple[int, ...]


class PrefixTree:
    """Chunks of `chunk` tokens, each held in the allocator until it is evicted.

    In order of use, a node always after those that continue it: whoever uses a chunk uses what is before it. So the
    oldest that no request holds has no continuation that one holds.
    """

    def __init__(self, allocator: PageAllocator, chunk: int) -> None:
        self.allocator, self.chunk = allocator, chunk
        self._nodes: OrderedDict[Key, Node] = OrderedDict()
        self._keys: dict[int, Key] = {}
        self._numbers = itertools.count(ROOT + 1)

    @property
    def pages(self) -> int:
        """Pages held here."""
        return sum(len(node.pages) for node in self._nodes.values())

    def match(self, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """The longest beginning of tokens that is here: its node, and its pages."""
        node, pages, keys = ROOT, list[int](), list[Key]()
        for start in range(0, len(tokens) - self.chunk + 1, self.chunk):
            key = (node, tuple(tokens[start : start + self.chunk]))
            if key not in self._nodes:
                break
            keys.append(key)
            node = self._nodes[key].number
            pages += self._nodes[key].pages
        for key in reversed(keys):
            self._nodes.move_to_end(key)
        return node, pages

    def insert(self, before: int, tokens: Sequence[int], pages: Sequence[int]) -> int:
        """Keeps a chunk after node `before`; returns its node, which may be another request's with other pages."""
        key = (before, tuple(tokens))
        if key not in self._nodes:
            self.allocator.share(pages)
            node = self._nodes[key] = Node(next(self._numbers), tuple(pages))
            self._keys[node.number] = key
            while before in self._keys:
                self._nodes.move_to_end(self._keys[before])
                before = self._keys[before][0]
        return self._nodes[key].number

    def evict(self) -> bool:
        """Lets go of the chunk that has not been used for longest and that no request holds; False if there is none."""
        for key, node in self._nodes.items():
            if all(self.allocator.holders(page) == 1 for page in node.pages):
                self._forget(key)
                return True
        return False

    def clear(self) -> None:
        """Lets go of everything."""
        for key in list(self._nodes):
            self._forget(key)

    def _forget(self, key: Key) -> None:
        node = self._nodes.pop(key)
        del self._keys[node.number]
        self.allocator.free(node.pages)
