"""The snapshot index: entries in a dense array, found by tier key and check hash, chosen by session and lease.

Every function takes the header of a live index (the caller holds the lock), with room for one entry more
where one may be added. 64-bit ids come in and go out as ``int64`` with the same bits. A number of -1 where
a slot is expected means none.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from metrale_numba.kernels.hashing import advance_check, advance_key, first_check, first_key, table_hash
from metrale_numba.kernels.layout import (
    CHECK_GROUP,
    DEPTH_CLASSES,
    EMPTY_SLOT,
    INDEX_CLOCK,
    INDEX_DEPTH_BITS,
    INDEX_DEPTH_COUNTS,
    INDEX_ENTRIES,
    INDEX_EVICTIONS_SINCE_LOOKUP,
    INDEX_HERMETIC,
    INDEX_LEASED_ADAPTER,
    INDEX_LEASED_SESSION,
    INDEX_LEGACY,
    INDEX_MULTIPLIER,
    INDEX_NUM_RESIDENTS,
    INDEX_POWERS,
    INDEX_RESIDENTS,
    INDEX_ROWS,
    INDEX_SIZE,
    INDEX_TABLE,
    INDEX_TABLE_SIZE,
    INDEX_TAIL_LEASE_TTL,
    INDEX_TAIL_PROTECT,
    NONE,
    SIBLING,
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
from metrale_numba.kernels.tables import add_row, home_slot, next_slot, remove_row, row_of, slot_of

_EMPTY = np.uint64(EMPTY_SLOT)
_HALF_WORD = np.uint64(32)
_ONE = np.uint64(1)
_ALL_BITS = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_WORD_BITS = 64

_SPILLED = np.uint32(SPILLED)
_TAIL = np.uint32(TAIL)
_TAIL_OR_SIBLING = np.uint32(TAIL | SIBLING)


@register_jitable
def _hash_of(index, key):
    return table_hash(key, np.uint64(index[INDEX_MULTIPLIER]))


@register_jitable
def _find(index, key):
    """Row of the entry with a key, or -1."""
    entries = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])
    table = uint64_view(index[INDEX_TABLE], index[INDEX_TABLE_SIZE])
    hash32 = _hash_of(index, key)
    slot = home_slot(hash32, table.size)
    while table[slot] != _EMPTY:
        if table[slot] >> _HALF_WORD == hash32:
            row = row_of(table[slot])
            if entries[row].key == key:
                return row
        slot = next_slot(slot, table.size)
    return np.int64(-1)


@register_jitable
def _count_depth(index, depth, change):
    """Add to, or take from, the number of entries of a depth, and keep its bit."""
    counts = uint32_view(index[INDEX_DEPTH_COUNTS], DEPTH_CLASSES)
    bits = uint64_view(index[INDEX_DEPTH_BITS], DEPTH_CLASSES // _WORD_BITS)
    depth_class = depth % DEPTH_CLASSES
    counts[depth_class] = np.uint32(np.int64(counts[depth_class]) + change)
    mask = _ONE << np.uint64(depth_class % _WORD_BITS)
    word = depth_class // _WORD_BITS
    if counts[depth_class] == np.uint32(0):
        bits[word] = bits[word] & ~mask
    else:
        bits[word] = bits[word] | mask


@register_jitable
def _add_resident(index, entries, row):
    residents = uint32_view(index[INDEX_RESIDENTS], index[INDEX_ROWS])
    place = index[INDEX_NUM_RESIDENTS]
    index[INDEX_NUM_RESIDENTS] = place + 1
    residents[place] = np.uint32(row)
    entries[row].place = np.uint32(place)


@register_jitable
def _remove_resident(index, entries, row):
    residents = uint32_view(index[INDEX_RESIDENTS], index[INDEX_ROWS])
    last = index[INDEX_NUM_RESIDENTS] - 1
    index[INDEX_NUM_RESIDENTS] = last
    place = np.int64(entries[row].place)
    moved = residents[last]
    residents[place] = moved
    entries[np.int64(moved)].place = np.uint32(place)
    entries[row].place = np.uint32(NONE)


@register_jitable
def _remove(index, row):
    """Remove an entry; the last one moves into its place."""
    entries = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])
    table = uint64_view(index[INDEX_TABLE], index[INDEX_TABLE_SIZE])
    if entries[row].flags & _SPILLED == np.uint32(0):
        _remove_resident(index, entries, row)
    _count_depth(index, entries[row].depth, -1)
    remove_row(table, _hash_of(index, entries[row].key), row)
    last = index[INDEX_SIZE] - 1
    index[INDEX_SIZE] = last
    if row != last:
        hash32 = _hash_of(index, entries[last].key)
        table[slot_of(table, hash32, last)] = (hash32 << _HALF_WORD) | np.uint64(row)
        entries[row] = entries[last]
        if entries[row].flags & _SPILLED == np.uint32(0):
            uint32_view(index[INDEX_RESIDENTS], index[INDEX_ROWS])[np.int64(entries[row].place)] = np.uint32(row)


@register_jitable
def _write(index, tokens, adapter, slot, session, flags):
    """Write the resident entry of a prefix, over the one with its key or as the last.

    Returns the slot that the earlier entry gives up (-1 if it was spilled, or holds the slot now given),
    whether the entry is new, whether the earlier one was spilled and so leaves bytes behind, and the key.
    """
    adapter_bits = np.uint64(adapter)
    powers = uint64_view(index[INDEX_POWERS], CHECK_GROUP + 1)
    depth = np.int64(tokens.size)
    key = advance_key(first_key(adapter_bits), tokens, np.int64(0), depth)
    check = advance_check(first_check(adapter_bits, powers), tokens, np.int64(0), depth, powers)
    entries = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])
    row = _find(index, key)
    is_new = row < 0
    displaced = np.int64(-1)
    was_spilled = np.int64(0)
    if is_new:
        row = index[INDEX_SIZE]
        index[INDEX_SIZE] = row + 1
        add_row(uint64_view(index[INDEX_TABLE], index[INDEX_TABLE_SIZE]), _hash_of(index, key), row)
        _add_resident(index, entries, row)
    else:
        _count_depth(index, entries[row].depth, -1)
        if entries[row].flags & _SPILLED != np.uint32(0):
            was_spilled = np.int64(1)
            _add_resident(index, entries, row)
        elif entries[row].slot != slot:
            displaced = entries[row].slot
    _count_depth(index, depth, 1)
    index[INDEX_CLOCK] += 1
    entries[row].key = key
    entries[row].check = check
    entries[row].adapter = adapter_bits
    entries[row].session = np.uint64(session)
    entries[row].slot = slot
    entries[row].depth = depth
    entries[row].stamp = index[INDEX_CLOCK]
    entries[row].flags = np.uint32(flags)
    return displaced, is_new, was_spilled, np.int64(key)


def register(index, tokens, adapter, slot, session, flags):
    """Write a snapshot that is no tail; `flags` is 0 or SIBLING.

    Returns the slot given up, or -1; whether the key's stored bytes are garbage now; and the key.
    """
    displaced, is_new, was_spilled, key = _write(index, tokens, adapter, slot, session, flags)
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
        row = np.int64(0)
        # The entry that moves into a hole is looked at next.
        while row < index[INDEX_SIZE]:
            flags = entries[row].flags
            if flags & _TAIL_OR_SIBLING != np.uint32(0) and entries[row].session == np.uint64(session):
                if flags & _SPILLED != np.uint32(0):
                    keys_out[num_keys] = np.int64(entries[row].key)
                    num_keys += 1
                elif entries[row].slot != slot:
                    slots_out[num_out] = entries[row].slot
                    num_out += 1
                _remove(index, row)
            else:
                row += 1
    displaced, _, was_spilled, key = _write(index, tokens, adapter, slot, session, TAIL)
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
        if entries[row].adapter != np.uint64(adapter):
            row += 1
            continue
        if entries[row].flags & _SPILLED != np.uint32(0):
            keys_out[num_keys] = np.int64(entries[row].key)
            num_keys += 1
        else:
            slots_out[num_slots] = entries[row].slot
            num_slots += 1
        _remove(index, row)
    if index[INDEX_LEASED_ADAPTER] == adapter:
        index[INDEX_LEASED_SESSION] = 0
    return num_slots, num_keys


@register_jitable
def deepest_snapshot(
    index, nodes, links, block_size, root, path, num_blocks, tokens, matched_tokens, session, adapter, record
):
    """The deepest entry on a matched path that the session may use, stamped and, if `record` is not 0, counted.

    `path` holds the rows of the matched full blocks. The nodes keep both hashes at their ends, so only
    the tokens between a block's end and a depth that exists in the index are hashed. Returns the slot, the
    depth, the flags (-1 for no snapshot), the key and the check hash.
    """
    if record != 0 and session != 0:
        index[INDEX_LEASED_SESSION] = session
        index[INDEX_LEASED_ADAPTER] = adapter
        index[INDEX_EVICTIONS_SINCE_LOOKUP] = 0
    index[STAT_LOOKUPS] += record
    entries = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])
    bits = uint64_view(index[INDEX_DEPTH_BITS], DEPTH_CLASSES // _WORD_BITS)
    powers = uint64_view(index[INDEX_POWERS], CHECK_GROUP + 1)
    hermetic = index[INDEX_HERMETIC] != 0
    top = matched_tokens if index[INDEX_SIZE] > 0 else np.int64(-1)
    while top >= 0:
        low = top % _WORD_BITS
        word = bits[(top % DEPTH_CLASSES) // _WORD_BITS] & (_ALL_BITS >> np.uint64(_WORD_BITS - 1 - low))
        bottom = top - low
        while word != np.uint64(0):
            bit = _WORD_BITS - 1 - leading_zeros(word)
            word = word ^ (_ONE << np.uint64(bit))
            depth = bottom + bit
            block = depth // block_size
            node = np.int64(path[block - 1]) if block > 0 else root
            start = block * block_size
            row = _find(index, advance_key(links[node].key, tokens, start, depth))
            if row < 0 or entries[row].depth != depth:
                continue
            if (hermetic or entries[row].flags & _TAIL != np.uint32(0)) and (
                session == 0 or entries[row].session != np.uint64(session)
            ):
                continue
            if entries[row].check != advance_check(nodes[node].state, tokens, start, depth, powers):
                continue
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
        top = bottom - 1
    index[STAT_RECOMPUTE_TOKENS_ON_MISS] += record * matched_tokens
    nothing = np.int64(-1)
    return nothing, nothing, nothing, nothing, nothing


@register_jitable
def _is_leased(index, entries, row):
    """Whether the lease passes an entry over, given that the lease holds."""
    return entries[row].flags & _TAIL_OR_SIBLING != np.uint32(0) and entries[row].session == np.uint64(
        index[INDEX_LEASED_SESSION]
    )


@register_jitable
def _norm(value, least, greatest):
    """Min-max norm of a number among others, 0 where all are equal."""
    if greatest == least:
        return np.float64(0.0)
    return np.float64(value - least) / np.float64(greatest - least)


@register_jitable
def _newest_by_session(index, entries, residents, size):
    """For each resident, by place, the newest stamp of its session."""
    places = np.full(2 * size, np.int64(-1))
    newest = np.empty(size, np.int64)
    group = np.empty(size, np.int64)
    multiplier = np.uint64(index[INDEX_MULTIPLIER])
    for i in range(size):
        row = np.int64(residents[i])
        slot = home_slot(table_hash(entries[row].session, multiplier), places.size)
        while places[slot] >= 0 and entries[np.int64(residents[places[slot]])].session != entries[row].session:
            slot = next_slot(slot, places.size)
        if places[slot] < 0:
            places[slot] = i
            newest[i] = entries[row].stamp
        first = places[slot]
        group[i] = first
        newest[first] = max(newest[first], entries[row].stamp)
    for i in range(size):
        newest[i] = newest[group[i]]
    return newest


@register_jitable
def _victim(index, alpha):
    """Row of the resident entry to go next, at least one being resident."""
    entries = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])
    residents = uint32_view(index[INDEX_RESIDENTS], index[INDEX_ROWS])
    size = index[INDEX_NUM_RESIDENTS]
    first = np.int64(residents[0])
    least_stamp = entries[first].stamp
    greatest_stamp = least_stamp
    least_depth = entries[first].depth
    greatest_depth = least_depth
    num_leased = np.int64(0)
    leasing = (
        index[INDEX_LEASED_SESSION] != 0
        and index[INDEX_TAIL_PROTECT] != 0
        and index[INDEX_EVICTIONS_SINCE_LOOKUP] < index[INDEX_TAIL_LEASE_TTL]
    )
    for i in range(size):
        row = np.int64(residents[i])
        least_stamp = min(least_stamp, entries[row].stamp)
        greatest_stamp = max(greatest_stamp, entries[row].stamp)
        least_depth = min(least_depth, entries[row].depth)
        greatest_depth = max(greatest_depth, entries[row].depth)
        if leasing and _is_leased(index, entries, row):
            num_leased += 1
    passing_over = leasing and num_leased < size
    newest = _newest_by_session(index, entries, residents, size)
    victim = np.int64(-1)
    stalest = np.int64(0)
    least_score = np.float64(0.0)
    for i in range(size):
        row = np.int64(residents[i])
        if passing_over and _is_leased(index, entries, row):
            continue
        if victim >= 0 and newest[i] > stalest:
            continue
        score = _norm(entries[row].stamp, least_stamp, greatest_stamp) + alpha * _norm(
            entries[row].depth, least_depth, greatest_depth
        )
        if victim < 0 or newest[i] < stalest or score < least_score or (score == least_score and row < victim):
            victim = row
            stalest = newest[i]
            least_score = score
    return victim


@register_jitable
def _oldest(index):
    """Row of the resident entry with the smallest stamp, at least one being resident."""
    entries = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])
    residents = uint32_view(index[INDEX_RESIDENTS], index[INDEX_ROWS])
    oldest = np.int64(residents[0])
    for i in range(1, index[INDEX_NUM_RESIDENTS]):
        row = np.int64(residents[i])
        if entries[row].stamp < entries[oldest].stamp:
            oldest = row
    return oldest


def evict_lru(index, alpha):
    """Remove the victim, in legacy mode the oldest resident, and return its slot, or -1."""
    if index[INDEX_NUM_RESIDENTS] == 0:
        return np.int64(-1)
    if index[INDEX_LEGACY] != 0:
        row = _oldest(index)
    else:
        row = _victim(index, alpha)
        index[INDEX_EVICTIONS_SINCE_LOOKUP] += 1
    slot = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])[row].slot
    _remove(index, row)
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
    row = _victim(index, alpha)
    index[INDEX_EVICTIONS_SINCE_LOOKUP] += 1
    slot = entries[row].slot
    depth = entries[row].depth
    key = np.int64(entries[row].key)
    check = np.int64(entries[row].check)
    if depth < min_tokens:
        _remove(index, row)
        index[STAT_EVICTIONS] += 1
        return slot, zero, depth, key, check
    _remove_resident(index, entries, row)
    entries[row].flags |= _SPILLED
    index[STAT_TIER_SPILLS] += 1
    return slot, np.int64(1), depth, key, check


def promote(index, key, slot, has_check, check):
    """Make the spilled entry with a key resident in `slot`, unless its check hash differs. Returns 1 or 0."""
    row = _find(index, np.uint64(key))
    if row < 0:
        return 0
    entries = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])
    if entries[row].flags & _SPILLED == np.uint32(0) or (has_check != 0 and entries[row].check != np.uint64(check)):
        return 0
    entries[row].flags ^= _SPILLED
    entries[row].slot = slot
    _add_resident(index, entries, row)
    index[STAT_TIER_FAULT_INS] += 1
    return 1


def forget(index, key):
    """Remove the spilled entry with a key. Returns 1 or 0."""
    row = _find(index, np.uint64(key))
    if row < 0 or entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])[row].flags & _SPILLED == np.uint32(0):
        return 0
    _remove(index, row)
    index[STAT_TIER_REAPS] += 1
    return 1


def evict_slot(index, slot):
    """Remove the first resident entry that holds a slot. Returns 1 or 0."""
    entries = entry_view(index[INDEX_ENTRIES], index[INDEX_ROWS])
    residents = uint32_view(index[INDEX_RESIDENTS], index[INDEX_ROWS])
    found = np.int64(-1)
    for i in range(index[INDEX_NUM_RESIDENTS]):
        row = np.int64(residents[i])
        if entries[row].slot == slot and (found < 0 or row < found):
            found = row
    if found < 0:
        return 0
    _remove(index, found)
    index[STAT_EVICTIONS] += 1
    return 1
