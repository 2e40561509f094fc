"""What a cache can be told when it is built, by keyword or by environment variable.

It relies on :mod:`metrale_numba.arguments` for the wording of refusals. A wrong keyword is refused; a wrong variable
is logged as an error and passed over, so that a typing mistake in a deployment does not keep an engine from starting.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np

from metrale_numba.arguments import MAX_INT64, as_block_size, as_bool, as_count, as_u64, shown

__all__ = [
    "DEFAULT_BLOCK_SIZE",
    "MAX_EVICT_ALPHA",
    "MAX_GHOSTS",
    "MAX_RESERVE",
    "Settings",
    "as_ghosts",
    "as_quotas",
    "as_reserve",
    "resolve",
]

DEFAULT_BLOCK_SIZE: Final = 16
"""Tokens per block where neither the call nor the constructor says."""

MAX_EVICT_ALPHA: Final = 8.0
"""The greatest weight that depth can have against age when a snapshot is chosen for eviction."""

MAX_RESERVE: Final = 2**31
"""The greatest number of blocks that can be reserved; the rows of a cache are numbered in 32 bits."""

MAX_GHOSTS: Final = 2**31
"""The greatest number of evictions that can be remembered; ghosts are numbered in 32 bits, too."""

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one cache, resolved and valid. Made by ``resolve``.

    Attributes
    ----------
    partial_tail_sharing : bool
        Whether a look-up may end inside a block. The block is lent while its owner may still write to it, so the
        borrower must copy it before it writes.
    tail_protect : bool
        Whether the tail and sibling of the session that looked up last are passed over by snapshot eviction.
    tail_lease_ttl : int
        For how many snapshot evictions after that look-up.
    evict_alpha : float
        How much depth counts against age when a snapshot is chosen for eviction, 0..8.
    evict_legacy : bool
        Whether the oldest snapshot is evicted, whatever its session and depth.
    hermetic : bool
        Whether every snapshot, and not only a tail, is found by its own session alone.
    adopt_blocks : bool
        Whether an insert exchanges the block of a chunk that is cached already for the sequence's own.
    block_size : int
        Tokens per block where a call does not say.
    check_secret : bytes or None
        What the key of the check hash is derived from, so that replicas agree; None for a random key.
    strict : bool
        Whether a release that no sequence is entitled to is refused instead of counted.
    max_pinned_blocks : int or None
        Full blocks that all pins together may hold; None for any number.
    reserve : int
        Blocks of the default block size for which memory is taken when the cache is made.
    ghosts : int
        Evictions that are remembered for :meth:`~metrale_numba.RadixTree.explain`.
    """

    partial_tail_sharing: bool = False
    tail_protect: bool = True
    tail_lease_ttl: int = 64
    evict_alpha: float = 0.0
    evict_legacy: bool = False
    hermetic: bool = False
    adopt_blocks: bool = False
    block_size: int = DEFAULT_BLOCK_SIZE
    check_secret: bytes | None = field(default=None, repr=False)
    strict: bool = False
    max_pinned_blocks: int | None = None
    reserve: int = 0
    ghosts: int = 0


_DEFAULTS: Final = Settings()


def resolve(
    *,
    partial_tail_sharing: bool | None = None,
    tail_protect: bool | None = None,
    tail_lease_ttl: int | None = None,
    evict_alpha: float | None = None,
    evict_legacy: bool | None = None,
    hermetic: bool | None = None,
    adopt_blocks: bool | None = None,
    block_size: int | None = None,
    check_secret: bytes | None = None,
    strict: bool = False,
    max_pinned_blocks: int | None = None,
    reserve: int = 0,
    ghosts: int = 0,
) -> Settings:
    """Settle every setting: the keyword if it is given, else the variable if it is set, else the default.

    The environment is read now, and only for keywords that are None. Changes nothing; a variable that does not
    parse, is negative or is NaN is logged as an error.

    Parameters
    ----------
    partial_tail_sharing : bool, optional
        Else ``METRALE_PREFIX_SUBBLOCK``, else off.
    tail_protect : bool, optional
        Else off if ``METRALE_DISABLE_SSM_TAIL_PROTECT`` is ``1``, ``on`` or ``true``, else on.
    tail_lease_ttl : int, optional
        Evictions, at least 0. Else ``METRALE_SSM_TAIL_LEASE_TTL``, else 64.
    evict_alpha : float, optional
        0..8. Else ``METRALE_SNAP_EVICT_ALPHA``, where more than 8 counts as 8, else 0.
    evict_legacy : bool, optional
        Else on if ``METRALE_SNAP_EVICT_LEGACY`` is set to anything at all, else off.
    hermetic : bool, optional
        Else ``METRALE_HERMETIC``, else off.
    adopt_blocks : bool, optional
        Else ``METRALE_ADOPT_BLOCKS``, else off.
    block_size : int, optional
        Tokens, at least 1. Else 16.
    check_secret : bytes, optional
        Else the key is random.
    strict : bool, default False
        No variable.
    max_pinned_blocks : int, optional
        Blocks, at least 0. No variable; else any number.
    reserve : int, default 0
        Blocks, 0..MAX_RESERVE. No variable.
    ghosts : int, default 0
        Evictions, 0..MAX_GHOSTS. No variable.

    Returns
    -------
    Settings
        Valid, every field set.

    Raises
    ------
    TypeError
        If a keyword is of the wrong type.
    ValueError
        If a keyword is out of range.
    """
    return Settings(
        partial_tail_sharing=_settle(
            partial_tail_sharing, as_bool, "partial_tail_sharing", lambda: _switch("METRALE_PREFIX_SUBBLOCK")
        ),
        tail_protect=_settle(tail_protect, as_bool, "tail_protect", _tail_protect_variable),
        tail_lease_ttl=_settle(tail_lease_ttl, as_count, "tail_lease_ttl", _tail_lease_ttl_variable),
        evict_alpha=_settle(evict_alpha, _alpha, "evict_alpha", _evict_alpha_variable),
        evict_legacy=_settle(
            evict_legacy, as_bool, "evict_legacy", lambda: os.environ.get("METRALE_SNAP_EVICT_LEGACY") is not None
        ),
        hermetic=_settle(hermetic, as_bool, "hermetic", lambda: _switch("METRALE_HERMETIC")),
        adopt_blocks=_settle(adopt_blocks, as_bool, "adopt_blocks", lambda: _switch("METRALE_ADOPT_BLOCKS")),
        block_size=as_block_size(block_size, DEFAULT_BLOCK_SIZE),
        check_secret=_secret(check_secret),
        strict=as_bool(strict, "strict"),
        max_pinned_blocks=None if max_pinned_blocks is None else as_count(max_pinned_blocks, "max_pinned_blocks"),
        reserve=as_reserve(reserve),
        ghosts=as_ghosts(ghosts),
    )


