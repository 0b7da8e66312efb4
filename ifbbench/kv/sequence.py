"""The sequences of one attention window: the blocks that each holds, found in the reuse tree or newly taken."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

from ifbbench.engine.retention import DEFAULT_PRIORITY, NO_RETENTION, Retention
from ifbbench.engine.tokens import BlockKey, BlockTokens, KnownTokens
from ifbbench.kv.attention_window import AttentionWindow
from ifbbench.kv.blocks import Blocks, OutOfBlocks


@dataclass(frozen=True, slots=True)
class ReuseRules:
    """How blocks of earlier requests are reused.

    partial: whether blocks of which only a prefix matches are reused too.
    copy_partial: whether such blocks are copied if they are in use; otherwise they are skipped.
    """

    enabled: bool = False
    partial: bool = True
    copy_partial: bool = True


@dataclass(slots=True)
class Sequence:
    """The blocks of one sequence, in order, one list for each beam. Beams share context blocks (see
    `AttentionWindow.private_blocks`).

    stored: how many of its blocks are in the reuse tree, themselves or equal ones; the last is `node`, with `stamp`.
    """

    beams: list[list[int]]
    known: KnownTokens | None = None
    retention: Retention = NO_RETENTION
    is_cyclic: bool = False
    stored: int = 0
    node: int = 0
    stamp: int = 0

    def references(self) -> Counter[int]:
        """Number of references of the sequence to each of its blocks."""
        return Counter(block for beam in self.beams for block in beam)


class Sequences:
    """The sequences, and the operations that take and release their blocks.

    by_slot: the sequence in each slot.
    """

    def __init__(self, window: AttentionWindow, blocks: Blocks, rules: ReuseRules) -> None:
        self.by_slot: dict[int, Sequence] = {}
        self._window = window
        self._blocks = blocks
        self._rules = rules
        self._any_retention = False  # whether any sequence was ever added with priorities of its own

    # Adding a sequence.

    def add(
        self,
        slot: int,
        length: int,
        beam_width: int = 1,
        known: KnownTokens | None = None,
        retention: Retention = NO_RETENTION,
        may_look_up: bool = True,
    ) -> int:
        """Take the blocks of a prompt of `length` tokens; returns how many of its first tokens they hold already.

        Raises OutOfBlocks, having taken nothing, when too few are free; ValueError when `slot` is taken."""
        if slot in self.by_slot:
            raise ValueError(f"slot {slot} already has a sequence")
        window = self._window
        self._any_retention |= retention is not NO_RETENTION
        is_cyclic = length + window.bubble >= window.kept_tokens
        if known is None or not self._rules.enabled or is_cyclic:
            private = window.private_blocks(length) if beam_width > 1 else range(0)
            sequence = self.add_blocks(slot, window.prompt_blocks(length), beam_width, private, retention)
            sequence.is_cyclic = is_cyclic
            sequence.known = None if is_cyclic else known
            return 0
        return self._add_known(slot, length, beam_width, known, retention, may_look_up)

    def add_blocks(
        self, slot: int, count: int, beam_width: int, private: range, retention: Retention = NO_RETENTION
    ) -> Sequence:
        """A sequence of `count` new blocks, which its beams share except those at the indices `private`."""
        self._check_free(count + len(private) * (beam_width - 1))
        before = self._take_blocks(0, private.start if private else count, retention, beam_width)
        beams = [before + self._take_blocks(private.start, private.stop, retention) for _ in range(beam_width)]
        if private:
            after = self._take_blocks(private.stop, count, retention, beam_width)
            beams = [beam + after for beam in beams]
        sequence = self.by_slot[slot] = Sequence(beams, retention=retention)
        return sequence

    def _add_known(
        self, slot: int, length: int, beam_width: int, known: KnownTokens, retention: Retention, may_look_up: bool
    ) -> int:
        size, counters = self._window.tokens_per_block, self._blocks.counters
        count = self._window.prompt_blocks(length)
        # Each beam writes to the last block.
        num_shared = count if beam_width == 1 else count - 1
        usable = min(length - 1, num_shared * size) if may_look_up else 0
        matched = self._blocks.tree.matched_blocks(known, usable)
        if count + (count - num_shared) * (beam_width - 1) > self._blocks.num_free:
            self._check_free(self._cost(matched, num_shared, count, beam_width))
        shared, num_tokens = self._take_matching(known, matched, usable, beam_width, retention)
        num_matched = len(shared)
        shared += self._take_blocks(num_matched, num_shared, retention, beam_width)
        beams = [shared + self._take_blocks(num_shared, count, retention) for _ in range(beam_width)]
        self._set_keys(beams, known, num_matched, length)
        sequence = self.by_slot[slot] = Sequence(beams, known, retention)
        if num_full := num_tokens // size:
            # The blocks found whole are stored already.
            sequence.stored, sequence.node = num_full, shared[num_full - 1]
            sequence.stamp = self._blocks.tree.stamp[sequence.node]
        # It may hold fewer blocks of its own than were counted for it, so that another request fits.
        self._blocks.tree.num_changes += 1
        counters.reused += num_matched
        counters.missed += count - num_matched
        return num_tokens

    def _take_matching(
        self, known: KnownTokens, matched: list[int], num_tokens: int, beam_width: int, retention: Retention
    ) -> tuple[list[int], int]:
        """Hold the blocks with the longest known prefix of the first `num_tokens` tokens, of which `matched` are full;
        returns them and the length of that prefix."""
        tree, size = self._blocks.tree, self._window.tokens_per_block
        if not num_tokens or not tree.has_root(known.identity):
            return [], 0
        held = self._hold_matched(matched, beam_width, retention)
        start = len(held) * size
        stop = min(start + size, num_tokens)
        if start == stop:
            return held, num_tokens
        node, key = held[-1] if held else tree.root(known.identity), known.tokens.key(start, stop)
        found = self._partial_match(node, key, tree.child(node, key), stop - start, known.tokens)
        if found is None:
            return held, start
        held.append(self._partial_block(*found, beam_width, len(held), retention))
        return held, start + found[1]

    def _hold_matched(self, matched: list[int], beam_width: int, retention: Retention) -> list[int]:
        """Hold the blocks `matched` and move them to the device; returns how far they are still linked: onboarding a
        block may evict one from the host that comes next."""
        blocks = self._blocks
        if not (blocks.num_secondary or retention.ranges):
            blocks.hold_all(matched, beam_width)
            return matched
        for index, block in enumerate(matched):
            if not blocks.tree.is_linked(block):
                return matched[:index]
            blocks.hold(block, beam_width, *retention.of_block(index, self._window.tokens_per_block))
            if not blocks.is_on_device(block):
                blocks.onboard(block)
        return matched

    def _partial_match(
        self, node: int, key: BlockKey, exact: int | None, length: int, tokens: BlockTokens
    ) -> tuple[int, int] | None:
        if exact is not None and (self._rules.copy_partial or self._is_unused_leaf(exact)):
            return exact, length
        if not self._rules.partial:
            return None
        is_eligible = (lambda block: True) if self._rules.copy_partial else self._is_unused_leaf
        return self._blocks.tree.most_common(node, key, tokens, is_eligible)

    def _is_unused_leaf(self, block: int) -> bool:
        return self._blocks.references[block] == 0 and self._blocks.tree.is_leaf(block)

    def _cost(self, matched: list[int], num_shared: int, count: int, beam_width: int) -> int:
        """Maximum number of free device blocks that the sequence takes: all but those that are in use already. A match
        behind a block on the host is uncertain, because onboarding that block may evict it."""
        held = sum(self._blocks.references[block] > 0 for block in takewhile(self._blocks.is_on_device, matched))
        return num_shared - held + (count - num_shared) * beam_width

    def _partial_block(self, source: int, num_tokens: int, beam_width: int, index: int, retention: Retention) -> int:
        """A block only of this sequence that starts with the first `num_tokens` of `source`."""
        blocks = self._blocks
        if not self._is_unused_leaf(source):
            return blocks.copy_into_new(source, num_tokens, beam_width)
        blocks.take_over(source, beam_width, *retention.of_block(index, self._window.tokens_per_block))
        if not blocks.is_on_device(source):
            blocks.onboard(source)
        return source

    def _set_keys(self, beams: list[list[int]], known: KnownTokens, matched: int, length: int) -> None:
        """Record what the new blocks will hold. The last one will not hold the last token, which is not stored."""
        size, keys, tokens = self._window.tokens_per_block, self._blocks.tree.key, known.tokens
        last = (length - 1) // size
        if matched > last:
            return
        blocks, new_keys = beams[0], known.block_keys(last, size)
        for index in range(matched, last):
            keys[blocks[index]] = new_keys[index]
        last_key = tokens.key(last * size, length - 1) if length - 1 > last * size else None
        for beam in beams:
            keys[beam[last]] = last_key

    def _take_blocks(self, first: int, stop: int, retention: Retention, references: int = 1) -> list[int]:
        """New blocks number `first` to `stop` - 1 of a prompt."""
        if not retention.ranges:
            return self._blocks.take_many(stop - first, references)
        taken = []
        for index in range(first, stop):
            priority, duration_s = retention.of_block(index, self._window.tokens_per_block)
            taken.append(self._blocks.take(references, DEFAULT_PRIORITY if priority is None else priority, duration_s))
        return taken

    def _check_free(self, needed: int) -> None:
        if needed > self._blocks.num_free:
            raise OutOfBlocks(f"a sequence needs {needed} KV cache blocks, {self._blocks.num_free} are free")

    # Growing, storing and removing.

    def grow(self, slots: list[int]) -> list[int]:
        """Add a block to each beam of each of `slots`, in this order; returns these blocks."""
        if not self._any_retention:
            beams = [beam for slot in slots for beam in self.by_slot[slot].beams]
            taken = self._blocks.take_many(len(beams))
            for index, beam in enumerate(beams):
                beam.append(taken[index])
            return taken
        taken = []
        for sequence in [self.by_slot[slot] for slot in slots]:
            priority, duration_s = sequence.retention.decode_priority, sequence.retention.decode_duration_s
            for beam in sequence.beams:
                beam.append(self._blocks.take(priority=priority, duration_s=duration_s))
                taken.append(beam[-1])
        return taken

    def shrink(self, slot: int) -> None:
        """Release the last block of each beam, so that it is the next that is taken."""
        for beam in self.by_slot[slot].beams:
            self._blocks.release([beam.pop()], to_front=True)

    def overwrite(self, slot: int, index: int) -> int:
        """Prepare the block at `index` for being overwritten, because the window wraps. A beam that shares the block
        takes another one; a block of its own can no longer be found. Returns the number of blocks taken."""
        blocks, taken = self._blocks, 0
        for beam in self.by_slot[slot].beams:
            block = beam[index]
            if blocks.references[block] > 1:
                beam[index] = blocks.take(priority=blocks.eviction.priority(block))
                blocks.tree.key[beam[index]] = blocks.tree.key[block]
                blocks.release([block])
                taken += 1
            elif blocks.tree.is_linked(block):
                blocks.tree.unlink_with_descendants(block)
        return taken

    def store(self, slot: int, num_tokens: int, with_partial: bool = False) -> None:
        """Make the blocks of the first `num_tokens` tokens findable: the full ones, and with `with_partial` a last
        partial one (TensorRT-LLM's `storeBlocks`). Where equal blocks are known already, those remain."""
        sequence, tree, size = self.by_slot[slot], self._blocks.tree, self._window.tokens_per_block
        if not self._rules.enabled or sequence.is_cyclic or sequence.known is None:
            return
        if num_tokens < (1 if with_partial else size):
            return
        known, beam = sequence.known, sequence.beams[0]
        if not sequence.stored or tree.stamp[sequence.node] != sequence.stamp:
            sequence.stored, sequence.node = 0, tree.root(known.identity)
        stored, full = sequence.stored, num_tokens // size
        if stored < full:
            node = tree.store(beam[stored:full], sequence.node, known.block_keys(full, size)[stored:])
            sequence.stored, sequence.node, sequence.stamp = full, node, tree.stamp[node]
        if with_partial and full * size < num_tokens:
            tree.store([beam[full]], sequence.node, [known.tokens.key(full * size, num_tokens)])

    def forget(self, slot: int) -> None:
        """Make the sequence's blocks unfindable, now and later: their content was never computed."""
        self.by_slot[slot].known = None
        for block in self.by_slot[slot].references():
            if self._blocks.tree.is_linked(block):
                self._blocks.tree.unlink_with_descendants(block)

    def remove(self, slot: int, now_s: float = 0.0) -> None:
        """Release all blocks of the sequence, the last ones first, so that tails are evicted before heads."""
        beams = self.by_slot.pop(slot).beams
        if len(beams) == 1:
            self._blocks.release(beams[0][::-1], now_s=now_s)
        else:
            last_first = range(len(beams[0]) - 1, -1, -1)
            self._blocks.release([beam[index] for index in last_first for beam in beams], now_s=now_s)


class ReleasePlan:
    """The free blocks after planned removals of sequences. It stores only differences to the reference counts."""

    def __init__(self, blocks: Blocks, sequences: Sequences) -> None:
        self.free_blocks = blocks.num_free
        self._blocks = blocks
        self._sequences = sequences.by_slot
        self._released: Counter[int] = Counter()

    def release(self, slot: int) -> None:
        """Plan the removal of the sequence in `slot`."""
        references = self._blocks.references
        for block, count in self._sequences[slot].references().items():
            self._released[block] += count
            if references[block] == self._released[block]:
                self.free_blocks += 1


class ReleaseCount:
    """The free blocks after planned removals of sequences that share no block.

    held_blocks: takes a slot, and returns the blocks of its sequence.
    """

    def __init__(self, free_blocks: int, held_blocks: Callable[[int], int]) -> None:
        self.free_blocks, self._held_blocks = free_blocks, held_blocks

    def release(self, slot: int) -> None:
        """Plan the removal of the sequence in `slot`."""
        self.free_blocks += self._held_blocks(slot)
