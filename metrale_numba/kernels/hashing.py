"""The two hashes of a token prefix, both running token by token, and how they place things in tables.

The *tier key* is FNV-1a over 32-bit tokens: the same everywhere, and easy to collide on purpose. The *check
hash* is a polynomial over the integers modulo 2**64 - 59 whose base is the cache's secret: two different
prefixes of up to n tokens, chosen without it, agree with a chance of at most (n + 2) / 2**64. Being
a polynomial, it takes a whole group of tokens in one step with products that do not wait for each other.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from metrale_numba.kernels.counting import TOKENS_HASHED, TOKENS_KEYED, tally
from metrale_numba.kernels.layout import CHECK_GROUP, NUM_POWERS
from metrale_numba.kernels.memory import dot_16, multiply_add, multiply_high

FNV_BASIS = np.uint64(0xCBF29CE484222325)
FNV_PRIME = np.uint64(0x100000001B3)
# 2**64 is congruent to FOLD modulo the prime, so the upper half of a product folds into the lower.
CHECK_PRIME = np.uint64(2**64 - 59)
FOLD = np.uint64(59)
HALF_WORD = np.uint64(32)
LOW_HALF = np.uint64(0xFFFF_FFFF)
# A polynomial that starts at 0 would ignore leading zero tokens.
CHECK_START = np.uint64(1)


@register_jitable(forceinline=True)
def advance_key(key, tokens, start, stop):
    """Tier key of a prefix with `key`, lengthened by ``tokens[start:stop]``."""
    tally(TOKENS_KEYED, stop - start)
    for position in range(start, stop):
        key = (key ^ np.uint64(tokens[position])) * FNV_PRIME
    return key


@register_jitable(forceinline=True)
def first_key(adapter):
    """Tier key of the empty prefix of an adapter; the base model's is the plain basis."""
    if adapter == np.uint64(0):
        return FNV_BASIS
    return (FNV_BASIS ^ adapter) * FNV_PRIME


@register_jitable(forceinline=True)
def _reduce(high, low):
    """``high * 2**64 + low`` modulo the prime."""
    fold_low = high * FOLD
    carry = multiply_high(high, FOLD)
    low = low + fold_low
    carry = carry + np.uint64(low < fold_low)
    fold_low = carry * FOLD
    low = low + fold_low
    if low < fold_low:
        low = low + FOLD
    if low >= CHECK_PRIME:
        low = low - CHECK_PRIME
    return low


@register_jitable(forceinline=True)
def _multiply(left, right):
    """Product of two residues modulo the prime."""
    return _reduce(multiply_high(left, right), left * right)


@register_jitable(forceinline=True)
def _append(check, power, high, low):
    """``check * power + high * 2**64 + low`` modulo the prime, for a `high` of 36 bits or less."""
    # Less than 2**65 after this, and a product of two residues leaves room for that in 128 bits.
    high, low = multiply_add(np.uint64(0), low, high, FOLD)
    high, low = multiply_add(high, low, check, power)
    return _reduce(high, low)


@register_jitable(forceinline=True)
def advance_group(check, tokens, start, powers):
    """Check hash of a prefix with `check`, lengthened by the CHECK_GROUP tokens from `start` on, a uint64."""
    # Of no use but to be checked in a build with bounds checks.
    _ = tokens[start + np.uint64(CHECK_GROUP - 1)]
    _ = powers[np.uint64(NUM_POWERS - 1)]
    tally(TOKENS_HASHED, CHECK_GROUP)
    high, low = dot_16(tokens, start, powers, np.uint64(CHECK_GROUP + 1))
    return _append(check, powers[np.uint64(CHECK_GROUP)], high, low)


@register_jitable(forceinline=True)
def advance_check(check, tokens, start, stop, powers):
    """Check hash of a prefix with `check`, lengthened by ``tokens[start:stop]``."""
    position = np.uint64(start)
    end = np.uint64(stop)
    while position + np.uint64(CHECK_GROUP) <= end:
        check = advance_group(check, tokens, position, powers)
        position += np.uint64(CHECK_GROUP)
    group = end - position
    tally(TOKENS_HASHED, group)
    if group > np.uint64(0):
        high = np.uint64(0)
        low = np.uint64(0)
        for i in range(group):
            token = np.uint64(tokens[position + np.uint64(i)])
            high, low = multiply_add(high, low, token, powers[group - np.uint64(1) - np.uint64(i)])
        check = _append(check, powers[group], high, low)
    return check


@register_jitable(forceinline=True)
def first_check(adapter, powers):
    """Check hash of the empty prefix of an adapter, taken as two tokens of 32 bits."""
    zero = np.uint64(0)
    check = _append(CHECK_START, powers[1], zero, adapter >> HALF_WORD)
    return _append(check, powers[1], zero, adapter & LOW_HALF)


def fill_powers(base, powers):
    """Write the powers of the base, modulo the prime: see NUM_POWERS."""
    power = np.uint64(1)
    for i in range(CHECK_GROUP + 1):
        powers[i] = power
        if i < CHECK_GROUP:
            powers[NUM_POWERS - 1 - i] = power
        power = _multiply(power, base)


@register_jitable(forceinline=True)
def table_hash(value, multiplier):
    """32 bits that place a 64-bit hash in a table.

    Only finds candidates: forced to a constant, every answer stays the same. The secret odd multiplier
    keeps clients from choosing tokens, and thereby keys, that crowd one place; the second round scatters
    check hashes of siblings that differ in their last token, which are as close to each other as the tokens.
    """
    value = value * multiplier
    return ((value ^ (value >> HALF_WORD)) * multiplier) >> HALF_WORD
