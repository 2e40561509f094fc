"""Reports: the record of a replay against its counts, and pages and pictures by what stands in them."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from metrale_numba import RadixTree
from metrale_numba.cli import main
from metrale_numba.replay import Replay, Request, workload
from metrale_numba.replay.ages import AgeCounter
from metrale_numba.replay.hybrid import SnapshotRoom
from metrale_numba.replay.recorder import Record, Recorder
from metrale_numba.replay.report import ReportError, check_report, write_report

COUNTS = ("requests", "blocks", "hit_blocks", "evicted_blocks", "cached_blocks", "block_hit_rate", "token_hit_rate")
AGES = ("lifetime", "idle_at_eviction", "idle_at_hit")


def request(*ids: int, at: float = 0.0, **fields: int) -> Request:
    return Request(at, len(ids) * 512, 5, np.array(ids, dtype=np.uint32), **fields)


def recorded(requests: Iterable[Request], capacity: int | None = None, snapshots: SnapshotRoom | None = None) -> Record:
    recorder = Recorder(capacity=capacity, snapshots=snapshots)
    for each in requests:
        recorder.play(each)
    while recorder.step():
        pass
    record = recorder.record()
    recorder.close()
    return record


def chats(requests: int = 400) -> list[Request]:
    return list(workload("chat", 0, requests, 20))


def tokens(prompt: Sequence[int], at: float = 0.0) -> Request:
    return Request(at, len(prompt), 1, np.array(prompt, dtype=np.uint32), tokens_per_id=1)


# -------------------------------------------------------------------------------------------------------------- record


@pytest.mark.parametrize("capacity", [None, 3, 50, 1_000])
@pytest.mark.parametrize("name", ["chat", "agent", "retrieval", "few-shot"])
def test_a_recorded_replay_counts_what_a_plain_one_counts(name: str, capacity: int | None) -> None:
    replay = Replay(RadixTree(block_size=1), capacity=capacity)
    for each in workload(name, 1, 300, 20):
        replay.play(each)
    plain = replay.result()
    result = recorded(workload(name, 1, 300, 20), capacity).result
    assert [getattr(result, count) for count in COUNTS] == [getattr(plain, count) for count in COUNTS]


@pytest.mark.parametrize("capacity", [None, 3, 100])
def test_the_curve_at_the_capacity_is_the_replay(capacity: int | None) -> None:
    record = recorded(chats(), capacity)
    point = record.curve.point(record.curve.distinct_blocks if capacity is None else capacity)
    assert (point.hit_blocks, point.evicted_blocks) == (record.result.hit_blocks, record.result.evicted_blocks)
    assert record.hit_tokens / record.curve.tokens == record.result.token_hit_rate


@pytest.mark.parametrize("requests", [1, 2, 119, 120, 121, 240, 241, 1_000])
def test_intervals_add_up_to_the_replay(requests: int) -> None:
    record = recorded(chats(requests), 100)
    intervals = record.intervals
    assert sum(each.requests for each in intervals) == requests
    assert sum(each.blocks for each in intervals) == record.result.blocks
    assert sum(each.hit_blocks for each in intervals) == record.result.hit_blocks
    assert sum(each.evicted_blocks for each in intervals) == record.result.evicted_blocks
    assert [each.first_request for each in intervals] == list(
        np.cumsum([1, *(each.requests for each in intervals[:-1])])
    )


@pytest.mark.parametrize("requests", [121, 500, 1_000])
def test_intervals_are_equally_long_but_for_the_last(requests: int) -> None:
    lengths = [each.requests for each in recorded(chats(requests), 100).intervals]
    assert len(set(lengths[:-1])) == 1
    assert lengths[0] / 2 <= lengths[-1] < lengths[0] * 1.5
    assert len(lengths) <= 120


def test_the_first_eviction_is_told_with_its_request_and_time() -> None:
    record = recorded([request(1, 2, at=10), request(3, at=20), request(4, at=30), request(5, at=40)], capacity=3)
    assert record.first_eviction is not None
    assert (record.first_eviction.first_request, record.first_eviction.begins) == (3, 30)


def test_without_a_limit_there_is_no_first_eviction() -> None:
    assert recorded(chats(50)).first_eviction is None


def test_ages_are_told_in_requests_and_in_time() -> None:
    record = recorded(
        [request(1, at=0), request(2, at=10), request(1, at=30), request(3, at=70), request(4, at=150)], capacity=2
    )
    # 2 is evicted for 3, and 1 for 4 after it was hit by the third request.
    in_requests, in_time = record.in_requests, record.in_milliseconds
    assert (in_requests.lifetime.values.tolist(), in_time.lifetime.values.tolist()) == ([2, 4], [60, 150])
    assert (in_requests.idle_at_eviction.values.tolist(), in_requests.idle_at_eviction.counts.tolist()) == ([2], [2])
    assert in_time.idle_at_eviction.values.tolist() == [60, 120]
    assert (in_requests.idle_at_hit.values.tolist(), in_time.idle_at_hit.values.tolist()) == ([2], [30])
    assert record.never_hit_blocks == 1


def test_every_evicted_and_every_hit_block_has_an_age() -> None:
    record = recorded(chats(), 100)
    totals = (record.result.evicted_blocks, record.result.evicted_blocks, record.result.hit_blocks)
    for ages in (record.in_requests, record.in_milliseconds):
        assert tuple(getattr(ages, name).total for name in AGES) == totals


def test_time_that_goes_back_stands_still() -> None:
    record = recorded([request(1, at=50), request(1, at=20), request(1, at=60)])
    assert record.in_milliseconds.idle_at_hit.values.tolist() == [0, 10]
    assert record.milliseconds == 10


@pytest.mark.parametrize("ages", [[0], [1, 1, 2_047], [2_048, 2_049, 2_050], [10**6, 10**9, 10**12, 2**53 - 1]])
def test_ages_are_rounded_down_by_less_than_a_part_in_a_thousand(ages: list[int]) -> None:
    counter = AgeCounter()
    counter.add(np.array(ages, dtype=np.int64))
    kept = np.repeat(*counter.ages())
    assert np.all(kept <= ages)
    assert np.all(np.array(ages) - kept <= np.array(ages) / 1_024)
    assert kept[np.array(ages) < 2_048].tolist() == [age for age in ages if age < 2_048]


def test_percentiles_of_ages_are_ages_at_or_below_which_so_many_are() -> None:
    counter = AgeCounter()
    counter.add(np.array([1, 2, 3, 4, 100], dtype=np.int64))
    assert [counter.ages().percentile(percent) for percent in (1, 20, 21, 50, 80, 81, 100)] == [1, 1, 2, 3, 4, 100, 100]
    assert AgeCounter().ages().percentile(50) is None


def naive_prefixes(requests: Sequence[Request], hit_blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Blocks in front, blocks and hits of every run of blocks that were hit equally often."""
    hits: Counter[tuple[int, ...]] = Counter()
    for each, hit in zip(requests, hit_blocks, strict=True):
        ids = tuple(each.hash_ids.tolist())
        hits.update(ids[:depth] for depth in range(1, hit + 1))
    found = []
    for path, count in hits.items():
        if len(path) == 1 or hits[path[:-1]] != count:
            run = [path]
            while longer := [each for each in hits if each[:-1] == run[-1] and hits[each] == count]:
                run += longer
            found.append((len(path) - 1, len(run), count))
    return found


