"""Block tables by hand: who owns what, what is shared, what comes back."""

import pytest
from decodelab.serve import BlockAllocator, ReservingAllocator, SharingAllocator, slot_mapping

ALL = [BlockAllocator, ReservingAllocator, SharingAllocator]


def test_a_position_is_found_through_the_block_table():
    assert slot_mapping([7, 2], block_size=4, start=2, stop=6) == [30, 31, 8, 9]


def test_a_sequence_takes_a_block_only_when_its_last_is_full():
    blocks = BlockAllocator(8, block_size=4)
    taken = []
    for length in range(1, 10):
        assert blocks.grow("a", length)
        taken.append(8 - blocks.free_blocks)
    assert taken == [1, 1, 1, 1, 2, 2, 2, 2, 3]


def test_growing_moves_nothing():
    blocks = BlockAllocator(8, block_size=4)
    blocks.grow("a", 5)
    before = blocks.slots("a", 0, 5)
    blocks.grow("b", 4)
    blocks.grow("a", 9)
    assert blocks.slots("a", 0, 5) == before
    assert blocks.table("a") == [0, 1, 3]  # and its blocks need not lie side by side


@pytest.mark.parametrize("kind", ALL)
def test_without_room_nothing_changes(kind):
    blocks = kind(4, block_size=2)
    assert blocks.admit("a", [1] * 5, 5) == 0
    assert blocks.admit("b", [2] * 3, 3) is None
    assert not blocks.grow("a", 9)
    assert blocks.free_blocks == 1
    assert list(blocks.tables) == ["a"]
    blocks.check()


@pytest.mark.parametrize("kind", ALL)
def test_free_returns_every_block(kind):
    blocks = kind(9, block_size=2)
    for id in "abc":
        assert blocks.admit(id, [1, 2, 3], 5) == 0
    for id in "bca":
        blocks.free(id)
        blocks.check()
    assert blocks.free_blocks == 9


def test_a_reservation_takes_all_that_may_come_and_in_one_piece():
    blocks = ReservingAllocator(10, block_size=4)
    assert blocks.admit("a", [1], 12) == 0
    assert blocks.table("a") == [0, 1, 2]
    assert blocks.grow("a", 12)
    assert blocks.free_blocks == 7


def test_a_reservation_fails_on_fragments_that_paging_uses():
    reserved, paged = ReservingAllocator(6, 1), BlockAllocator(6, 1)
    for blocks in (reserved, paged):
        for id in "abc":
            blocks.admit(id, [1, 2], 2)
        blocks.free("a")
        blocks.free("c")
        assert blocks.free_blocks == 4
    assert reserved.admit("d", [1, 2, 3], 3) is None
    assert paged.admit("d", [1, 2, 3], 3) == 0


def computed(blocks, id, tokens):
    known = blocks.admit(id, tokens, len(tokens))
    blocks.publish(id, tokens, len(tokens))
    return known


def test_a_common_prompt_is_stored_once():
    blocks = SharingAllocator(16, block_size=4)
    assert computed(blocks, "a", [*range(8), 50]) == 0
    assert computed(blocks, "b", [*range(8), 60]) == 8
    assert blocks.table("a")[:2] == blocks.table("b")[:2]
    assert blocks.owners[blocks.table("a")[0]] == 2
    assert 16 - blocks.free_blocks == 4  # and not 6
    blocks.check()


def test_a_shared_block_outlives_the_one_that_computed_it():
    blocks = SharingAllocator(4, block_size=2)
    computed(blocks, "a", [1, 2, 3])
    computed(blocks, "b", [1, 2, 4])
    shared = blocks.table("b")[0]
    blocks.free("a")
    assert shared not in blocks.free_list
    blocks.free("b")
    assert blocks.free_blocks == 4


def test_the_last_token_is_always_computed_since_its_logits_are_wanted():
    blocks = SharingAllocator(16, block_size=4)
    computed(blocks, "a", [*range(8)])
    assert computed(blocks, "b", [*range(8)]) == 4


def test_a_block_without_kv_is_not_shared():
    blocks = SharingAllocator(16, block_size=4)
    blocks.admit("a", [*range(9)], 9)
    blocks.publish("a", [*range(9)], 7)  # a chunk that ends inside the second block
    assert computed(blocks, "b", [*range(9)]) == 4


def test_the_same_block_after_another_beginning_is_another_block():
    blocks = SharingAllocator(16, block_size=2)
    computed(blocks, "a", [1, 2, 3, 4, 5])
    assert computed(blocks, "b", [9, 9, 3, 4, 5]) == 0
    assert computed(blocks, "c", [3, 4, 5]) == 0


def test_a_free_block_can_be_shared_until_it_is_overwritten():
    blocks = SharingAllocator(4, block_size=2)
    computed(blocks, "a", [1, 2, 3])
    blocks.free("a")
    assert computed(blocks, "b", [1, 2, 3]) == 2
    blocks.free("b")
    computed(blocks, "c", [7] * 8)  # takes the whole pool
    blocks.free("c")
    assert computed(blocks, "d", [1, 2, 3]) == 0


def test_sharing_counts_free_blocks_that_it_takes_back():
    blocks = SharingAllocator(4, block_size=2)
    computed(blocks, "a", [1, 2, 3, 4])
    blocks.free("a")
    blocks.admit("b", [9] * 4, 4)
    # Of the two blocks that are free, one or both hold [1, 2, 3, 4]: five tokens need a third.
    assert blocks.admit("c", [1, 2, 3, 4, 5], 5) is None
    blocks.check()


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (-1, 16), (4, 0), (2.5, 16)])
@pytest.mark.parametrize("kind", ALL)
def test_a_pool_without_blocks_is_refused(kind, num_blocks, block_size):
    with pytest.raises(ValueError, match="must be a positive whole number"):
        kind(num_blocks, block_size)
