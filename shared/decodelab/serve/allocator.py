"""Which slot of the KV pool holds position p of a sequence: paged, shared, or in one piece.

A pool is `num_blocks` blocks of `block_size` slots. A sequence's block table lists its blocks in
order of position, so that growing copies nothing. No memory is here, only the accounts of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from decodelab.predict.checks import positive_int


def slot_mapping(table: Sequence[int], block_size: int, start: int, stop: int) -> list[int]:
    """The slots that hold positions start .. stop - 1: paging is this one line."""
    return [table[p // block_size] * block_size + p % block_size for p in range(start, stop)]


class BlockAllocator:
    """Paged: a sequence takes a block, any free one, when its last is full.

    Another rule overrides `admit`, `grow` and `free`. Each of the first two either has room or
    changes nothing.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.num_blocks = positive_int("num_blocks", num_blocks)
        self.block_size = positive_int("block_size", block_size)
        # In order of release, so that what was freed last is overwritten last.
        self.free_list: dict[int, None] = dict.fromkeys(range(num_blocks))
        self.tables: dict[Hashable, list[int]] = {}
        self.owners: Counter[int] = Counter()  # block -> tables that list it

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence owns."""
        return len(self.free_list)

    def blocks_for(self, length: int) -> int:
        """Blocks that `length` tokens fill, the last one perhaps in part."""
        return -(-length // self.block_size)

    def admit(self, id: Hashable, tokens: Sequence[int], max_length: int) -> int | None:
        """Blocks for all `tokens` of a newcomer; how many already have KV, or None: no room.

        `max_length` is how long it may grow; here only a reservation asks.
        """
        return 0 if self.grow(id, len(tokens)) else None

    def grow(self, id: Hashable, length: int) -> bool:
        """Let a sequence's table reach `length` tokens; False, and no change, without room."""
        missing = self.blocks_for(length) - len(self.tables.get(id, ()))
        if missing > len(self.free_list):
            return False
        table = self.tables.setdefault(id, [])
        table.extend(self.take() for _ in range(missing))
        return True

    def free(self, id: Hashable) -> None:
        """Give back what a sequence owns, its last block first."""
        for block in reversed(self.tables.pop(id)):
            self.owners[block] -= 1
            if not self.owners[block]:
                del self.owners[block]
                self.free_list[block] = None

    def take(self) -> int:
        """The block that has been free for longest, now with one owner."""
        block = next(iter(self.free_list))
        del self.free_list[block]
        self.owners[block] = 1
        return block

    def publish(self, id: Hashable, tokens: Sequence[int], computed: int) -> None:
        """Hear that the first `computed` tokens have KV; only sharing makes use of it."""

    def table(self, id: Hashable) -> list[int]:
        """The blocks of a sequence, in order of position; not a copy."""
        return self.tables[id]

    def slots(self, id: Hashable, start: int, stop: int) -> list[int]:
        """The slots of positions start .. stop - 1 of a sequence."""
        return slot_mapping(self.tables[id], self.block_size, start, stop)

    def check(self) -> None:
        """AssertionError unless every block is free or owned, as often as tables list it."""
        listed = Counter(block for table in self.tables.values() for block in table)
        assert listed == self.owners, "owners and tables disagree"
        assert not listed.keys() & self.free_list.keys(), "a free block is owned"
        assert len(listed) + len(self.free_list) == self.num_blocks, "a block is lost"


class ReservingAllocator(BlockAllocator):
    """What paging replaced: prompt and max_tokens reserved at admission, in one piece."""

    def admit(self, id: Hashable, tokens: Sequence[int], max_length: int) -> int | None:
        """The first run of free blocks that is long enough for `max_length` tokens."""
        needed, run = self.blocks_for(max_length), 0
        for block in range(self.num_blocks) if needed <= self.free_blocks else ():
            run = run + 1 if block in self.free_list else 0
            if run == needed:
                self.tables[id] = list(range(block + 1 - needed, block + 1))
                for reserved in self.tables[id]:
                    del self.free_list[reserved]
                    self.owners[reserved] = 1
                return 0
        return None


class SharingAllocator(BlockAllocator):
    """Paged, and full blocks with the same tokens from position 0 on are stored once.

    Only blocks whose KV is computed are shared, and a full block is never written again: so there
    is no copy-on-write. A free block keeps its KV, and may be shared, until it's taken.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        super().__init__(num_blocks, block_size)
        # A chain: a block is known by its tokens and the number of the block before it. Numbers
        # are never used twice, so nothing is found through a block that was overwritten; and they
        # don't collide, as the chained hashes of an engine may.
        self.known: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # -> (number, block)
        self.keys: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> its key in `known`
        self.chains: dict[Hashable, list[int]] = {}  # id -> numbers of its full blocks
        self.numbers = 0

    def admit(self, id: Hashable, tokens: Sequence[int], max_length: int) -> int | None:
        """Share what is known of all but the last token, whose logits are wanted."""
        chain, table = [0], []
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            key = chain[-1], tuple(tokens[start : start + self.block_size])
            if key not in self.known:
                break
            number, block = self.known[key]
            chain.append(number)
            table.append(block)
        unowned = sum(block in self.free_list for block in table)
        if self.blocks_for(len(tokens)) - len(table) + unowned > self.free_blocks:
            return None
        for block in table:
            self.free_list.pop(block, None)
            self.owners[block] += 1
        self.tables[id], self.chains[id] = table, chain
        self.grow(id, len(tokens))
        return (len(chain) - 1) * self.block_size

    def publish(self, id: Hashable, tokens: Sequence[int], computed: int) -> None:
        """Make the full blocks among the first `computed` tokens known."""
        chain, size = self.chains[id], self.block_size
        for index in range(len(chain) - 1, computed // size):
            key = chain[-1], tuple(tokens[index * size : (index + 1) * size])
            if key not in self.known:  # else another computed the same at the same time
                block = self.tables[id][index]
                self.numbers += 1
                self.known[key], self.keys[block] = (self.numbers, block), key
            chain.append(self.known[key][0])

    def free(self, id: Hashable) -> None:
        """Give the blocks back; those that are known can still be found."""
        self.chains.pop(id, None)
        super().free(id)

    def take(self) -> int:
        """The block that has been free for longest; what it held is forgotten."""
        block = super().take()
        self.known.pop(self.keys.pop(block, None), None)
        return block
