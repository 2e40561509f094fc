"""What ``metrale-numba simulate`` sets up and what it prints: engines side by side, their figures as tables or JSON.

The engines with a cache, without one and with an endless one, and those of a sweep, are driven together, so that the
requests are read once and never held together.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from metrale_numba.cli.sources import ChosenSource
from metrale_numba.replay.engine import SimulatedEngine
from metrale_numba.replay.hybrid import SnapshotPlan, SnapshotRoom, gains
from metrale_numba.replay.timed import ServiceModel, Spread, TimedReplay, TimedResult

__all__ = ["Engines", "Hybrid", "Setup", "as_json", "print_tables"]

_BYTES_PER_GB = 1_000_000_000


class Hybrid(NamedTuple):
    """What the options say of a hybrid model."""

    slots: int
    tier_gb: float
    snapshot_bytes: int | None
    plan: SnapshotPlan
    sweep_slots: list[int]
    sweep_tier_gb: list[float]

    def room(self, *, slots: int | None = None, tier_gb: float | None = None) -> SnapshotRoom:
        """Give the room there is, or would be with another number of slots or another size of the tier."""
        gigabytes = self.tier_gb if tier_gb is None else tier_gb
        in_tier = 0 if self.snapshot_bytes is None else int(gigabytes * _BYTES_PER_GB) // self.snapshot_bytes
        return SnapshotRoom(self.slots if slots is None else slots, in_tier, self.plan)


class Setup(NamedTuple):
    """What the options say of the engines and of time."""

    blocks: int | None
    block_size: int | None
    """Tokens per block of a trace of tokens."""
    service: ServiceModel
    speed: float
    one_at_a_time: bool
    hybrid: Hybrid | None


class Engines:
    """The replays that go on side by side."""

    def __init__(self, setup: Setup, ids_per_block: int) -> None:
        def replay(
            blocks: int | None = setup.blocks, *, caching: bool = True, snapshots: SnapshotRoom | None = None
        ) -> TimedReplay:
            engine = SimulatedEngine(blocks, block_size=ids_per_block, caching=caching, snapshots=snapshots)
            return TimedReplay(engine, setup.service, speed=setup.speed)

        hybrid = setup.hybrid
        self.with_cache = replay(snapshots=hybrid and hybrid.room())
        self.without_cache = replay(caching=False)
        self.sweep_slots: list[TimedReplay] = []
        self.sweep_tier: list[TimedReplay] = []
        if hybrid is not None:
            self.endless = replay(None, snapshots=SnapshotRoom(None, plan=hybrid.plan))
            self.sweep_slots = [replay(snapshots=hybrid.room(slots=slots)) for slots in hybrid.sweep_slots]
            self.sweep_tier = [replay(snapshots=hybrid.room(tier_gb=size)) for size in hybrid.sweep_tier_gb]
        else:
            # Without a limit it is the same.
            self.endless = self.with_cache if setup.blocks is None else replay(None)
        self.all = list(
            dict.fromkeys(
                [self.with_cache, self.without_cache, self.endless, *self.sweep_slots, *self.sweep_tier],
            )
        )

    def close(self) -> None:
        """Give back what requests under way hold, which otherwise would look lost."""
        for replay in self.all:
            replay.close()


def as_json(source: ChosenSource, setup: Setup, engines: Engines, interrupted: bool) -> str:
    """Give everything as one JSON object."""
    hybrid = setup.hybrid
    fields: dict[str, object] = {
        "interrupted": interrupted,
        "source": source.as_json(),
        "blocks": setup.blocks,
        "service": {**setup.service._asdict(), "speed": setup.speed, "one_at_a_time": setup.one_at_a_time},
        "with_cache": _as_fields(engines.with_cache.result()),
        "without_cache": _as_fields(engines.without_cache.result()),
        "endless": _as_fields(engines.endless.result()),
        "hybrid": None,
    }
    if hybrid is not None:
        fields["hybrid"] = {
            "slots": hybrid.slots,
            "tier_gb": hybrid.tier_gb,
            "snapshot_bytes": hybrid.snapshot_bytes,
            "tier_snapshots": hybrid.room().tier_snapshots,
            "snapshot_every": hybrid.plan.every or None,
            "snapshot_at": sorted(hybrid.plan.at),
            "sweep_slots": [
                {"slots": slots, "gained_tokens_per_slot": gain, **_as_fields(result)}
                for slots, gain, result in _sweep(hybrid.sweep_slots, engines.sweep_slots)
            ],
            "sweep_tier_gb": [
                {"tier_gb": size, "gained_tokens_per_gb": gain, **_as_fields(result)}
                for size, gain, result in _sweep(hybrid.sweep_tier_gb, engines.sweep_tier)
            ],
        }
    return json.dumps(fields)


def _as_fields(result: TimedResult) -> dict[str, object]:
    """Give a result as JSON has it, where a tuple with names would lose these."""
    hybrid = result.engine.hybrid
    return {
        **result._asdict(),
        "first_token": result.first_token and result.first_token._asdict(),
        "waiting": result.waiting and result.waiting._asdict(),
        "engine": {**result.engine._asdict(), "hybrid": hybrid and hybrid._asdict()},
    }


def _sweep(
    amounts: list[int] | list[float], replays: list[TimedReplay]
) -> list[tuple[float, float | None, TimedResult]]:
    """Put together the amounts of a sweep, the usable tokens that one more of it brought, and all else."""
    results = [replay.result() for replay in replays]
    usable = [0 if result.engine.hybrid is None else result.engine.hybrid.usable_hit_tokens for result in results]
    return list(zip(amounts, gains(amounts, usable), results, strict=True)) if results else []


# An engine that computes prompts for more than this part of the time is not keeping up.
_OVERLOADED = 0.95


def print_tables(console: Console, source: ChosenSource, setup: Setup, engines: Engines, interrupted: bool) -> None:
    """Print everything as tables."""
    heading = f"Simulation of {source.title}"
    # A name may hold what the terminal's encoding has no sign for.
    console.print(Text(heading.encode(console.encoding, "replace").decode(console.encoding), style="bold"))
    columns = {"with the cache": engines.with_cache.result(), "without": engines.without_cache.result()}
    if engines.endless is not engines.with_cache:
        columns["endless"] = engines.endless.result()
    if interrupted:
        finished = columns["with the cache"].finished
        console.print(Text(f"interrupted: figures of the first {finished:,} requests served", style="bold yellow"))

    table = Table("", box=box.SIMPLE)
    for column in columns:
        table.add_column(column, justify="right")
    for label, figure in _FIGURES:
        table.add_row(label, *(figure(result) for result in columns.values()))
    console.print(table)
    busy = columns["with the cache"].prefill_busy
    if busy is not None and busy > _OVERLOADED:
        console.print(
            "More came than can be computed, so the times say how long the queue is. "
            "--speed lets requests come more slowly, --prefill-rate computes them faster."
        )

    hybrid = setup.hybrid
    if hybrid is None:
        return
    table = Table("snapshots", box=box.SIMPLE)
    columns.pop("without")
    for column in columns:
        table.add_column(column, justify="right")
    for label, field in _SNAPSHOT_FIGURES:
        table.add_row(label, *(f"{getattr(result.engine.hybrid, field):,}" for result in columns.values()))
    console.print(table)
    if hybrid.sweep_slots:
        console.print(_sweep_table("slots", "gain per slot", _sweep(hybrid.sweep_slots, engines.sweep_slots)))
    if hybrid.sweep_tier_gb:
        console.print(_sweep_table("tier GB", "gain per GB", _sweep(hybrid.sweep_tier_gb, engines.sweep_tier)))


def _sweep_table(unit: str, gain_name: str, rows: list[tuple[float, float | None, TimedResult]]) -> Table:
    table = Table(box=box.SIMPLE)
    for column in (unit, "usable tokens", "of hits", gain_name, "first token, mean s"):
        table.add_column(column, justify="right")
    for amount, gain, result in rows:
        assert result.engine.hybrid is not None
        usable, hits = result.engine.hybrid.usable_hit_tokens, result.engine.hit_tokens
        table.add_row(
            f"{amount:,.12g}",
            f"{usable:,}",
            _percent(usable / hits if hits else None),
            "-" if gain is None else f"{gain:,.0f}",
            _of(result.first_token, "mean"),
        )
    return table


def _of(spread: Spread | None, figure: str) -> str:
    return "-" if spread is None else f"{getattr(spread, figure):,.3f}"


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.2%}"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.2f}"


_FIGURES: tuple[tuple[str, Callable[[TimedResult], str]], ...] = (
    ("requests served", lambda result: f"{result.finished:,}"),
    ("refused, since they never fit", lambda result: f"{result.refused:,}"),
    ("first token, mean s", lambda result: _of(result.first_token, "mean")),
    ("first token, median s", lambda result: _of(result.first_token, "p50")),
    ("first token, p90 s", lambda result: _of(result.first_token, "p90")),
    ("first token, p99 s", lambda result: _of(result.first_token, "p99")),
    ("waiting, mean s", lambda result: _of(result.waiting, "mean")),
    ("waiting, p99 s", lambda result: _of(result.waiting, "p99")),
    ("most waiting at once", lambda result: f"{result.most_waiting:,}"),
    ("most running at once", lambda result: f"{result.most_running:,}"),
    ("most blocks held by them", lambda result: f"{result.engine.most_held_blocks:,}"),
    ("prompt tokens", lambda result: f"{result.engine.prompt_tokens:,}"),
    ("hit tokens", lambda result: f"{result.engine.hit_tokens:,}"),
    ("computed tokens", lambda result: f"{result.engine.computed_tokens:,}"),
    ("hit blocks", lambda result: f"{result.engine.hit_blocks:,}"),
    ("evicted blocks", lambda result: f"{result.engine.evicted_blocks:,}"),
    ("simulated seconds", lambda result: f"{result.seconds:,.1f}"),
    ("prefill busy", lambda result: _percent(result.prefill_busy)),
    ("requests per second", lambda result: _rate(result.requests_per_second)),
    ("output tokens per second", lambda result: _rate(result.output_tokens_per_second)),
)

_SNAPSHOT_FIGURES = (
    ("usable hit tokens", "usable_hit_tokens"),
    ("hit tokens to recompute", "recompute_tokens"),
    ("requests begun with a snapshot", "snapshot_hits"),
    ("snapshots taken", "saved_snapshots"),
    ("for which there was no slot", "refused_snapshots"),
    ("spills", "spills"),
    ("fault-ins", "fault_ins"),
    ("tier hits", "tier_hits"),
    ("tier misses", "tier_misses"),
)
