"""The snapshot index: registering, finding the deepest usable entry of a path, evicting, and the tiers.

Every function takes the header of a live index (the caller holds the lock), with room for one entry more
where one may be added. 64-bit ids come in and go out as ``int64`` with the same bits. A number of -1 where
a slot is expected means none.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from metrale_numba.kernels.counting import ENTRIES_LOOKED_AT, NODES_CLIMBED, tally
from metrale_numba.kernels.entries import (
    WORD_BITS,
    add_resident,
    find_key,
    find_of_session,
    find_usable,
    offsets_of,
    remove_entry,
    remove_resident,
    write_entry,
)
from metrale_numba.kernels.hashing import advance_check
from metrale_numba.kernels.layout import (
    DEPTH_CLASSES,
    HAS_SNAPSHOTS,
    INDEX_CLOCK,
    INDEX_DEPTH_BITS,
    INDEX_ENTRIES,
    INDEX_EVICTIONS_SINCE_LOOKUP,
    INDEX_HERMETIC,
    INDEX_LEASED_ADAPTER,
    INDEX_LEASED_SESSION,
    INDEX_LEGACY,
    INDEX_NUM_RESIDENTS,
    INDEX_POWERS,
    INDEX_RESIDENTS,
    INDEX_ROWS,
    INDEX_SIZE,
    NUM_POWERS,
    SPILLED,
    STAT_ANCHOR_DEPTH_SUM,
    STAT_EVICTIONS,
    STAT_HITS,
    STAT_LOOKUPS,
    STAT_RECOMPUTE_TOKENS_ON_HIT,
    STAT_RECOMPUTE_TOKENS_ON_MISS,
    STAT_SAVES,
    STAT_TIER_FAULT_INS,
    STAT_TIER_HITS,
    STAT_TIER_REAPS,
    STAT_TIER_SPILLS,
    TAIL,
)
from metrale_numba.kernels.memory import entry_view, leading_zeros, uint32_view, uint64_view
from metrale_numba.kernels.victims import oldest, victim

_ONE = np.uint64(1)
_ALL_BITS = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_SPILLED = np.uint32(SPILLED)


def register(index, tokens, adapter, slot, session, flags):
    """Write a snapshot that is no tail; `flags` is 0 or SIBLING.

    Returns the slot given up, or -1; whether the key's stored bytes are garbage now; and the key.
    """
    displaced, is_new, was_spilled, key = write_entry(index, tokens, adapter, slot, session, flags)
    if is_new:
        index[STAT_SAVES] += 1
    return displaced, was_spilled, key


def register_tail(index, tokens, adapter, slot, session, slots_out, keys_out):
    """Write a session's tail in place of its earlier tail and siblings.

    `slots_out` and `keys_out` have room for one more than there are entries. Returns how many slots were given
    up, and how many keys have stored bytes that are garbage now.
    """
    num_out = np.int64(0)
    num_keys = np.int64(0)
    if session != 0:
        entries = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])
        # In the order of rows: the entry that moves into a hole is met there next.
        row = find_of_session(index, session)
        while row >= 0:
            if entries[row].flags & _SPILLED != np.uint32(0):
                keys_out[num_keys] = np.int64(entries[row].key)
                num_keys += 1
            elif entries[row].slot != slot:
                slots_out[num_out] = entries[row].slot
                num_out += 1
            remove_entry(index, row)
            row = find_of_session(index, session)
    displaced, _, was_spilled, key = write_entry(index, tokens, adapter, slot, session, TAIL)
    if displaced >= 0:
        slots_out[num_out] = displaced
        num_out += 1
    if was_spilled != 0:
        keys_out[num_keys] = key
        num_keys += 1
    return num_out, num_keys


def drop_adapter(index, adapter, slots_out, keys_out):
    """Remove every entry of an adapter; a lease that a look-up under it took ends.

    Both arrays have room for one more than there are entries. Returns the numbers of slots and of spilled keys.
    """
    num_slots = np.int64(0)
    num_keys = np.int64(0)
    entries = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])
    row = np.int64(0)
    while row < index[INDEX_SIZE]:
        tally(ENTRIES_LOOKED_AT, 1)
        if entries[row].adapter != np.uint64(adapter):
            row += 1
            continue
        if entries[row].flags & _SPILLED != np.uint32(0):
            keys_out[num_keys] = np.int64(entries[row].key)
            num_keys += 1
        else:
            slots_out[num_slots] = entries[row].slot
            num_slots += 1
        remove_entry(index, row)
    if index[INDEX_LEASED_ADAPTER] == adapter:
        index[INDEX_LEASED_SESSION] = 0
    return num_slots, num_keys


@register_jitable
def begin_lookup(index, session, adapter, record):
    """Count a look-up that matched something, and let its session take the lease."""
    if record != 0 and session != 0:
        index[INDEX_LEASED_SESSION] = session
        index[INDEX_LEASED_ADAPTER] = adapter
        index[INDEX_EVICTIONS_SINCE_LOOKUP] = 0
    index[STAT_LOOKUPS] += record


@register_jitable
def deepest_by_marks(index, nodes, block_size, row, level, tokens, matched_tokens, session):
    """Row of the deepest entry that a session may use, or -1, on the path up from the node `row`, `level` blocks deep.

    No node deeper on the matched path bears a mark. Nodes keep the check hash at their ends, so only the tokens from
    there to an offset that the node's floor names are hashed.
    """
    powers = uint64_view(index[INDEX_POWERS], NUM_POWERS)
    hermetic = index[INDEX_HERMETIC] != 0
    while True:
        if nodes[row].children & np.uint32(HAS_SNAPSHOTS) != np.uint32(0):
            state = nodes[row].state
            start = level * block_size
            offsets = offsets_of(index, state)
            # A block has at most as many tokens as there are bits; no offset beyond what was matched is of use.
            room = min(matched_tokens - start, np.int64(WORD_BITS - 1))
            offsets = offsets & (_ALL_BITS >> np.uint64(WORD_BITS - 1 - room))
            while offsets != np.uint64(0):
                offset = WORD_BITS - 1 - leading_zeros(offsets)
                offsets = offsets ^ (_ONE << np.uint64(offset))
                depth = start + offset
                entry = find_usable(index, advance_check(state, tokens, start, depth, powers), depth, session, hermetic)
                if entry >= 0:
                    return entry
        if level == 0:
            return np.int64(-1)
        row = np.int64(nodes[row].parent)
        level -= 1
        tally(NODES_CLIMBED, 1)


@register_jitable
def deepest_by_depths(index, nodes, block_size, node, level, tokens, matched_tokens, session):
    """The same on a path whose nodes bear no marks: its block size is not the index's grid.

    `node` is the deepest matched node, `level` blocks deep. Tries every depth that some entry of the index has.
    """
    if index[INDEX_SIZE] == 0:
        return np.int64(-1)
    bits = uint64_view(index[INDEX_DEPTH_BITS], DEPTH_CLASSES // WORD_BITS)
    powers = uint64_view(index[INDEX_POWERS], NUM_POWERS)
    hermetic = index[INDEX_HERMETIC] != 0
    top = matched_tokens
    while top >= 0:
        low = top % WORD_BITS
        word = bits[(top % DEPTH_CLASSES) // WORD_BITS] & (_ALL_BITS >> np.uint64(WORD_BITS - 1 - low))
        bottom = top - low
        while word != np.uint64(0):
            bit = WORD_BITS - 1 - leading_zeros(word)
            word = word ^ (_ONE << np.uint64(bit))
            depth = bottom + bit
            while level > depth // block_size:
                tally(NODES_CLIMBED, 1)
                node = np.int64(nodes[node].parent)
                level -= 1
            check = advance_check(nodes[node].state, tokens, level * block_size, depth, powers)
            entry = find_usable(index, check, depth, session, hermetic)
            if entry >= 0:
                return entry
        top = bottom - 1
    return np.int64(-1)


@register_jitable
def use_entry(index, row, matched_tokens, record):
    """Stamp the entry that a look-up found, if any, and, if `record` is not 0, count it.

    Returns the slot, the depth, the flags (-1 for no snapshot), the key and the check hash.
    """
    if row < 0:
        index[STAT_RECOMPUTE_TOKENS_ON_MISS] += record * matched_tokens
        nothing = np.int64(-1)
        return nothing, nothing, nothing, nothing, nothing
    entries = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])
    depth = entries[row].depth
    index[INDEX_CLOCK] += 1
    entries[row].stamp = index[INDEX_CLOCK]
    index[STAT_HITS] += record
    index[STAT_ANCHOR_DEPTH_SUM] += record * depth
    index[STAT_RECOMPUTE_TOKENS_ON_HIT] += record * (matched_tokens - depth)
    if entries[row].flags & _SPILLED != np.uint32(0):
        index[STAT_TIER_HITS] += record
    return (
        entries[row].slot,
        depth,
        np.int64(entries[row].flags),
        np.int64(entries[row].key),
        np.int64(entries[row].check),
    )


def evict_lru(index, alpha):
    """Remove the victim, in legacy mode the oldest resident, and return its slot, or -1."""
    if index[INDEX_NUM_RESIDENTS] == 0:
        return np.int64(-1)
    if index[INDEX_LEGACY] != 0:
        row = oldest(index)
    else:
        row = victim(index, alpha)
        index[INDEX_EVICTIONS_SINCE_LOOKUP] += 1
    slot = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])[row].slot
    remove_entry(index, row)
    index[STAT_EVICTIONS] += 1
    return slot


def evict_to_tier(index, min_tokens, alpha):
    """Remove the victim if it is shallower than `min_tokens`, or else mark it spilled.

    Returns its slot (-1 if nothing is resident), whether it was spilled, its depth, key and check hash.
    """
    zero = np.int64(0)
    if index[INDEX_NUM_RESIDENTS] == 0:
        return np.int64(-1), zero, zero, zero, zero
    entries = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])
    row = victim(index, alpha)
    index[INDEX_EVICTIONS_SINCE_LOOKUP] += 1
    slot = entries[row].slot
    depth = entries[row].depth
    key = np.int64(entries[row].key)
    check = np.int64(entries[row].check)
    if depth < min_tokens:
        remove_entry(index, row)
        index[STAT_EVICTIONS] += 1
        return slot, zero, depth, key, check
    remove_resident(index, entries, row)
    entries[row].flags |= _SPILLED
    index[STAT_TIER_SPILLS] += 1
    return slot, np.int64(1), depth, key, check


def promote(index, key, slot, has_check, check):
    """Make the spilled entry with a key resident in `slot`, unless its check hash differs. Returns 1 or 0."""
    row = find_key(index, np.uint64(key))
    if row < 0:
        return 0
    entries = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])
    if entries[row].flags & _SPILLED == np.uint32(0) or (has_check != 0 and entries[row].check != np.uint64(check)):
        return 0
    entries[row].flags ^= _SPILLED
    entries[row].slot = slot
    add_resident(index, entries, row)
    index[STAT_TIER_FAULT_INS] += 1
    return 1


def forget(index, key):
    """Remove the spilled entry with a key. Returns 1 or 0."""
    row = find_key(index, np.uint64(key))
    if row < 0 or entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])[row].flags & _SPILLED == np.uint32(0):
        return 0
    remove_entry(index, row)
    index[STAT_TIER_REAPS] += 1
    return 1


def evict_slot(index, slot):
    """Remove the first resident entry that holds a slot. Returns 1 or 0."""
    entries = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])
    residents = uint32_view(index[INDEX_RESIDENTS], index[INDEX_ROWS])
    found = np.int64(-1)
    for i in range(index[INDEX_NUM_RESIDENTS]):
        tally(ENTRIES_LOOKED_AT, 1)
        row = np.int64(residents[i])
        if entries[row].slot == slot and (found < 0 or row < found):
            found = row
    if found < 0:
        return 0
    remove_entry(index, found)
    index[STAT_EVICTIONS] += 1
    return 1
