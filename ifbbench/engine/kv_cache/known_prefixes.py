"""What the reuse tree is asked and told: which prefixes are known, which block is missing, what is to be kept."""

from collections.abc import Hashable
from dataclasses import dataclass

from ifbbench.engine.kv_cache.attention_window import ceil_div
from ifbbench.engine.kv_cache.blocks import Blocks
from ifbbench.engine.kv_cache.sequence import KnownTokens, Sequence
from ifbbench.engine.kv_cache.token_keys import BlockKey, block_ranges


@dataclass(slots=True)
class MissingBlock:
    """A request's search for its first missing block: how many blocks it has found in a row, the last being `node`.

    request: the search is valid for this request only. A request that is stopped before it starts leaves its slot, and
        this search, to another one.
    """

    request: object
    depth: int = 0
    node: int = 0
    stamp: int = 0
    num_changes: int = -1
    found: tuple[Hashable, BlockKey] | None = None


class KnownPrefixes:
    """The prefixes that the blocks of one attention window hold."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._tree = blocks.tree
        self._size = blocks.tokens_per_block

    def matched_blocks(self, known: KnownTokens, num_tokens: int) -> list[int]:
        """Full blocks that hold a beginning of the first `num_tokens` tokens, as things stand."""
        tree, matched = self._tree, []
        node: int | None = tree.root(known.identity) if tree.has_root(known.identity) else None
        for start, stop in block_ranges(num_tokens, self._size, with_partial=False):
            node = None if node is None else tree.child(node, known.tokens.key(start, stop))
            if node is None:
                break
            matched.append(node)
        return matched

    def store(self, sequence: Sequence, num_tokens: int, with_partial: bool = False) -> None:
        """Make the blocks of the sequence's first `num_tokens` tokens findable: the full ones, and with `with_partial`
        a last one that is not.

        Where equal blocks are known already those stay, and the sequence's own go unnamed. (TensorRT-LLM's
        `storeBlocks`.)"""
        if sequence.known is None or num_tokens < (1 if with_partial else self._size):
            return
        tree, size, tokens = self._tree, self._size, sequence.known.tokens
        if not sequence.stored or tree.stamp[sequence.node] != sequence.stamp:
            sequence.stored, sequence.node = 0, tree.root(sequence.known.identity)
        node, index = sequence.node, sequence.stored
        beam = sequence.beams[0]
        while (index + 1) * size <= num_tokens:
            node = self._store_block(beam[index], node, tokens.key(index * size, (index + 1) * size))
            index += 1
        if index:
            sequence.stored, sequence.node, sequence.stamp = index, node, tree.stamp[node]
        if with_partial and index * size < num_tokens:
            self._store_block(beam[index], node, tokens.key(index * size, num_tokens))

    def _store_block(self, block: int, node: int, key: BlockKey) -> int:
        """The node below `node` that holds `key`: one that is there already, or `block`."""
        tree = self._tree
        known = tree.child(node, key)
        if known is not None:
            return known
        if tree.is_linked(block):
            tree.unlink_with_descendants(block)
        tree.link(block, node, key)
        return block

    def find_missing(self, search: MissingBlock, known: KnownTokens, length: int) -> tuple[Hashable, BlockKey] | None:
        """The first full block of a prompt of `length` tokens that nobody has stored: what is above it, and its key.
        None if all are. `search` remembers how far the last call came, so a prompt is walked through once."""
        tree, size = self._tree, self._size
        if search.num_changes == tree.num_changes:
            return search.found
        if not tree.has_root(known.identity):
            # Whoever stores a first block makes the root; until then the identity stands for it.
            search.found = (known.identity, known.tokens.key(0, size)) if length >= size else None
            search.depth, search.num_changes = 0, tree.num_changes
            return search.found
        if not search.depth or tree.stamp[search.node] != search.stamp:
            search.depth, search.node = 0, tree.root(known.identity)
        node = search.node
        search.found = None
        for index in range(search.depth, length // size):
            key = known.tokens.key(index * size, (index + 1) * size)
            child = tree.child(node, key)
            if child is None:
                search.found = node, key
                break
            node = child
            search.depth, search.node, search.stamp = index + 1, node, tree.stamp[node]
        search.num_changes = tree.num_changes
        return search.found

    def truncate(self, known: KnownTokens, length: int, keep: int) -> None:
        """Forget what is known of a conversation of `length` tokens beyond its first `keep`; what others share
        stays."""
        path = self._path(known, length)
        for block in reversed(path[ceil_div(keep, self._size) :]):
            if not self._tree.is_leaf(block):
                return
            self._tree.unlink(block)
            self._blocks.eviction.set_priority(block, 0)

    def _path(self, known: KnownTokens, length: int) -> list[int]:
        """The known blocks of a conversation, the last one perhaps not full."""
        tree, size, tokens = self._tree, self._size, known.tokens
        path: list[int] = []
        if not tree.has_root(known.identity):
            return path
        node = tree.root(known.identity)
        for start in range(0, length, size):
            key = tokens.key(start, min(start + size, length))
            child = tree.child(node, key)
            if child is None:
                found = tree.most_common(node, key, tokens, lambda block: True)
                held = found and tree.key[found[0]]
                if found and held is not None and tokens.num_tokens(held) == found[1]:
                    path.append(found[0])
                break
            path.append(child)
            node = child
        return path
