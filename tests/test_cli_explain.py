"""The commands ``explain`` and ``tree``: what they say of traces and caches that are worked out by hand."""

from __future__ import annotations

import json
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import metrale_numba
from metrale_numba import RadixTree
from metrale_numba.cli import main
from metrale_numba.replay import Replay, chat_workload
from metrale_numba.replay.hits import HitCountingCache


@pytest.fixture(autouse=True)
def _ctrl_c_arrives() -> Iterator[None]:
    """Whoever started the tests in the background may have had them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


def output_of(*arguments: object) -> str:
    ran = run(*arguments)
    assert ran.exit_code == 0, ran.stderr
    assert ran.stderr == ""
    return ran.stdout


def json_of(*arguments: object) -> Any:
    return json.loads(output_of(*arguments, "--json"))


def trace_of(folder: Path, *prompts: list[int]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text(
        "".join(
            json.dumps({"timestamp": 100 * number, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids})
            + "\n"
            for number, ids in enumerate(prompts)
        )
    )
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Four blocks hold [1, 2], then [1, 3] and [4]; [5] makes 2 go; so the last finds 1 and not 2."""
    return trace_of(tmp_path, [1, 2], [1, 3], [4], [5], [1, 2, 9])


# ------------------------------------------------------------------------------------------------------------- explain


def test_explain_says_for_which_request_a_block_was_evicted_and_who_used_it_last(trace: Path) -> None:
    lines = output_of("explain", trace, "--request", 5, "--blocks", 4).splitlines()
    assert lines == [
        f"Request 5 of {trace}",
        "1,536 tokens at 400 ms; 4 blocks are cached before it is played.",
        "A block is a hash id of 512 tokens here, and has 1 in what follows.",
        "",
        "1 of 3 tokens match: each token is a block.",
        "The next block was cached and evicted 1 tick of the clock ago, 3 after its last use; 0 blocks went after it.",
        "The cache would have had to hold 1 block more to keep it.",
        "No snapshot is registered inside the match.",
        "It was used last by request 1, and evicted for request 4, 1 before this one.",
    ]


def test_explain_gives_the_same_as_json(trace: Path) -> None:
    fields = json_of("explain", trace, "--request", 5, "--blocks", 4)
    explanation = fields.pop("explanation")
    words = fields.pop("words")
    assert fields == {
        "source": {"trace": str(trace), "format": fields["source"]["format"]},
        "request": 5,
        "timestamp": 400,
        "input_length": 1536,
        "capacity": 4,
        "cached_blocks": 4,
        "tokens_per_block": 512,
        "evicted_for_request": 4,
        "last_used_by_request": 1,
    }
    assert explanation["reason"] == "evicted"
    assert explanation["matched_tokens"] == 1
    assert explanation["evicted"]["more_blocks"] == 1
    assert words[0] == "1 of 3 tokens match: each token is a block."


def test_explain_of_what_was_never_there_says_so(trace: Path) -> None:
    fields = json_of("explain", trace, "--request", 4, "--blocks", 4)
    assert fields["explanation"]["reason"] == "never_seen"
    assert fields["evicted_for_request"] is fields["last_used_by_request"] is None


def test_with_too_few_ghosts_explain_says_that_it_cannot_tell(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [1], [2], [3], [4], [1])
    assert json_of("explain", trace, "--request", 5, "--blocks", 1, "--ghosts", 2)["explanation"]["reason"] == (
        "not_cached"
    )
    assert json_of("explain", trace, "--request", 5, "--blocks", 1, "--ghosts", 3)["explanation"]["reason"] == "evicted"


def test_the_block_size_of_explain_changes_tokens_and_no_blocks(trace: Path) -> None:
    one = json_of("explain", trace, "--request", 5, "--blocks", 4)
    four = json_of("explain", trace, "--request", 5, "--blocks", 4, "--block-size", 4)
    assert four["explanation"]["matched_tokens"] == 4
    for field in ("reason", "matched_blocks", "evicted"):
        assert four["explanation"][field] == one["explanation"][field]


