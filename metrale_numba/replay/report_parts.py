"""What stands on the page of a report: its figures and parts in words, with charts and tables, ready to be laid out.

Relies on a :class:`~metrale_numba.replay.recorder.Record` for every figure, and works out nothing but shares of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from metrale_numba.replay.ages import BlockAges
from metrale_numba.replay.charts import (
    Drawing,
    as_svg,
    draw_first_token,
    draw_hit_curve,
    draw_hits_over_time,
    draw_idle,
    draw_lifetime,
    duration,
)
from metrale_numba.replay.curve import default_capacities
from metrale_numba.replay.recorder import Record, Served, Waiting

__all__ = ["PERCENT", "Chart", "Figure", "Part", "Table", "headline", "page_parts", "percent", "subject"]

PERCENT: Final = 90
"""Of an endless cache's hits, the part that most of the memory is not needed for."""

# Pixels of charts on a page: alone, one of two side by side, and on a phone.
_WIDE, _HALF, _NARROW = (960, 320), (470, 300), (340, 260)

# The part of the time from which on an engine that computes has hardly any left to catch up.
_BUSY: Final = 0.9


class Figure(NamedTuple):
    """A headline figure."""

    key: str
    name: str
    value: str
    note: str = ""


class Table(NamedTuple):
    """A table, as the words of its cells."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Chart(NamedTuple):
    """A drawing on a page, in the sizes it is shown in, and the same in words."""

    heading: str
    alternative: str
    drawings: list[dict[str, object]]


@dataclass
class Part:
    """A part of a page."""

    key: str
    heading: str
    words: list[str] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    prefixes: list[dict[str, object]] = field(default_factory=list)
    stack: dict[str, object] | None = None
    table: Table | None = None
    details: Table | None = None


def subject(record: Record) -> str:
    """Say in one sentence what was played."""
    span = f", over {duration(record.milliseconds / 1_000)} of the trace" if record.milliseconds else ""
    capacity = record.result.capacity
    limit = "without a limit" if capacity is None else f"of {_count(capacity, 'block')}"
    return f"{_count(record.result.requests, 'request')}{span}, through a cache {limit}."


def page_parts(record: Record) -> list[Part]:
    """Give the parts of a page, without those that there is nothing to say in."""
    parts = [
        _hits_over_time(record),
        _hit_curve(record),
        _prefixes(record),
        _lifetime(record),
        _idle(record),
        _first_token(record),
        _snapshots(record.waiting),
        _calls(record),
    ]
    return [part for part in parts if part is not None]


def headline(record: Record) -> list[Figure]:
    """Give the figures that a page begins with."""
    result, curve = record.result, record.curve
    target = curve.smallest_capacity(PERCENT)
    figures = [
        Figure("requests", "Requests", f"{result.requests:,}", f"{curve.tokens:,} prompt tokens"),
        Figure(
            "block_hit_rate",
            "Hit rate in blocks",
            percent(result.block_hit_rate),
            f"{result.hit_blocks:,} of {result.blocks:,}",
        ),
        Figure(
            "token_hit_rate",
            "Hit rate in prompt tokens",
            percent(result.token_hit_rate),
            f"of {curve.tokens:,}, {record.hit_tokens:,} had their KV in the cache",
        ),
        Figure(
            "cached_blocks",
            "Cached at the end",
            f"{result.cached_blocks:,}",
            "blocks, no limit" if result.capacity is None else f"of {result.capacity:,} blocks",
        ),
        Figure(
            "evicted_blocks",
            "Evicted blocks",
            f"{result.evicted_blocks:,}",
            f"{_part(record.never_hit_blocks, result.evicted_blocks)} never hit" if result.evicted_blocks else "",
        ),
        Figure(
            "endless_hit_rate",
            "Endless cache would hit",
            percent(curve.point(curve.distinct_blocks).block_hit_rate),
            f"with {curve.distinct_blocks:,} blocks",
        ),
    ]
    if target is not None:
        note = f"blocks for {PERCENT}% of its hits"
        figures.append(Figure("target_capacity", "It would take", f"{target:,}", note))
    waiting = record.waiting
    if waiting is not None and waiting.with_cache.result.first_token is not None:
        without = waiting.without_cache.result.first_token
        busy = " at overload" if _is_overloaded(waiting.with_cache) else ""
        figures.append(
            Figure(
                "first_token_p50",
                "Time to first token",
                duration(waiting.with_cache.result.first_token.p50),
                f"median, simulated{busy}" + ("" if without is None else f"; {duration(without.p50)} without a cache"),
            )
        )
    return figures


def _hits_over_time(record: Record) -> Part:
    part = Part("over-time", "Hit rate over time")
    intervals = [each for each in record.intervals if each.blocks]
    if not intervals:
        part.words.append("There is nothing to show: no prompt has a block.")
        return part
    rates = [each.hit_blocks / each.blocks for each in intervals]
    length = record.intervals[0].requests
    words = f"Each step is {_count(length, 'request')}: the lowest {min(rates):.1%}, the highest {max(rates):.1%}."
    first = record.first_eviction
    if first is None:
        words += " The cache never had to evict."
    else:
        at = (
            f", {duration((first.begins - intervals[0].begins) / 1_000)} after the first" if record.milliseconds else ""
        )
        words += f" The first block was evicted for request {first.first_request:,}{at}."
    part.words.append(words)
    alternative = f"Hit rate in blocks over time. {words} Over all requests: {percent(record.result.block_hit_rate)}."
    part.charts.append(_chart("over-time", alternative, lambda axes: draw_hits_over_time(axes, record)))
    part.details = Table(
        "Figures of each step",
        ["From request", "After", "Requests", "Blocks", "Hit blocks", "Hit rate", "Evicted blocks"],
        [
            [
                f"{each.first_request:,}",
                duration((each.begins - record.intervals[0].begins) / 1_000),
                f"{each.requests:,}",
                f"{each.blocks:,}",
                f"{each.hit_blocks:,}",
                _part(each.hit_blocks, each.blocks),
                f"{each.evicted_blocks:,}",
            ]
            for each in record.intervals
        ],
    )
    return part


def _hit_curve(record: Record) -> Part | None:
    curve, capacity = record.curve, record.result.capacity
    if not curve.blocks:
        return None
    part = Part("curve", "Hit rate by capacity")
    endless = curve.point(curve.distinct_blocks)
    words = (
        f"A cache that never evicts would hit {percent(endless.block_hit_rate)} of the blocks, "
        f"and hold {_count(curve.distinct_blocks, 'block')} at the end."
    )
    target = curve.smallest_capacity(PERCENT)
    if target is not None:
        words += f" {PERCENT}% of its hits take {_count(target, 'block')}."
    if capacity is not None:
        words += f" This replay hit {percent(record.result.block_hit_rate)} with {_count(capacity, 'block')}."
    part.words += [words, "Each point is, to the block, what a replay with that capacity comes to."]
    alternative = f"Hit rate in blocks by capacity in blocks. {words}"
    part.charts.append(
        _chart("curve", alternative, lambda axes: draw_hit_curve(axes, curve, capacity, PERCENT)),
    )
    points = [curve.point(each) for each in default_capacities(curve)]
    part.details = Table(
        "Figures of the curve",
        ["Capacity", "Hit blocks", "Hit rate in blocks", "In tokens", "Evicted blocks"],
        [
            [
                f"{point.capacity:,}",
                f"{point.hit_blocks:,}",
                percent(point.block_hit_rate),
                percent(point.token_hit_rate),
                f"{point.evicted_blocks:,}",
            ]
            for point in points
        ],
    )
    return part


def _prefixes(record: Record) -> Part | None:
    hit_blocks = record.result.hit_blocks
    if not record.result.blocks:
        return None
    part = Part("prefixes", "Hottest shared prefixes")
    if not hit_blocks:
        part.words.append("No block was hit.")
        return part
    together = sum(each.hit_blocks for each in record.prefixes)
    part.words.append(
        "Blocks that follow one another in prompts and were hit equally often, by hits times blocks: each hit block of "
        f"the replay counts once. The {len(record.prefixes)} shown make {_part(together, hit_blocks)} of all."
        if len(record.prefixes) > 1
        else "Blocks that follow one another in prompts and were hit equally often: there is one such run of them."
    )
    most = record.prefixes[0].hit_blocks
    part.prefixes = [
        {
            "place": _range(each.begins + 1, each.begins + each.blocks),
            "first": f"{each.first_request:,}",
            "requests": f"{each.requests:,}",
            "hits": f"{each.hits:,}",
            "hit_blocks": f"{each.hit_blocks:,}",
            "share": _part(each.hit_blocks, hit_blocks),
            "percent": f"{100 * each.hit_blocks / most:.2f}",
        }
        for each in record.prefixes
    ]
    return part


def _lifetime(record: Record) -> Part | None:
    evicted = record.result.evicted_blocks
    if not record.result.blocks:
        return None
    part = Part("lifetime", "How long blocks live")
    if not evicted:
        hint = "; --blocks N sets one" if record.result.capacity is None else ""
        limit = "The cache had no limit" if record.result.capacity is None else "All blocks had room"
        part.words.append(f"Nothing was evicted. {limit}{hint}.")
        return part
    halfway = _middle(record, "lifetime")
    part.words.append(
        f"Of {_count(evicted, 'evicted block')}, half were evicted no more than {halfway} after their insert. "
        f"{record.never_hit_blocks:,} ({_part(record.never_hit_blocks, evicted)}) were never hit."
    )
    part.charts = [
        _chart(
            f"lifetime-{clock}",
            f"Part of the evicted blocks that lived no longer, by {clock}. {_quartiles(ages, ['lifetime'], clock)}",
            partial(draw_lifetime, ages=ages, in_time=clock == "time"),
            heading="In requests" if clock == "requests" else "In time of the trace",
            half=True,
        )
        for clock, ages in _clocks(record)
    ]
    part.table = _age_table(record, [("lifetime", "Lived")])
    return part


def _idle(record: Record) -> Part | None:
    if not record.result.hit_blocks and not record.result.evicted_blocks:
        return None
    part = Part("idle", "How long blocks are idle")
    words = []
    if record.result.evicted_blocks:
        words.append(f"Half of the evicted blocks had not been used for {_middle(record, 'idle_at_eviction')} or less.")
    if record.result.hit_blocks:
        words.append(f"Half of the hits came no more than {_middle(record, 'idle_at_hit')} after the block's last use.")
    if len(words) == 2:
        words.append(
            "If the line of the hit blocks still climbs where it meets that of the evicted ones, a larger cache would "
            "hit more."
        )
    part.words.append(" ".join(words))
    names = ["idle_at_eviction", "idle_at_hit"]
    part.charts = [
        _chart(
            f"idle-{clock}",
            f"Part of the blocks that were idle no longer, by {clock}. {_quartiles(ages, names, clock)}",
            partial(draw_idle, ages=ages, in_time=clock == "time"),
            heading="In requests" if clock == "requests" else "In time of the trace",
            half=True,
        )
        for clock, ages in _clocks(record)
    ]
    part.table = _age_table(record, [("idle_at_eviction", "Evicted"), ("idle_at_hit", "Hit")])
    return part


def _first_token(record: Record) -> Part | None:
    if not record.result.blocks:
        return None
    part = Part("first-token", "Time to first token")
    waiting = record.waiting
    if waiting is None:
        part.words.append(
            "Left out: so many requests came that they could not be served at the rate of the built-in service. "
            "metrale-numba simulate serves them at others."
        )
        return part
    service, result = waiting.service, waiting.with_cache.result
    blocks = "as many blocks as it takes" if record.result.capacity is None else _count(record.result.capacity, "block")
    part.words.append(
        f"Simulated: requests come at their times, to an engine that computes {service.prefill_rate:,.0f} prompt "
        f"tokens per second, one prompt after another, gives each answer {service.decode_rate:,.0f} tokens per second, "
        f"runs at most {service.at_once:,} requests, and has {blocks} for those and for the cache. "
        "metrale-numba simulate does the same at other rates."
    )
    if _is_overloaded(waiting.with_cache):
        part.words.append(
            "More came than it can compute: requests queue up, and the times say how long the queue is. "
            "simulate --speed lets them come more slowly."
        )
    if result.refused:
        part.words.append(f"{_count(result.refused, 'request')} needed more blocks than there are and were refused.")
    columns = {"The cache": waiting.with_cache}
    if waiting.endless is not waiting.with_cache:
        columns["Endless"] = waiting.endless
    columns["None"] = waiting.without_cache
    if result.first_token is None:
        part.words.append("No request has its first token.")
        return part
    alternative = "Part of the requests that have their first token within a time. " + " ".join(
        f"{name}: half within {duration(served.result.first_token.p50)}, 99% within "
        f"{duration(served.result.first_token.p99)}."
        for name, served in columns.items()
        if served.result.first_token is not None
    )
    part.charts.append(_chart("first-token", alternative, lambda axes: draw_first_token(axes, waiting)))
    part.table = Table(
        "Time to first token",
        ["", "Mean", "Median", "p90", "p99", "Computing"],
        [[name, *_spread(served), percent(served.result.prefill_busy)] for name, served in columns.items()],
    )
    return part


def _snapshots(waiting: Waiting | None) -> Part | None:
    """Show snapshots and their tier, if the model is a hybrid one."""
    if waiting is None or waiting.snapshots is None:
        return None
    engine = waiting.with_cache.result.engine
    counts, room = engine.hybrid, waiting.snapshots
    if counts is None or not engine.prompt_tokens:
        return None
    part = Part("snapshots", "Snapshots and their tier")
    slots = "as many slots as it takes" if room.slots is None else _count(room.slots, "slot")
    tier = f"a tier for {_count(room.tier_snapshots, 'snapshot')}" if room.tier_snapshots else "no tier"
    part.words.append(
        f"Of the simulated engine with the cache, which has {slots} and {tier}. Computing begins at the deepest "
        "snapshot that can be restored: KV that is cached behind it is computed again."
    )
    computed = engine.prompt_tokens - engine.hit_tokens
    pieces = [
        ("blue", "usable hit", counts.usable_hit_tokens),
        ("red", "hit, but computed again", counts.recompute_tokens),
        ("grid", "no hit", computed),
    ]
    shares = [f"{name}: {_part(tokens, engine.prompt_tokens)}" for _, name, tokens in pieces]
    part.stack = {
        "alternative": f"Prompt tokens. {'; '.join(shares)}.",
        "pieces": [
            {"colour": colour, "name": share, "percent": f"{100 * tokens / engine.prompt_tokens:.2f}"}
            for (colour, _, tokens), share in zip(pieces, shares, strict=True)
        ],
    }
    endless = waiting.endless.result.engine.hybrid
    part.table = Table(
        "Snapshots",
        ["", "With the cache", "With an endless one"],
        [
            [name, f"{getattr(counts, count):,}", "-" if endless is None else f"{getattr(endless, count):,}"]
            for name, count in (
                ("Usable hit tokens", "usable_hit_tokens"),
                ("Hit tokens to compute again", "recompute_tokens"),
                ("Requests begun with a snapshot", "snapshot_hits"),
                ("Snapshots taken", "saved_snapshots"),
                ("For which there was no slot", "refused_snapshots"),
                ("Spilled to the tier", "spills"),
                ("Brought back from it", "fault_ins"),
                ("Requests whose snapshot was in it", "tier_hits"),
                ("Snapshots it had discarded", "tier_misses"),
            )
        ],
    )
    return part


def _calls(record: Record) -> Part | None:
    result = record.result
    if not result.requests:
        return None
    part = Part("calls", "Time of the calls")
    part.words.append("On the machine of the replay, which did the work for this report in between.")
    calls = {"lookup": result.lookup, "insert": result.insert, "evict": result.evict, "release": result.release}
    part.table = Table(
        "Time of the calls",
        ["Call", "Calls", "Median", "p99"],
        [
            [name, f"{times.calls:,}", f"{times.median:,.1f} µs", f"{times.p99:,.1f} µs"]
            for name, times in calls.items()
            if times is not None
        ],
    )
    return part


def _chart(key: str, alternative: str, draw: Drawing, *, heading: str = "", half: bool = False) -> Chart:
    """Draw a chart for a page, in the two sizes that it is shown in."""
    from markupsafe import Markup  # noqa: PLC0415 - comes with Jinja

    drawings: list[dict[str, object]] = [
        {
            "shown": shown,
            "width": width,
            "height": height,
            # Made here, of figures alone.
            "inside": Markup(as_svg(draw, width, height, f"{key}-{shown}")),
        }
        for shown, (width, height) in (("wide", _HALF if half else _WIDE), ("narrow", _NARROW))
    ]
    return Chart(heading, alternative, drawings)


def _clocks(record: Record) -> list[tuple[str, BlockAges]]:
    """Give the clocks that go: there are traces without times."""
    clocks = [("requests", record.in_requests)]
    if record.milliseconds:
        clocks.append(("time", record.in_milliseconds))
    return clocks


def _middle(record: Record, name: str) -> str:
    """Say what half of some ages are at or below, by all clocks."""
    ages = getattr(record.in_requests, name).percentile(50)
    words = _count(ages, "request")
    if record.milliseconds:
        words += f" ({duration(getattr(record.in_milliseconds, name).percentile(50) / 1_000)})"
    return words


def _quartiles(ages: BlockAges, names: Sequence[str], clock: str) -> str:
    said = {"lifetime": "Evicted blocks", "idle_at_eviction": "Evicted blocks", "idle_at_hit": "Hit blocks"}
    sentences = []
    for name in names:
        each = getattr(ages, name)
        if each.total:
            quarter, half, most = (_age(each.percentile(percent), clock) for percent in (25, 50, 75))
            sentences.append(
                f"{said[name]}: a quarter within {quarter}, half within {half}, three quarters within {most}."
            )
    return " ".join(sentences)


def _age_table(record: Record, names: Sequence[tuple[str, str]]) -> Table:
    rows = []
    for name, words in names:
        for clock, ages in _clocks(record):
            each = getattr(ages, name)
            if each.total:
                quantiles = [each.percentile(percent) for percent in (10, 50, 90, 99)]
                figures = [_age(age, clock) if clock == "time" else f"{age:,}" for age in quantiles]
                rows.append([f"{words}, in {clock}", *figures])
    return Table("Ages of blocks", ["", "p10", "Median", "p90", "p99"], rows)


def _age(age: int, clock: str) -> str:
    return duration(age / 1_000) if clock == "time" else _count(age, "request")


def _is_overloaded(served: Served) -> bool:
    """Tell whether the engine had hardly any time left, and requests spent most of theirs in its queue."""
    result = served.result
    if result.prefill_busy is None or result.waiting is None or result.first_token is None:
        return False
    return result.prefill_busy > _BUSY and result.waiting.p50 > result.first_token.p50 / 2


def _spread(served: Served) -> list[str]:
    spread = served.result.first_token
    return ["-"] * 4 if spread is None else [duration(seconds) for seconds in spread]


def _range(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def percent(rate: float | None) -> str:
    """Put a rate into words; a rate of nothing is none."""
    return "-" if rate is None else f"{rate:.2%}"


def _part(some: int, of_all: int) -> str:
    return f"{some / of_all:.1%}" if of_all else "-"
