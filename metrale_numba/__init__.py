"""metrale_numba: the prefix cache of an LLM serving engine, in flat NumPy arrays driven by Numba kernels.

Importing the package loads no kernel and compiles nothing.
"""

from metrale_numba.errors import CacheFileError, IntegrityError, MetraleError, RefcountError
from metrale_numba.explain import (
    EvictedPrefix,
    Explanation,
    LostSnapshotInfo,
    PassedSnapshot,
    SnapshotExplanation,
)
from metrale_numba.identity import adapter_key, placeholder_tokens, session_hash
from metrale_numba.interface import (
    NONE,
    Cleared,
    Drop,
    EvictedBlocks,
    InsertAcquired,
    PrefixCache,
    PrefixMatch,
    SnapshotStats,
    Spill,
    StatsDetail,
    TierEvict,
)
from metrale_numba.kernels.compile import warmup
from metrale_numba.metrics import (
    cache_hit_count,
    cache_hit_tokens_total,
    cache_miss_count,
    record_cache_hit,
    record_cache_miss,
)
from metrale_numba.no_caching import NoPrefixCaching
from metrale_numba.nodes import NodeInfo
from metrale_numba.pins import Pin
from metrale_numba.radix_tree import RadixTree

__all__ = [
    "NONE",
    "CacheFileError",
    "Cleared",
    "Drop",
    "EvictedBlocks",
    "EvictedPrefix",
    "Explanation",
    "InsertAcquired",
    "IntegrityError",
    "LostSnapshotInfo",
    "MetraleError",
    "NoPrefixCaching",
    "NodeInfo",
    "PassedSnapshot",
    "Pin",
    "PrefixCache",
    "PrefixMatch",
    "RadixTree",
    "RefcountError",
    "SnapshotExplanation",
    "SnapshotStats",
    "Spill",
    "StatsDetail",
    "TierEvict",
    "__version__",
    "adapter_key",
    "cache_hit_count",
    "cache_hit_tokens_total",
    "cache_miss_count",
    "placeholder_tokens",
    "record_cache_hit",
    "record_cache_miss",
    "session_hash",
    "warmup",
]

__version__ = "0.1.0"
