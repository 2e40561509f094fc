"""What operators see of serving caches, in the form that Prometheus reads.

Counters are read when they are asked for and at no other time, so no request pays for them. Needs the package
``prometheus-client`` (``pip install 'metrale-numba[metrics]'``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from metrale_numba.arguments import as_text
from metrale_numba.serving.serving_cache import ServingCache
from metrale_numba.serving.serving_stats import ServingStats

try:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector as _Collector
except ImportError as error:
    raise ImportError(
        "metrale_numba.serving.prometheus needs prometheus-client: pip install 'metrale-numba[metrics]'"
    ) from error

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["Collector"]

_logger = logging.getLogger(__name__)

_COUNTERS: Final[dict[str, tuple[str, str]]] = {
    "requests": ("requests", "Requests that got their blocks, each counted once"),
    "prefix_cache_queries": ("queried_tokens", "Tokens of prompts that were looked up"),
    "prefix_cache_hits": ("hit_tokens", "Tokens of prompts whose KV was in the cache"),
    "recompute_tokens": ("recompute_tokens", "Hit tokens behind the snapshot used, whose state is computed again"),
    "snapshot_hits": ("snapshot_hits", "Sequences that began with a snapshot"),
    "evicted_blocks": ("evicted_blocks", "Blocks that the cache gave up to make room"),
    "snapshot_spills": ("spills", "Snapshots that gave up their slots to the tier"),
    "snapshot_clean_spills": ("clean_spills", "Of these, snapshots that the tier had already"),
    "snapshot_fault_ins": ("fault_ins", "Snapshots that came back from the tier"),
    "snapshot_lost_writes": ("lost_writes", "Spilled snapshots that the tier did not take"),
    "tier_misses": ("tier_misses", "Snapshots that the tier no longer had"),
    "tier_errors": ("tier_errors", "Calls of the tier that failed"),
}
_GAUGES: Final[dict[str, tuple[str, str]]] = {
    "running_sequences": ("running", "Sequences that have not ended"),
    "blocks": ("blocks", "KV blocks there are"),
    "free_blocks": ("free_blocks", "KV blocks that nothing refers to"),
    "evictable_blocks": ("evictable_blocks", "KV blocks that could be evicted now"),
    "cached_blocks": ("cached_blocks", "Full KV blocks that the cache stores"),
    "most_used_blocks": ("most_blocks", "The most KV blocks that were ever in use"),
    "snapshot_slots": ("slots", "Snapshot slots there are"),
    "free_snapshot_slots": ("free_slots", "Snapshot slots that nothing refers to"),
    "snapshots": ("snapshots", "Snapshots in the index, spilled ones included"),
}


class Collector(_Collector):
    """Shows serving caches to a Prometheus registry.

    ``REGISTRY.register(Collector(main=serving))`` shows one serving cache under the label ``cache="main"``. Names begin
    with ``metrale:``, and counters end in ``_total`` as Prometheus has it: ``metrale:prefix_cache_queries_total`` and
    ``metrale:prefix_cache_hits_total`` count tokens, as vLLM's do. A request that is begun again is counted once. One
    collector shows any number of serving caches; a registry takes one collector.

    Parameters
    ----------
    **caches : ServingCache
        The serving caches, by the value of their label.

    Raises
    ------
    TypeError
        If one of them is none, or there are none.
    """

    def __init__(self, **caches: ServingCache) -> None:
        if not caches:
            raise TypeError("a Collector needs at least one serving cache, as Collector(main=serving)")
        for name, cache in caches.items():
            if not isinstance(cache, ServingCache):
                raise TypeError(f"{as_text(name, 'name')} must be a ServingCache, not {type(cache).__name__}")
        self._caches: Mapping[str, ServingCache] = caches

    def describe(self) -> Iterator[Metric]:
        """Name the metrics without reading any, for the registry to find names that are taken.

        Returns
        -------
        iterator of Metric
            Families without samples.
        """
        return self._families({}, {})

    def collect(self) -> Iterator[Metric]:
        """Read every counter now.

        Returns
        -------
        iterator of Metric
            A sample for each serving cache. The bytes of a tier that fails to say so are left out.
        """
        stats = {name: cache.stats() for name, cache in self._caches.items()}
        tier_bytes = {}
        for name, cache in self._caches.items():
            if cache.tier is not None:
                try:
                    tier_bytes[name] = cache.tier.bytes_used
                except OSError as error:
                    _logger.warning("the tier of %r does not say how much is in it: %s", name, error)
        return self._families(stats, tier_bytes)

    @staticmethod
    def _families(stats: Mapping[str, ServingStats], tier_bytes: Mapping[str, int]) -> Iterator[Metric]:
        for metric, (field, text) in _COUNTERS.items():
            counter = CounterMetricFamily(f"metrale:{metric}", text, labels=["cache"])
            for name, figures in stats.items():
                counter.add_metric([name], getattr(figures, field))
            yield counter
        ends = CounterMetricFamily("metrale:ended_sequences", "Sequences that ended", labels=["cache", "how"])
        for name, figures in stats.items():
            for how in ("finished", "aborted", "refused", "forgotten"):
                ends.add_metric([name, how], getattr(figures, how))
        yield ends
        for metric, (field, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"metrale:{metric}", text, labels=["cache"])
            for name, figures in stats.items():
                gauge.add_metric([name], getattr(figures, field))
            yield gauge
        used = GaugeMetricFamily("metrale:tier_bytes", "Bytes of snapshots in the tier", labels=["cache"])
        for name, size in tier_bytes.items():
            used.add_metric([name], size)
        yield used
