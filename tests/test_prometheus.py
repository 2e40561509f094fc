"""What Prometheus reads of a serving cache, with the real client."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from serving_model import FlakyTier, ModelEngine

from metrale_numba import RadixTree
from metrale_numba.serving import MemoryTier, ServingCache

client = pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")

from metrale_numba.serving.prometheus import Collector  # noqa: E402 - only where there is a client

TOKENS = list(range(20))


def serving_with(tier: Any = None) -> ServingCache:
    engine = ModelEngine(16, 4, 1, 0)
    serving = ServingCache(RadixTree(block_size=4), 16, engine, slots=1, tier=tier)
    engine.serving = serving
    return serving


def serve(serving: ServingCache, tokens: list[int], **keywords: Any) -> None:
    with serving.begin(tokens, **keywords) as sequence:
        sequence.allocate()
        sequence.publish(len(tokens))
        sequence.snapshot(8, lambda slot: None)


def samples(collector: Collector) -> dict[str, float]:
    registry = client.CollectorRegistry()
    registry.register(collector)
    text = client.generate_latest(registry).decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_every_figure_is_shown_under_its_name_and_the_label_of_its_cache() -> None:
    serving = serving_with(MemoryTier(1000))
    serve(serving, TOKENS)
    serve(serving, TOKENS)
    serve(serving, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    with serving.begin(TOKENS) as sequence:
        sequence.allocate(0)
        shown = samples(Collector(main=serving))
    assert {name.removesuffix('{cache="main"}'): value for name, value in shown.items()} == {
        "metrale:requests_total": 4,
        "metrale:prefix_cache_queries_total": 69,
        "metrale:prefix_cache_hits_total": 32,
        "metrale:recompute_tokens_total": 16,
        "metrale:snapshot_hits_total": 2,
        "metrale:evicted_blocks_total": 0,
        "metrale:snapshot_spills_total": 2,
        "metrale:snapshot_clean_spills_total": 0,
        "metrale:snapshot_fault_ins_total": 1,
        "metrale:snapshot_lost_writes_total": 0,
        "metrale:tier_misses_total": 0,
        "metrale:tier_errors_total": 0,
        'metrale:ended_sequences_total{cache="main",how="finished"}': 3,
        'metrale:ended_sequences_total{cache="main",how="aborted"}': 0,
        'metrale:ended_sequences_total{cache="main",how="refused"}': 0,
        'metrale:ended_sequences_total{cache="main",how="forgotten"}': 0,
        "metrale:running_sequences": 1,
        "metrale:blocks": 16,
        "metrale:free_blocks": 9,
        "metrale:evictable_blocks": 3,
        "metrale:cached_blocks": 7,
        "metrale:most_used_blocks": 8,
        "metrale:snapshot_slots": 1,
        "metrale:free_snapshot_slots": 0,
        "metrale:snapshots": 2,
        "metrale:tier_bytes": 48,
    }


def test_two_caches_are_told_apart_by_their_labels() -> None:
    first, second = serving_with(), serving_with()
    serve(first, TOKENS)
    shown = samples(Collector(first=first, second=second))
    assert shown['metrale:requests_total{cache="first"}'] == 1
    assert shown['metrale:requests_total{cache="second"}'] == 0


def test_a_retried_request_is_counted_once() -> None:
    serving = serving_with()
    serve(serving, TOKENS)
    serve(serving, TOKENS, retry=True)
    shown = samples(Collector(main=serving))
    assert shown['metrale:requests_total{cache="main"}'] == 1
    assert shown['metrale:prefix_cache_queries_total{cache="main"}'] == 20
    assert shown['metrale:prefix_cache_hits_total{cache="main"}'] == 0


def test_figures_are_read_when_they_are_asked_for() -> None:
    serving = serving_with()
    collector = Collector(main=serving)
    before = samples(collector)
    serve(serving, TOKENS)
    after = samples(collector)
    assert before['metrale:requests_total{cache="main"}'] == 0
    assert after['metrale:requests_total{cache="main"}'] == 1


def test_a_tier_that_does_not_answer_costs_its_own_figure_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Silent(FlakyTier):
        @property
        def bytes_used(self) -> int:
            raise OSError("no answer")

    shown = samples(Collector(main=serving_with(Silent(MemoryTier(1000)))))
    assert 'metrale:requests_total{cache="main"}' in shown
    assert 'metrale:tier_bytes{cache="main"}' not in shown
    assert "no answer" in caplog.text


def test_what_is_no_serving_cache_is_refused() -> None:
    with pytest.raises(TypeError, match="main must be a ServingCache, not int"):
        Collector(main=3)  # type: ignore[arg-type]


def test_a_collector_of_nothing_is_refused() -> None:
    with pytest.raises(TypeError, match="at least one serving cache"):
        Collector()


def test_without_the_client_the_error_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "try:\n    import metrale_numba.serving.prometheus\n"
        "except ImportError as error:\n    print(error)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'metrale-numba[metrics]'" in ended.stdout
