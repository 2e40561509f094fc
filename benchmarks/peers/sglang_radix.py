"""SGLang's radix cache in Python."""

from __future__ import annotations

from typing import Any

# First, for it makes SGLang importable.
from benchmarks.peers.sglang_tree import SGLangTree  # isort: split

from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache


class SGLangRadix(SGLangTree):
    """``RadixCache``."""

    calls = f"RadixCache: {SGLangTree.calls}"

    def _new_cache(self, **parameters: Any) -> Any:
        return RadixCache(CacheInitParams(**parameters))
