"""SGLang's unified cache on its Rust core, set up for full attention alone."""

from __future__ import annotations

from typing import Any

# First, for it makes SGLang importable.
from benchmarks.peers.sglang_tree import SGLangTree  # isort: split

from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


class SGLangUnified(SGLangTree):
    """``UnifiedRadixCache`` with ``tree_core_backend="rust"``."""

    calls = f"UnifiedRadixCache, tree_core_backend='rust': {SGLangTree.calls}"

    def _new_cache(self, **parameters: Any) -> Any:
        return UnifiedRadixCache(
            CacheInitParams(tree_components=(ComponentType.FULL,), tree_core_backend="rust", **parameters)
        )