@pytest.mark.parametrize("capacity", [None, 40])
def test_the_hottest_prefixes_are_those_of_a_naive_search(capacity: int | None) -> None:
    requests = chats(120)
    recorder = Recorder(capacity=capacity)
    hit_blocks, before = [], 0
    for each in requests:
        recorder.play(each)
        hit_blocks.append(recorder.result().hit_blocks - before)
        before += hit_blocks[-1]
    found = [(each.begins, each.blocks, each.hits) for each in recorder.record().prefixes]
    recorder.close()
    naive = naive_prefixes(requests, hit_blocks)
    assert set(found) <= set(naive)
    saved = sorted((blocks * hits for _, blocks, hits in naive), reverse=True)
    assert [blocks * hits for _, blocks, hits in found] == saved[: len(found)]
    assert len(found) == min(len(naive), 12)


def test_prefixes_tell_their_requests_and_the_first_of_them() -> None:
    record = recorded([request(9), request(1, 2, 3), request(1, 2, 4), request(1, 2, 3), request(1, 2, 3)])
    shown = [
        (each.first_request, each.begins, each.blocks, each.requests, each.hits, each.hit_blocks)
        for each in record.prefixes
    ]
    assert shown == [(2, 0, 2, 4, 3, 6), (2, 2, 1, 3, 2, 2)]


