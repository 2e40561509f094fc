"""What an engine keeps beside the index: pools of blocks and slots, tiers for snapshots, sequences.

:class:`ServingCache` binds them together, so that a serving loop needs no books of its own.
"""

from metrale_numba.serving.block_pool import BlockPool, OutOfBlocks, OutOfSlots, SnapshotPool
from metrale_numba.serving.directory_tier import DirectoryTier
from metrale_numba.serving.mover import SnapshotMover
from metrale_numba.serving.redis_tier import RedisTier
from metrale_numba.serving.sequence import Sequence, SequenceEnded
from metrale_numba.serving.serving_cache import ServingCache
from metrale_numba.serving.serving_stats import ServingStats
from metrale_numba.serving.tier import MemoryTier, StoreKey, TierError, TierStore

__all__ = [
    "BlockPool",
    "DirectoryTier",
    "MemoryTier",
    "OutOfBlocks",
    "OutOfSlots",
    "RedisTier",
    "Sequence",
    "SequenceEnded",
    "ServingCache",
    "ServingStats",
    "SnapshotMover",
    "SnapshotPool",
    "StoreKey",
    "TierError",
    "TierStore",
]
