"""Requests in simulated time: schedules worked out by hand, and what holds for every load."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from metrale_numba import RadixTree
from metrale_numba.replay import Replay, Request, TraceReader, workload
from metrale_numba.replay.engine import SimulatedEngine
from metrale_numba.replay.timed import ServiceModel, Spread, TimedReplay

SERVICE = ServiceModel(prefill_rate=1_000, decode_rate=10, at_once=8)
"""A block of 100 tokens is computed in 0.1 s, and each token of an answer takes as long."""


class CheckedReplay(TimedReplay):
    """Recounts everything after each event and after each arrival."""

    def step(self) -> bool:
        happened = super().step()
        self.engine.serving.check_integrity()
        return happened

    def arrive(self, request: Request) -> None:
        super().arrive(request)
        self.engine.serving.check_integrity()


def request(
    seconds: float, ids: list[int], output: int = 1, *, tokens: int | None = None, adapter: int = 0, per_id: int = 100
) -> Request:
    """A prompt of so many blocks of 100 tokens, or of fewer tokens in the last."""
    length = len(ids) * per_id if tokens is None else tokens
    return Request(seconds * 1_000, length, output, np.array(ids, np.uint32), per_id, adapter=adapter)


def served(
    requests: list[Request], blocks: int | None = None, service: ServiceModel = SERVICE, *, caching: bool = True
) -> TimedReplay:
    replay = CheckedReplay(SimulatedEngine(blocks, caching=caching), service)
    for each in requests:
        replay.arrive(each)
    replay.drain()
    return replay


def chats(requests: int, *, sessions: int = 20, speed: float = 1.0) -> list[Request]:
    return [
        Request(each.timestamp / speed, each.input_length, each.output_length, each.hash_ids, session=each.session)
        for each in workload("chat", 5, requests, sessions)
    ]


# Schedules by hand


def test_the_first_token_comes_when_the_prompt_is_computed() -> None:
    replay = served([request(2.0, [1, 2, 3])])
    assert replay.first_token_seconds.tolist() == pytest.approx([0.3])
    assert replay.waiting_seconds.tolist() == [0.0]
    assert replay.now == pytest.approx(2.3)


def test_each_further_token_takes_its_time_and_the_last_ends_the_request() -> None:
    replay = served([request(0, [1, 2, 3], output=6)])
    assert replay.first_token_seconds.tolist() == pytest.approx([0.3])
    assert replay.now == pytest.approx(0.3 + 0.5)


def test_an_answer_of_no_token_ends_with_its_prompt() -> None:
    assert served([request(0, [1, 2, 3], output=0)]).now == pytest.approx(0.3)


def test_prompts_are_computed_one_after_another_in_the_order_of_arrival() -> None:
    replay = served([request(0, [1, 2, 3]), request(0.1, [4]), request(0.2, [5, 6])])
    assert replay.waiting_seconds.tolist() == pytest.approx([0.0, 0.2, 0.2])
    assert replay.first_token_seconds.tolist() == pytest.approx([0.3, 0.3, 0.4])


def test_answers_under_way_slow_neither_each_other_nor_a_prompt() -> None:
    replay = served([request(0, [1], output=11), request(0, [2], output=11), request(0.5, [3, 4], output=1)])
    assert replay.first_token_seconds.tolist() == pytest.approx([0.1, 0.2, 0.2])
    assert replay.now == pytest.approx(1.2)


def test_cached_blocks_take_no_time() -> None:
    replay = served([request(0, [1, 2, 3]), request(1, [1, 2, 4])])
    assert replay.first_token_seconds.tolist() == pytest.approx([0.3, 0.1])


def test_a_prompt_that_is_cached_whole_computes_one_token() -> None:
    replay = served([request(0, [1, 2, 3]), request(1, [1, 2, 3])])
    assert replay.first_token_seconds.tolist() == pytest.approx([0.3, 0.001])
    assert replay.result().engine.computed_tokens == 301


def test_a_prompt_is_looked_up_when_it_begins_and_finds_what_was_computed_while_it_waited() -> None:
    replay = served([request(0, [1, 2, 3]), request(0, [1, 2, 3, 4])])
    assert replay.first_token_seconds.tolist() == pytest.approx([0.3, 0.4])
    assert replay.result().engine.hit_blocks == 3


def test_prompts_of_two_adapters_share_nothing() -> None:
    replay = served([request(0, [1, 2, 3]), request(1, [1, 2, 3], adapter=7)])
    assert replay.first_token_seconds.tolist() == pytest.approx([0.3, 0.3])


def test_the_last_block_of_a_prompt_counts_for_the_tokens_it_has() -> None:
    replay = served([request(0, [1, 2, 3], tokens=250), request(1, [1, 2, 3, 4], tokens=310)])
    assert replay.first_token_seconds.tolist() == pytest.approx([0.25, 0.01])


def test_no_more_run_at_once_than_may() -> None:
    requests = [request(0, [1], output=11), request(0, [2], output=11), request(0, [3], output=11)]
    replay = served(requests, service=SERVICE._replace(at_once=2))
    # The first ends at 1.1, and only then the third begins.
    assert replay.waiting_seconds.tolist() == pytest.approx([0.0, 0.1, 1.1])
    assert replay.result().most_running == 2
    assert replay.result().most_waiting == 2


def test_a_request_waits_until_there_are_blocks_for_its_prompt_and_its_answer() -> None:
    # Of five blocks the first holds three, for its 200 tokens and the 51 of its answer.
    replay = served([request(0, [1, 2], output=51), request(0, [3, 4, 5])], blocks=5)
    assert replay.waiting_seconds.tolist() == pytest.approx([0.0, 0.2 + 5.0])
    # It was plain that it would be in vain, so nothing was tried.
    assert replay.engine.serving.stats().refused == 0


def test_tokens_of_an_answer_fill_the_last_block_of_the_prompt_first() -> None:
    replay = served([request(0, [1, 2], output=51, tokens=149), request(0, [3, 4, 5], output=0)], blocks=5)
    assert replay.waiting_seconds.tolist() == pytest.approx([0.0, 0.149])


def test_nobody_overtakes_a_request_that_waits_for_blocks() -> None:
    replay = served([request(0, [1, 2], output=51), request(0, [3, 4, 5, 6]), request(0, [7])], blocks=5)
    assert replay.waiting_seconds.tolist() == pytest.approx([0.0, 5.2, 5.6])


def test_blocks_that_are_shared_with_a_running_request_are_needed_once() -> None:
    replay = served([request(0, [1, 2, 3, 4], output=51), request(0, [1, 2, 3, 4], output=0)], blocks=5)
    assert replay.waiting_seconds.tolist() == pytest.approx([0.0, 0.4])
    assert replay.result().engine.most_held_blocks == 5


def test_a_request_that_was_begun_in_vain_is_counted_once() -> None:
    # The third needs four blocks besides the cached one that it would hold itself.
    first = [request(0, [1], output=0), request(1, [5], output=51)]
    replay = served([*first, request(2, [1, 2, 3, 4], output=0)], blocks=5)
    assert replay.waiting_seconds.tolist() == pytest.approx([0.0, 0.0, 4.1])
    stats = replay.engine.serving.stats()
    assert (stats.requests, stats.finished, stats.aborted, stats.refused) == (3, 3, 0, 1)
    cache = replay.engine.serving.cache
    assert isinstance(cache, RadixTree)
    # The others matched nothing.
    assert cache.snapshot_stats().lookups == 1
    assert replay.result().engine.requests == 3


def test_a_request_that_can_never_fit_is_refused_and_counted_and_the_others_go_on() -> None:
    replay = served([request(0, [1, 2, 3]), request(0, [4, 5, 6], output=101), request(0, [7])], blocks=4)
    result = replay.result()
    assert (result.arrived, result.finished, result.refused) == (3, 2, 1)
    assert replay.first_token_seconds.tolist() == pytest.approx([0.3, 0.4])


def test_a_request_that_just_fits_is_served() -> None:
    result = served([request(0, [4, 5, 6], output=100)], blocks=4).result()
    assert (result.finished, result.refused) == (1, 0)


def test_an_answer_as_long_as_no_model_gives_is_refused_even_of_endless_blocks() -> None:
    replay = served([request(0, [1], output=10**15), request(0, [2])])
    assert (replay.result().finished, replay.result().refused) == (1, 1)
    assert replay.engine.serving.blocks.num_blocks < 10_000


def test_what_ends_at_the_moment_of_an_arrival_ends_before_it() -> None:
    service = SERVICE._replace(prefill_rate=1_024, decode_rate=8, at_once=1)
    # 512 tokens take half a second and four more tokens another half, without any rounding.
    replay = served([request(0, [1], output=5, per_id=512), request(1, [1], output=5, per_id=512)], service=service)
    assert replay.waiting_seconds.tolist() == [0.0, 0.0]
    assert replay.result().most_waiting == 0


def test_a_timestamp_that_goes_back_counts_as_the_same_moment() -> None:
    replay = served([request(5, [1]), request(4, [2])])
    assert replay.waiting_seconds.tolist() == pytest.approx([0.0, 0.1])


def test_speed_brings_the_requests_closer_together_and_serves_them_no_faster() -> None:
    replay = TimedReplay(SimulatedEngine(None), SERVICE, speed=10)
    for each in (request(0, [1, 2, 3]), request(1, [4])):
        replay.arrive(each)
    replay.drain()
    assert replay.waiting_seconds.tolist() == pytest.approx([0.0, 0.2])


def test_a_result_sums_up_times_and_throughput() -> None:
    result = served([request(1, [1, 2, 3], output=11), request(1, [1, 2, 4], output=11)]).result()
    # First tokens at 1.3 and 1.4, ends at 2.3 and 2.4.
    assert result.first_token == pytest.approx(Spread(mean=0.35, p50=0.35, p90=0.39, p99=0.399))
    assert result.waiting == pytest.approx(Spread(mean=0.15, p50=0.15, p90=0.27, p99=0.297))
    assert result.seconds == pytest.approx(1.4)
    assert result.requests_per_second == pytest.approx(2 / 1.4)
    assert result.prompt_tokens_per_second == pytest.approx(600 / 1.4)
    assert result.output_tokens_per_second == pytest.approx(22 / 1.4)
    assert result.prefill_busy == pytest.approx(0.4 / 1.4)
    assert (result.engine.prompt_blocks, result.engine.hit_blocks) == (6, 2)
    assert (result.engine.prompt_tokens, result.engine.hit_tokens, result.engine.computed_tokens) == (600, 200, 400)


def test_of_nothing_there_is_a_result_without_rates() -> None:
    result = TimedReplay(SimulatedEngine(10), SERVICE).result()
    assert (result.arrived, result.finished, result.seconds) == (0, 0, 0.0)
    assert result.first_token is None
    assert result.requests_per_second is None
    assert result.prefill_busy is None


def test_a_result_half_way_counts_what_has_happened() -> None:
    replay = TimedReplay(SimulatedEngine(None), SERVICE)
    replay.arrive(request(0, [1, 2], output=11))
    replay.arrive(request(0.5, [3, 4]))
    result = replay.result()
    assert (result.arrived, result.finished, result.seconds) == (2, 0, 0.5)
    assert replay.first_token_seconds.tolist() == pytest.approx([0.2])
    assert replay.result() == result
    replay.close()


def test_what_is_under_way_is_given_back_when_a_replay_is_closed() -> None:
    replay = TimedReplay(SimulatedEngine(4), SERVICE)
    for each in (request(0, [1, 2], output=51), request(0.5, [3]), request(0.5, [4, 5])):
        replay.arrive(each)
    replay.close()
    serving = replay.engine.serving
    assert serving.stats().running == 0
    serving.check_integrity()
    assert not replay.step()
    assert replay.result().finished == 0


def test_tokens_are_cached_in_whole_blocks() -> None:
    replay = TimedReplay(SimulatedEngine(None, block_size=4), SERVICE)
    tokens = list(range(10))
    for seconds in (0, 1):
        replay.arrive(request(seconds, tokens, per_id=1))
    replay.drain()
    assert replay.first_token_seconds.tolist() == pytest.approx([0.010, 0.002])
    engine = replay.result().engine
    assert (engine.prompt_blocks, engine.hit_blocks, engine.hit_tokens) == (4, 2, 8)


def test_an_empty_prompt_is_served_at_once() -> None:
    assert served([request(0, [], output=0)], blocks=1).first_token_seconds.tolist() == [0.0]


def test_requests_that_come_one_at_a_time_never_wait() -> None:
    replay = CheckedReplay(SimulatedEngine(None), SERVICE)
    for each in (request(0, [1, 2, 3], output=11), request(0, [1, 2, 4], output=11)):
        replay.play(each)
    assert replay.first_token_seconds.tolist() == pytest.approx([0.3, 0.1])
    assert replay.now == pytest.approx(2.4)
    assert replay.result().most_running == 1


# What holds for every load


@pytest.mark.parametrize("blocks", [60, 200, None])
@pytest.mark.parametrize("caching", [True, False])
def test_every_block_is_accounted_for_at_every_event_and_given_back(blocks: int | None, caching: bool) -> None:
    requests = chats(150)
    replay = served(requests, blocks, ServiceModel(20_000, 50, 8), caching=caching)
    result, serving = replay.result(), replay.engine.serving
    assert result.finished + result.refused == result.arrived == len(requests)
    assert serving.stats().running == 0
    assert serving.blocks.num_used == result.engine.cached_blocks
    assert blocks is None or serving.blocks.num_blocks <= blocks
    assert result.engine.hit_blocks + result.engine.evicted_blocks <= result.engine.prompt_blocks
    assert (result.refused > 0) == any(
        blocks is not None and -(-(each.input_length + each.output_length) // 512) > blocks for each in requests
    )


@pytest.mark.parametrize("blocks", [100, 400])
@pytest.mark.parametrize("speed", [0.2, 1, 5])
def test_no_request_gets_its_first_token_later_with_a_cache_than_without(blocks: int, speed: float) -> None:
    requests, service = chats(300, speed=1 / speed), ServiceModel(20_000, 50, 32)
    with_cache, without = (served(requests, blocks, service, caching=caching) for caching in (True, False))
    assert (with_cache.first_token_seconds <= without.first_token_seconds + 1e-9).all()
    assert with_cache.first_token_seconds.mean() < without.first_token_seconds.mean()


def test_more_blocks_never_hit_less_and_endless_ones_the_most() -> None:
    requests = chats(300)
    hits = [
        served(requests, blocks, ServiceModel(20_000, 50, 32)).result().engine.hit_blocks
        for blocks in (100, 200, 400, 800, None)
    ]
    assert hits == sorted(hits)
    assert hits[0] < hits[-1]


def test_the_same_requests_give_the_same_times_and_counts() -> None:
    results = []
    for _ in range(2):
        replay = served(chats(200), 150, ServiceModel(20_000, 50, 16))
        results.append((replay.result(), replay.first_token_seconds.tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("blocks", [100, 300, 1_000, 1_500, None])
def test_requests_that_never_overlap_hit_and_evict_what_a_replay_does(blocks: int | None) -> None:
    requests = [
        Request(each.timestamp, each.input_length, 0, each.hash_ids, session=each.session) for each in chats(400)
    ]
    replay = Replay(RadixTree(block_size=1), capacity=blocks)
    timed = TimedReplay(SimulatedEngine(blocks), SERVICE)
    for each in requests:
        replay.play(each)
        timed.play(each)
    expected, engine = replay.result(), timed.result().engine
    assert (engine.requests, engine.prompt_blocks) == (expected.requests, expected.blocks)
    assert engine.hit_blocks == expected.hit_blocks
    assert engine.evicted_blocks == expected.evicted_blocks
    assert engine.cached_blocks == expected.cached_blocks


def test_with_endless_blocks_times_do_not_matter_to_the_hits() -> None:
    requests = chats(400)
    replay = Replay(RadixTree(block_size=1))
    for each in requests:
        replay.play(each)
    assert served(requests).result().engine.hit_blocks == replay.result().hit_blocks


def test_the_conversation_trace_in_time() -> None:
    folder = os.environ.get("METRALE_TRACES")
    if not folder:
        pytest.skip("METRALE_TRACES does not name the folder of the traces")
    replay = TimedReplay(SimulatedEngine(100_000), ServiceModel(50_000, 50, 256))
    with TraceReader(Path(folder) / "mooncake_conversation.jsonl.gz") as requests:
        for each in requests:
            replay.arrive(each)
    replay.drain()
    result = replay.result()
    assert (result.finished, result.engine.prompt_blocks, result.engine.hit_blocks) == (12_031, 288_500, 104_924)
    assert result.first_token == pytest.approx(
        Spread(mean=1.0127504895686312, p50=0.7451199999995879, p90=2.27626, p99=4.431153999999919)
    )