def test_prefixes_of_two_adapters_are_two() -> None:
    record = recorded([request(1, adapter=each) for each in (0, 7, 0, 7, 0)])
    assert [(each.requests, each.hits) for each in record.prefixes] == [(3, 2), (2, 1)]


def test_so_many_waiting_requests_that_nothing_is_learnt_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metrale_numba.replay.recorder._MOST_WAITING", 10)
    record = recorded(chats(100))
    assert record.waiting is None
    assert record.result.requests == 100


# ---------------------------------------------------------------------------------------------------------------- page


class Page(HTMLParser):
    """A page, taken apart."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.figures: dict[str, str] = {}
        self.parts: dict[str, str] = {}
        self._figure = self._part = ""
        self.feed(content)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.tags.append((tag, given))
        self._figure = given.get("data-figure") or ""
        if tag == "section":
            self._part = given.get("id") or ""

    def handle_data(self, data: str) -> None:
        if self._figure:
            self.figures[self._figure] = data
            self._figure = ""
        self.parts[self._part] = self.parts.get(self._part, "") + " " + data.strip()


@pytest.fixture(autouse=True)
def _packages(request: pytest.FixtureRequest) -> None:
    if request.node.name.startswith(("test_a_page", "test_a_picture")):
        pytest.importorskip("jinja2")
        pytest.importorskip("matplotlib")


def page(record: Record, tmp_path: Path, *, title: str = "trace.jsonl", interrupted: bool = False) -> str:
    write_report(record, tmp_path / "out.html", title=title, interrupted=interrupted)
    return (tmp_path / "out.html").read_text(encoding="utf-8")


SHAPES: dict[str, tuple[list[Request], int | None]] = {
    "chats": (chats(300), 100),
    "no limit": (chats(50), None),
    "nothing": ([], None),
    "no block": ([request()], 10),
    "one request": ([request(1, 2, 3)], None),
    "one block": ([request(1)], 1),
    "the same twice": ([request(1, 2), request(1, 2, at=7)], 10),
    "three blocks": (chats(50), 3),
    "no times": ([request(1, each, each + 1) for each in range(2, 40)], 10),
    "tokens": ([tokens([7] * 32 + [each % 5] * 20, at=each) for each in range(40)], 6),
    "far apart": ([request(each % 7, at=each * 1e9) for each in range(30)], 4),
}


@pytest.fixture(params=list(SHAPES))
def shape(request: pytest.FixtureRequest) -> Record:
    requests, capacity = SHAPES[request.param]
    return recorded(requests, capacity)


def test_a_page_asks_for_nothing_from_elsewhere(shape: Record, tmp_path: Path) -> None:
    content = page(shape, tmp_path)
    assert not re.search(r"https?:|//|@import|<script|<link|<img|<iframe|\bsrc=|javascript:", content)
    assert set(re.findall(r"url\((.)", content)) <= {"#"}
    assert set(re.findall(r'href="(.)', content)) <= {"#"}
    assert "default-src 'none'" in content


def test_a_page_says_in_words_what_each_chart_shows(shape: Record, tmp_path: Path) -> None:
    drawings = [given for tag, given in Page(page(shape, tmp_path)).tags if tag == "svg"]
    assert all(each["role"] == "img" and len(each["aria-label"] or "") > 40 for each in drawings)
    assert bool(drawings) == bool(shape.result.blocks)


def test_a_page_has_every_name_once(shape: Record, tmp_path: Path) -> None:
    content = page(shape, tmp_path)
    names = re.findall(r'\bid="([^"]*)"', content)
    assert len(names) == len(set(names))
    assert set(re.findall(r'(?:url\(|href=")#([^)"]*)', content)) <= set(names)


def test_a_page_shows_the_counts_of_the_replay(shape: Record, tmp_path: Path) -> None:
    shown, result = Page(page(shape, tmp_path)).figures, shape.result
    for count in ("requests", "evicted_blocks", "cached_blocks"):
        assert shown[count] == f"{getattr(result, count):,}"
    for rate in ("block_hit_rate", "token_hit_rate"):
        assert shown[rate] == ("-" if getattr(result, rate) is None else f"{getattr(result, rate):.2%}")


def test_a_page_shows_the_endless_cache_and_what_most_of_its_hits_take(tmp_path: Path) -> None:
    record = recorded(chats(), 100)
    shown = Page(page(record, tmp_path)).figures
    assert shown["endless_hit_rate"] == f"{record.curve.hit_blocks[-1] / record.curve.blocks:.2%}"
    assert shown["target_capacity"] == f"{record.curve.smallest_capacity(90):,}"


def test_a_page_shows_the_simulated_times(tmp_path: Path) -> None:
    record = recorded([request(1, 2, 3, 4, at=each * 1_000) for each in range(10)])
    assert record.waiting is not None
    content = Page(page(record, tmp_path))
    # 2,048 tokens at 20,000 a second; with the cache all but the first request compute one token.
    assert "102 ms" in content.parts["first-token"]
    assert content.figures["first_token_p50"] == "0.05 ms"
    assert "endless" not in content.parts["first-token"]


def test_a_page_shows_the_prefixes(tmp_path: Path) -> None:
    record = recorded([request(9), request(1, 2, 3), request(1, 2, 4), request(1, 2, 3), request(1, 2, 3)])
    words = " ".join(Page(page(record, tmp_path)).parts["prefixes"].split())
    assert "1 to 2 2 4 3 6 75.0%" in words
    assert "3 2 3 2 2 25.0%" in words


def test_a_page_shows_ages_of_blocks(tmp_path: Path) -> None:
    requests = [request(1, at=0), request(2, at=10), request(1, at=30), request(3, at=70), request(4, at=150)]
    parts = Page(page(recorded(requests, 2), tmp_path)).parts
    assert (
        "Of 2 evicted blocks, half were evicted no more than 2 requests (60 ms) after their insert."
        in parts["lifetime"]
    )
    assert "1 (50.0%) were never hit." in parts["lifetime"]
    assert "Half of the hits came no more than 2 requests (30 ms)" in parts["idle"]


def test_a_page_without_evictions_says_so(tmp_path: Path) -> None:
    parts = Page(page(recorded(chats(50)), tmp_path)).parts
    assert "Nothing was evicted. The cache had no limit; --blocks N sets one." in parts["lifetime"]
    assert "never had to evict" in parts["over-time"]


def test_a_page_without_times_in_the_trace_shows_no_time(tmp_path: Path) -> None:
    requests, capacity = SHAPES["no times"]
    parts = Page(page(recorded(requests, capacity), tmp_path)).parts
    assert "time of the trace" not in parts["lifetime"] + parts["over-time"]


def test_a_page_of_a_hybrid_model_shows_its_snapshots(tmp_path: Path) -> None:
    record = recorded(chats(200), 2_000, SnapshotRoom(20, 50))
    assert record.waiting is not None
    counts = record.waiting.with_cache.result.engine.hybrid
    assert counts is not None
    words = " ".join(Page(page(record, tmp_path)).parts["snapshots"].split())
    assert "20 slots and a tier for 50 snapshots" in words
    for name, count in (
        ("Usable hit tokens", counts.usable_hit_tokens),
        ("Snapshots taken", counts.saved_snapshots),
        ("Spilled to the tier", counts.spills),
        ("Brought back from it", counts.fault_ins),
    ):
        assert f"{name} {count:,} " in words


def test_a_page_of_another_model_has_no_snapshots(tmp_path: Path) -> None:
    assert "snapshots" not in Page(page(recorded(chats(50)), tmp_path)).parts


def test_a_page_says_why_it_shows_no_simulated_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metrale_numba.replay.recorder._MOST_WAITING", 10)
    assert "metrale-numba simulate" in Page(page(recorded(chats(100)), tmp_path)).parts["first-token"]


def test_a_page_says_how_many_requests_were_refused(tmp_path: Path) -> None:
    parts = Page(page(recorded([request(1, 2, 3, 4), request(1)], 3), tmp_path)).parts
    assert "1 request needed more blocks than there are" in parts["first-token"]


def test_a_page_does_not_take_a_name_for_markup(tmp_path: Path) -> None:
    content = page(recorded(chats(10)), tmp_path, title="<script>$x$ & \udcff")
    assert "&lt;script&gt;$x$ &amp; ?" in content
    assert "<script" not in content


def test_a_page_says_that_the_replay_was_interrupted(tmp_path: Path) -> None:
    record = recorded(chats(10))
    assert "Interrupted" in page(record, tmp_path, interrupted=True)
    assert "Interrupted" not in page(record, tmp_path)


def test_a_page_is_the_same_for_the_same_record(tmp_path: Path) -> None:
    record = recorded(chats(50), 100)
    assert page(record, tmp_path) == page(record, tmp_path)


def test_a_page_leaves_no_colour_to_the_charts(tmp_path: Path) -> None:
    drawings = re.findall(r"<svg.*?</svg>", page(recorded(chats(300), 100), tmp_path), flags=re.DOTALL)
    colours = {colour for each in drawings for colour in re.findall(r"(?:fill|stroke): ([^;\"]+)", each)}
    assert colours == {"none", *(f"var(--{name})" for name in ("ink", "faint", "grid", "blue", "red", "green"))}


# ------------------------------------------------------------------------------------------------------------- picture


@pytest.mark.parametrize(("name", "begins"), [("out.svg", b"<?xml"), ("out.png", b"\x89PNG"), ("OUT.PDF", b"%PDF")])
def test_a_picture_has_the_format_of_its_name(name: str, begins: bytes, tmp_path: Path) -> None:
    write_report(recorded(chats(50), 100), tmp_path / name, title="trace")
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_a_picture_can_be_drawn_of_whatever_has_a_block(shape: Record, tmp_path: Path) -> None:
    if shape.result.blocks:
        write_report(shape, tmp_path / "out.svg", title="$trace")
        words = re.sub(r"<[^>]*>", " ", (tmp_path / "out.svg").read_text())
        assert "Replay of $trace" in words
        assert f"Hit rate {shape.result.block_hit_rate:.2%} in blocks" in words
    else:
        with pytest.raises(ReportError, match="there is nothing to draw"):
            write_report(shape, tmp_path / "out.svg", title="trace")


# ------------------------------------------------------------------------------------------------------------- command


def replay(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["replay", *map(str, arguments)])


def test_a_page_comes_of_the_command_beside_its_tables(tmp_path: Path) -> None:
    ran = replay("--requests", 50, "--blocks", 100, "--report", tmp_path / "out.html")
    assert ran.exit_code == 0, ran.output
    assert "Replay of the built-in chat workload, seed 0" in ran.stdout
    assert Page((tmp_path / "out.html").read_text()).figures["requests"] == "50"


def test_a_page_of_the_command_shows_slots_and_tier(tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    ran = replay("--requests", 50, "--slots", 5, "--tier-snapshots", 9, "--report", out)
    assert ran.exit_code == 0, ran.output
    assert "5 slots and a tier for 9 snapshots" in out.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report", "out.txt"], "the name must end with one of .html, .svg, .png, .pdf"),
        (["--report", "nowhere/out.html"], "there is no such directory"),
        (["--slots", 5], "--slots is for a report"),
        (["--tier-snapshots", 5, "--report", "out.html"], "--tier-snapshots is for a hybrid model"),
    ],
)
def test_the_command_refuses_what_cannot_be_before_it_plays(arguments: list[object], message: str) -> None:
    ran = replay(*arguments)
    assert ran.exit_code == 2
    assert message in " ".join(re.sub("[│╭╮╰╯─]", " ", ran.stderr).split())


def test_a_page_that_cannot_be_written_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "out.html").mkdir()
    ran = replay("--requests", 5, "--report", tmp_path / "out.html")
    assert ran.exit_code == 1
    assert ran.stderr == f"Error: the report {tmp_path / 'out.html'} cannot be written: Is a directory\n"
    assert "hit rate in blocks" in ran.stdout


@pytest.mark.parametrize(
    ("missing", "name"), [("jinja2", "out.html"), ("matplotlib", "out.html"), ("matplotlib", "out.png")]
)
def test_without_a_package_the_extra_is_named(
    missing: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in {"jinja2", "matplotlib"} - {missing}:
        pytest.importorskip(each)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ReportError, match=r"pip install 'metrale-numba\[report\]'"):
        check_report(tmp_path / name)


def test_a_picture_needs_no_jinja(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    check_report(tmp_path / "out.png")


def test_neither_package_is_loaded_unless_a_report_is_made() -> None:
    code = (
        "import sys; from metrale_numba.cli import main; main(['replay', '--requests', '5'], standalone_mode=False);"
        " print({'jinja2', 'matplotlib'} & set(sys.modules))"
    )
    package = str(Path(importlib.import_module("metrale_numba").__file__ or "").parents[1])
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {package!r}); {code}"],
        capture_output=True,
        check=True,
        text=True,
    )
    assert ran.stdout.endswith("set()\n")