def test_of_a_trace_of_tokens_the_rest_that_fills_no_block_is_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "tokens.jsonl"
    path.write_text("".join(json.dumps({"tokens": list(range(length))}) + "\n" for length in (40, 40)))
    fields = json_of("explain", path, "--request", 2)
    assert fields["explanation"]["reason"] == "partial_block"
    assert fields["explanation"]["matched_tokens"] == 32
    assert fields["tokens_per_block"] == 16


def test_requests_named_by_explain_are_those_that_a_replay_shows(tmp_path: Path) -> None:
    rng = random.Random(2)
    prompts = [[rng.randint(0, 2) for _ in range(rng.randint(1, 4))] for _ in range(30)]
    # Ids that say where they stand, as those of traces do.
    prompts = [[sum(3**i * (id + 1) for i, id in enumerate(ids[: n + 1])) for n in range(len(ids))] for ids in prompts]
    trace = trace_of(tmp_path, *prompts)
    checked = 0
    for number in range(15, 31):
        fields = json_of("explain", trace, "--request", number, "--blocks", 6)
        if fields["evicted_for_request"] is None:
            continue
        prefix = prompts[number - 1][: fields["explanation"]["matched_blocks"] + 1]
        cached = [was_cached(trace, prefix, played) for played in range(number)]
        gone = max(played for played in range(1, number) if cached[played - 1] and not cached[played])
        assert fields["evicted_for_request"] == gone
        users = [user for user in range(1, gone) if prompts[user - 1][: len(prefix)] == prefix]
        assert fields["last_used_by_request"] == users[-1]
        checked += 1
    assert checked > 5


def was_cached(trace: Path, prefix: list[int], played: int) -> bool:
    """Whether a prefix is cached after so many requests of a trace."""
    cache = RadixTree(block_size=1)
    player = Replay(cache, capacity=6)
    with metrale_numba.replay.open_trace(trace) as requests:
        for _, request in zip(range(played), requests, strict=False):
            player.play(request)
    return cache.peek_matched_tokens(prefix) == len(prefix)


def test_a_request_that_there_is_not_is_refused(trace: Path) -> None:
    ran = run("explain", trace, "--request", 6)
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert ran.stderr == f"Error: there is no request 6: {trace} has 5\n"


def test_explain_needs_a_request(trace: Path) -> None:
    ran = run("explain", trace)
    assert ran.exit_code == 2
    assert "--request" in ran.stderr


def test_explain_of_the_workload_is_the_same_for_the_same_seed() -> None:
    arguments = ("explain", "--request", 300, "--requests", 300, "--blocks", 100, "--sessions", 20)
    assert json_of(*arguments) == json_of(*arguments)
    assert json_of(*arguments) != json_of(*arguments, "--seed", 1)


# ---------------------------------------------------------------------------------------------------------------- tree


def test_the_tree_of_a_trace_has_hits_and_joins_what_does_not_fork(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [1, 2, 3], [1, 2, 3, 4], [1, 2, 5], [6], [1, 2])
    assert output_of("tree", trace).splitlines() == [
        f"The cache of {trace}: 6 blocks",
        "└── adapter 0, 6 blocks of 1 token",
        "    ├── 2 blocks from token 0  hits 3  age 0  [1 2]",
        "    │   ├── 2 blocks from token 2  hits 1 to 0  age 5  [3 4]",
        "    │   └── 1 block from token 2  hits 0  age 3  [5]",
        "    └── 1 block from token 0  hits 0  age 2  [6]",
    ]


def test_the_tree_as_json_names_each_run_and_its_parent(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [1, 2, 3], [1, 2, 3, 4], [1, 2, 5], [6], [1, 2])
    fields = json_of("tree", trace)
    assert (fields["cached_blocks"], fields["interrupted"], fields["source"]["trace"]) == (6, False, str(trace))
    runs = {run["number"]: run for run in fields["runs"]}
    assert [run["tokens"] for run in runs.values()] == [[1, 2], [6], [5], [3, 4]]
    assert runs[0] == {
        "number": 0,
        "parent": None,
        "adapter_id": 0,
        "block_size": 1,
        "depth": 2,
        "blocks": 2,
        "blocks_below": 3,
        "hits": 3,
        "last_hits": 3,
        "references": 0,
        "age": 0,
        "snapshots": 0,
        "tokens": [1, 2],
    }
    assert [run["parent"] for run in runs.values()] == [None, None, 0, 0]


