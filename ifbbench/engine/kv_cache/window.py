"""The sequences of one attention window: which blocks each owns, what is found again, what is kept for others."""

from itertools import takewhile

from ifbbench.engine.kv_cache.attention_window import AttentionWindow
from ifbbench.engine.kv_cache.blocks import Blocks, OutOfBlocks
from ifbbench.engine.kv_cache.eviction import DEFAULT_PRIORITY
from ifbbench.engine.kv_cache.known_prefixes import KnownPrefixes
from ifbbench.engine.kv_cache.retention import NO_RETENTION, Retention
from ifbbench.engine.kv_cache.sequence import KnownTokens, ReuseRules, Sequence
from ifbbench.engine.kv_cache.token_keys import BlockKey, BlockTokens, block_ranges


class WindowCache:
    """Blocks and sequences of the layers that share an attention window."""

    def __init__(self, attention_window: AttentionWindow, blocks: Blocks, rules: ReuseRules) -> None:
        self.attention_window = attention_window
        self.blocks = blocks
        self.prefixes = KnownPrefixes(blocks)
        self.sequences: dict[int, Sequence] = {}
        self._rules = rules

    # Adding a sequence.

    def add(
        self, slot: int, length: int, beam_width: int = 1, known: KnownTokens | None = None,
        retention: Retention = NO_RETENTION, may_look_up: bool = True,
    ) -> int:
        """Take the blocks of a prompt of `length` tokens; returns how many of its first tokens they hold already.

        Raises OutOfBlocks, having taken nothing, when too few are free; ValueError when `slot` is taken."""
        attention_window = self.attention_window
        registered = length + attention_window.bubble
        is_cyclic = registered >= attention_window.kept_tokens
        if known is None or not self._rules.enabled or is_cyclic:
            private = attention_window.private_blocks(length) if beam_width > 1 else range(0)
            self.add_blocks(slot, attention_window.prompt_blocks(length), beam_width, private, retention)
            self.sequences[slot].is_cyclic = is_cyclic
            self.sequences[slot].known = None if is_cyclic else known
            return 0
        self._check_slot(slot)
        return self._add_known(slot, length, beam_width, known, retention, may_look_up)

    def add_blocks(
        self, slot: int, count: int, beam_width: int, private: range, retention: Retention = NO_RETENTION
    ) -> None:
        """Give `slot` a sequence of `count` new blocks, shared by its beams except those at the indices `private`."""
        self._check_slot(slot)
        self._check_free(count + len(private) * (beam_width - 1))
        if not private:
            beams = [self._take_blocks(0, count, retention, beam_width)]
            beams += [list(beams[0]) for _ in range(beam_width - 1)]
        else:
            before = self._take_blocks(0, private.start, retention, beam_width)
            own = [self._take_blocks(private.start, private.stop, retention) for _ in range(beam_width)]
            after = self._take_blocks(private.stop, count, retention, beam_width)
            beams = [before + blocks + after for blocks in own]
        self.sequences[slot] = Sequence(beams, retention=retention)

    def _add_known(
        self, slot: int, length: int, beam_width: int, known: KnownTokens, retention: Retention, may_look_up: bool
    ) -> int:
        size, counters = self.attention_window.tokens_per_block, self.blocks.counters
        count = self.attention_window.prompt_blocks(length)
        # The last block is written to by each beam on its own.
        num_shared = count if beam_width == 1 else count - 1
        usable = min(length - 1, num_shared * size) if may_look_up else 0
        matched = self.prefixes.matched_blocks(known, usable)
        self._check_free(self._cost(matched, num_shared, count, beam_width))
        shared, num_tokens = self._take_matching(known, usable, beam_width, retention)
        num_matched = len(shared)
        shared += self._take_blocks(num_matched, num_shared, retention, beam_width)
        beams = [shared + self._take_blocks(num_shared, count, retention) for _ in range(beam_width)]
        self._name(beams, known, num_matched, length)
        self.sequences[slot] = Sequence(beams, known, retention)
        counters.reused += num_matched
        counters.missed += count - num_matched
        return num_tokens

    def _take_matching(
        self, known: KnownTokens, num_tokens: int, beam_width: int, retention: Retention
    ) -> tuple[list[int], int]:
        """Hold the blocks that hold a beginning of the first `num_tokens` tokens, and how many tokens that is.

        One after the other: bringing a block back from the host may push one off it that would have matched next."""
        tree, size, held = self.blocks.tree, self.attention_window.tokens_per_block, list[int]()
        if not num_tokens or not tree.has_root(known.identity):
            return held, 0
        node = tree.root(known.identity)
        for index, (start, stop) in enumerate(block_ranges(num_tokens, size)):
            key = known.tokens.key(start, stop)
            child = tree.child(node, key)
            if child is None or stop - start < size:
                found = self._partial_match(node, key, child, stop - start, known.tokens)
                if found is None:
                    return held, start
                held.append(self._partial_block(*found, beam_width, index, retention))
                return held, start + found[1]
            self.blocks.hold(child, beam_width, *retention.of_block(index, size))
            if not self.blocks.is_on_device(child):
                self.blocks.bring_back(child)
            held.append(child)
            node = child
        return held, num_tokens

    def _partial_match(
        self, node: int, key: BlockKey, exact: int | None, length: int, tokens: BlockTokens
    ) -> tuple[int, int] | None:
        if exact is not None and (self._rules.copy_partial or self._is_unused_leaf(exact)):
            return exact, length
        if not self._rules.partial:
            return None
        is_eligible = (lambda block: True) if self._rules.copy_partial else self._is_unused_leaf
        return self.blocks.tree.most_common(node, key, tokens, is_eligible)

    def _is_unused_leaf(self, block: int) -> bool:
        return self.blocks.references[block] == 0 and self.blocks.tree.is_leaf(block)

    def _cost(self, matched: list[int], num_shared: int, count: int, beam_width: int) -> int:
        """Free blocks of the device that the sequence takes away at most: all but those that others hold already.
        Behind a block on the host nothing is sure to be found still, once that one is back."""
        held = sum(self.blocks.references[block] > 0 for block in takewhile(self.blocks.is_on_device, matched))
        return num_shared - held + (count - num_shared) * beam_width

    def _partial_block(self, source: int, num_tokens: int, beam_width: int, index: int, retention: Retention) -> int:
        """A block of the sequence's own that begins with the first `num_tokens` of `source`."""
        blocks = self.blocks
        if not self._is_unused_leaf(source):
            return blocks.copy_into_new(source, num_tokens, beam_width)
        blocks.take_over(source, beam_width, *retention.of_block(index, self.attention_window.tokens_per_block))
        if not blocks.is_on_device(source):
            blocks.bring_back(source)
        return source

    def _name(self, beams: list[list[int]], known: KnownTokens, matched: int, length: int) -> None:
        """Write down what the new blocks will hold."""
        size, keys = self.attention_window.tokens_per_block, self.blocks.tree.key
        for index in range(matched, len(beams[0])):
            stop = min((index + 1) * size, length - 1)
            key = known.tokens.key(index * size, stop) if stop > index * size else None
            for beam in beams:
                keys[beam[index]] = key

    def _take_blocks(self, first: int, stop: int, retention: Retention, references: int = 1) -> list[int]:
        """New blocks for places `first` to `stop` - 1 of a prompt."""
        if not retention.ranges:
            return self.blocks.take_many(stop - first, references)
        taken = []
        for index in range(first, stop):
            priority, duration_s = retention.of_block(index, self.attention_window.tokens_per_block)
            taken.append(self.blocks.take(references, DEFAULT_PRIORITY if priority is None else priority, duration_s))
        return taken

    def _check_slot(self, slot: int) -> None:
        if slot in self.sequences:
            raise ValueError(f"slot {slot} holds a sequence already")

    def _check_free(self, needed: int) -> None:
        if needed > self.blocks.num_free:
            raise OutOfBlocks(f"a sequence needs {needed} KV cache blocks, {self.blocks.num_free} are free")

    # Growing and shrinking.

    def grow(self, slots: list[int]) -> None:
        """One more block for each beam of each of `slots`, in this order."""
        sequences = [self.sequences[slot] for slot in slots]
        if all(sequence.retention is NO_RETENTION and len(sequence.beams) == 1 for sequence in sequences):
            for sequence, block in zip(sequences, self.blocks.take_many(len(slots)), strict=True):
                sequence.beams[0].append(block)
            return
        for sequence in sequences:
            priority, duration_s = sequence.retention.of_output()
            for beam in sequence.beams:
                beam.append(self.blocks.take(priority=priority, duration_s=duration_s))

    def shrink(self, slot: int) -> None:
        """Give the last block of each beam back, to be the next that is taken."""
        for beam in self.sequences[slot].beams:
            self.blocks.let_go([beam.pop()], to_front=True)

    def write_over(self, slot: int, index: int) -> int:
        """A token will be written over the block at `index`, for the window has come round. What others need of it
        stays theirs. Returns how many blocks the sequence has taken to have another one there."""
        blocks, taken = self.blocks, 0
        for beam in self.sequences[slot].beams:
            block = beam[index]
            if blocks.references[block] > 1:
                beam[index] = blocks.take(priority=blocks.eviction.priority(block))
                blocks.tree.key[beam[index]] = blocks.tree.key[block]
                blocks.let_go([block])
                taken += 1
            elif blocks.tree.is_linked(block):
                blocks.tree.unlink_with_descendants(block)
        return taken

    def remove(self, slot: int, now_s: float = 0.0) -> None:
        """Release all blocks of the sequence, the last ones first, so that tails are reused before heads."""
        sequence = self.sequences.pop(slot)
        if len(sequence.beams) == 1:
            self.blocks.let_go(reversed(sequence.beams[0]), now_s=now_s)
            return
        for index in range(len(sequence.beams[0]) - 1, -1, -1):
            self.blocks.let_go((beam[index] for beam in sequence.beams), now_s=now_s)

    def forget(self, slot: int) -> None:
        """What the sequence's blocks hold is not to be trusted: nobody shall find it, now or later."""
        self.sequences[slot].known = None
        for block in self.sequences[slot].references():
            if self.blocks.tree.is_linked(block):
                self.blocks.tree.unlink_with_descendants(block)