def _settle(keyword: object, check: Callable[[object, str], _T], name: str, variable: Callable[[], _T]) -> _T:
    return variable() if keyword is None else check(keyword, name)


def _alpha(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number, not {shown(value)} ({type(value).__name__})")
    # Written so that NaN, which is on neither side of anything, is refused too.
    if not 0 <= value <= MAX_EVICT_ALPHA:
        raise ValueError(f"{name} is {shown(value)}, outside 0..{MAX_EVICT_ALPHA:g}")
    return float(value)


def _secret(value: object) -> bytes | None:
    # The value is left out of the message: it is a secret of the right kind in the wrong type.
    if value is not None and not isinstance(value, bytes):
        raise TypeError(f"check_secret must be bytes, not {type(value).__name__}")
    return value


def _switch(variable: str) -> bool:
    text = os.environ.get(variable, "")
    if text not in ("", "0", "1"):
        _logger.error("%s is %r, but must be 0 or 1; it counts as 0", variable, text)
    return text == "1"


def _tail_protect_variable() -> bool:
    return os.environ.get("METRALE_DISABLE_SSM_TAIL_PROTECT") not in ("1", "on", "true")


def _tail_lease_ttl_variable() -> int:
    def parse(text: str) -> int:
        ttl = int(text)
        if not 0 <= ttl <= MAX_INT64:
            raise ValueError(text)
        return ttl

    return _number("METRALE_SSM_TAIL_LEASE_TTL", parse, "a whole number from 0 on", _DEFAULTS.tail_lease_ttl)


def _evict_alpha_variable() -> float:
    def parse(text: str) -> float:
        alpha = float(text)
        if not alpha >= 0:
            raise ValueError(text)
        return min(alpha, MAX_EVICT_ALPHA)

    return _number("METRALE_SNAP_EVICT_ALPHA", parse, "a number from 0 on", _DEFAULTS.evict_alpha)


def _number(variable: str, parse: Callable[[str], _T], wanted: str, default: _T) -> _T:
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        return parse(text)
    except ValueError:
        _logger.error("%s is %r, but must be %s; the default, %s, holds", variable, text, wanted, default)
        return default


def as_reserve(value: object) -> int:
    """Give a number of blocks to reserve as an int, 0..MAX_RESERVE.

    Raises
    ------
    TypeError
        If `value` is not an integer.
    ValueError
        If it is out of range.
    """
    return as_count(value, "reserve", MAX_RESERVE)


def as_ghosts(value: object) -> int:
    """Give a number of evictions to remember as an int, 0..MAX_GHOSTS.

    Raises
    ------
    TypeError
        If `value` is not an integer.
    ValueError
        If it is out of range.
    """
    return as_count(value, "ghosts", MAX_GHOSTS)


def as_quotas(quotas: object) -> dict[int, int]:
    """Give the quotas by adapter as a dict of our own; None stands for none.

    Raises
    ------
    TypeError
        If `quotas` is neither None nor a mapping of int to int.
    ValueError
        If an adapter or a number of blocks is out of range.
    """
    if quotas is None:
        return {}
    if not isinstance(quotas, Mapping):
        raise TypeError(f"quotas must be a mapping of adapter ids to blocks, not {shown(quotas)}")
    return {
        as_u64(adapter_id, "quotas' adapter_id"): as_count(blocks, f"quotas[{adapter_id}]")
        for adapter_id, blocks in quotas.items()
    }