def test_the_tree_of_fewer_lines_is_the_hottest_part_and_says_how_much_more_there_is(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [1, 2, 3], [1, 2, 3, 4], [1, 2, 5], [6], [1, 2])
    assert output_of("tree", trace, "--lines", 2).splitlines()[2:] == [
        "    ├── 2 blocks from token 0  hits 3  age 0  [1 2]",
        "    │   ├── 2 blocks from token 2  hits 1 to 0  age 5  [3 4]",
        "    │   └── 1 more, 1 block",
        "    └── 1 more, 1 block",
    ]
    assert output_of("tree", trace, "--depth", 1).splitlines()[2:] == [
        "    ├── 2 blocks from token 0  hits 3  age 0  [1 2]",
        "    │   └── 2 more, 3 blocks",
        "    └── 1 block from token 0  hits 0  age 2  [6]",
    ]


def saved_cache(folder: Path) -> Path:
    """Two adapters with forks, held blocks and a snapshot."""
    cache = RadixTree(block_size=4)
    for adapter in (0, 7):
        for tokens in ([1] * 16 + [2] * 8, [1] * 16 + [3] * 20):
            cache.insert(tokens, range(len(tokens) // 4), adapter_id=adapter)
    cache.release([1] * 16 + [2] * 8)
    cache.insert_tail_snapshot([1] * 17, 3, session_hash=3)
    cache.save(folder / "cache")
    return folder / "cache"


def test_the_tree_of_a_saved_cache_has_references_snapshots_and_age(tmp_path: Path) -> None:
    path = saved_cache(tmp_path)
    assert output_of("tree", "--saved", path).splitlines() == [
        f"The cache of {path}: 22 blocks",
        "├── adapter 7, 11 blocks of 4 tokens",
        "│   └── 4 blocks from token 0  held by 2  age 0  [1 1 1 1 ...]",
        "│       ├── 5 blocks from token 16  held by 1  age 0  [3 3 3 3 ...]",
        "│       └── 2 blocks from token 16  held by 1  age 1  [2 2 2 2 ...]",
        "└── adapter 0, 11 blocks of 4 tokens",
        "    └── 4 blocks from token 0  held by 1  1 snapshot  age 2  [1 1 1 1 ...]",
        "        ├── 5 blocks from token 16  held by 1  age 2  [3 3 3 3 ...]",
        "        └── 2 blocks from token 16  age 3  [2 2 2 2 ...]",
    ]
    fields = json_of("tree", "--saved", path)
    assert fields["source"] == {"saved": str(path)}
    assert {run["hits"] for run in fields["runs"]} == {None}


def test_a_deep_tree_is_no_trouble(tmp_path: Path) -> None:
    cache = RadixTree(block_size=1)
    stem: list[int] = []
    for _ in range(1500):
        cache.insert([*stem, 2], range(len(stem) + 1))
        stem.append(1)
    cache.save(tmp_path / "deep")
    assert len(json_of("tree", "--saved", tmp_path / "deep", "--lines", 5000)["runs"]) > 2900


def test_an_empty_cache_is_a_tree_without_branches(tmp_path: Path) -> None:
    RadixTree().save(tmp_path / "empty")
    assert output_of("tree", "--saved", tmp_path / "empty") == f"The cache of {tmp_path / 'empty'}: 0 blocks\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--saved", "{trace}"), "is not a saved cache"),
        (("--saved", "{trace}.missing"), "cannot be read: No such file or directory"),
        (("--saved", "{trace}", "{trace}"), "--saved does not go with a TRACE"),
        (("--saved", "{trace}", "--blocks", "3"), "--saved does not go with --blocks"),
        (("--saved", "{trace}", "--seed", "3"), "--saved does not go with --seed"),
        (("{trace}.missing",), "cannot be opened"),
    ],
)
def test_what_is_no_cache_or_does_not_go_together_is_refused(
    trace: Path, arguments: tuple[str, ...], message: str
) -> None:
    ran = run("tree", *(argument.format(trace=trace) for argument in arguments))
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert message in ran.stderr


@pytest.mark.parametrize("command", ["explain", "tree"])
def test_ctrl_c_before_anything_was_played_is_130(command: str, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(f"metrale_numba.cli.{command}.compile_kernels", interrupt)
    ran = run(command, trace, *(["--request", 1] if command == "explain" else []))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert (ran.exit_code, ran.stdout) == (130, "")


def test_ctrl_c_shows_the_tree_of_what_was_played_by_then(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play = Replay.play

    def play_and_interrupt(player: Replay, request: Any) -> None:
        play(player, request)
        if player.requests == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Replay, "play", play_and_interrupt)
    ran = run("tree", trace)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert ran.exit_code == 130
    assert ran.stdout.splitlines() == [
        f"The cache of {trace}: 3 blocks",
        "├── interrupted: the cache as it was then",
        "└── adapter 0, 3 blocks of 1 token",
        "    └── 1 block from token 0  hits 1  age 0  [1]",
        "        ├── 1 block from token 1  hits 0  age 0  [3]",
        "        └── 1 block from token 1  hits 0  age 2  [2]",
    ]
    assert json.loads(run("tree", trace, "--json").stdout)["interrupted"]


# ---------------------------------------------------------------------------------------------------------------- hits


def test_a_cache_that_counts_hits_answers_as_any_other_and_counts_right() -> None:
    counting, plain = HitCountingCache(block_size=1), RadixTree(block_size=1)
    one, other = Replay(counting, capacity=300), Replay(plain, capacity=300)
    hits: dict[tuple[int, ...], int] = {}
    for request in chat_workload(3, requests=300, sessions=10):
        ids = tuple(request.hash_ids.tolist())
        matched = plain.peek_matched_tokens(list(ids))
        for end in range(1, len(ids) + 1):
            hits[ids[:end]] = hits.get(ids[:end], -1) + 1 if end <= matched else 0
        one.play(request)
        other.play(request)
    assert one.result().hit_blocks == other.result().hit_blocks
    assert one.result().evicted_blocks > 0
    prefixes: list[tuple[int, ...]] = []
    for node in counting.iter_nodes():
        prefixes.append((*(prefixes[node.parent] if node.parent is not None else ()), *node.tokens.tolist()))
        assert counting.hits_of(node.block) == hits[prefixes[-1]]
    assert len(prefixes) > 100


# ------------------------------------------------------------------------------------------------------------- its page

PAGE = Path(__file__).parent.parent / "docs" / "explain.rst"


@pytest.mark.parametrize("command", ["explain", "tree"])
def test_the_page_has_every_option_of_the_command_itself(command: str) -> None:
    of_replay = {name for parameter in main.commands["replay"].params for name in parameter.opts}
    mine = {name for parameter in main.commands[command].params for name in parameter.opts}
    section = (
        PAGE.read_text(encoding="utf-8").split(f".. program:: metrale-numba {command}\n")[1].split(".. program::")[0]
    )
    documented = re.findall(r"^\.\. option:: (\S+)", section, re.M)
    assert set(documented) == mine - (of_replay - {"--blocks", "--block-size", "--json"})


@pytest.mark.parametrize(
    ("command", "arguments"), [("explain", ("--request", 3)), ("tree", ())], ids=["explain", "tree"]
)
def test_the_page_has_every_field_of_the_json_object(command: str, arguments: tuple[object, ...], trace: Path) -> None:
    fields = json_of(command, trace, *arguments)
    table = PAGE.read_text(encoding="utf-8").split(f"   * - field of {command}\n")[1].split("\n\n")[0]
    assert re.findall(r"^   \* - ``(\w+)``$", table, re.M) == list(fields)
    if command == "tree":
        assert all(f"``{name}``" in table for name in fields["runs"][0])


def test_the_page_has_every_reason() -> None:
    documented = re.findall(
        r"^   \* - ``(\w+)``\n     - \D", PAGE.read_text(encoding="utf-8").split("One prompt")[1], re.M
    )
    docstring = metrale_numba.Explanation.__doc__ or ""
    assert documented[:8] == re.findall(r"\* ``\"(\w+)\"``", docstring)
    assert len(documented) >= 8
