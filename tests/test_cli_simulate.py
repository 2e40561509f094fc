"""The command ``simulate`` as a user runs it: tables, JSON, bad arguments, and Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import metrale_numba
from metrale_numba.cli import main

PAGE = Path(__file__).parent.parent / "docs" / "simulate.rst"
LINES = [
    '{"timestamp": 0, "input_length": 1500, "output_length": 11, "hash_ids": [1, 2, 3]}\n',
    '{"timestamp": 500, "input_length": 1536, "output_length": 11, "hash_ids": [1, 2, 4]}\n',
    '{"timestamp": 500, "input_length": 1300, "output_length": 11, "hash_ids": [1, 5, 6]}\n',
]
RATES = ("--prefill-rate", "1000", "--decode-rate", "10")
RESULT = {
    "arrived",
    "finished",
    "refused",
    "first_token",
    "waiting",
    "most_waiting",
    "most_running",
    "seconds",
    "requests_per_second",
    "prompt_tokens_per_second",
    "output_tokens_per_second",
    "prefill_busy",
    "engine",
}
# Seconds that nothing takes, not even compiling on a busy machine.
PATIENCE = 300


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(LINES))
    return path


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(main, ["simulate", *map(str, arguments)])


def json_of(*arguments: object) -> dict[str, Any]:
    finished = run(*arguments, "--json")
    assert finished.exit_code == 0, finished.stderr
    assert finished.stderr == ""
    assert finished.stdout.count("\n") == 1
    fields: dict[str, Any] = json.loads(finished.stdout)
    return fields


def test_json_has_the_three_engines_and_what_they_were_asked_for(trace: Path) -> None:
    fields = json_of(trace, "--blocks", 10, *RATES)
    assert set(fields) == {
        "interrupted",
        "source",
        "blocks",
        "service",
        "with_cache",
        "without_cache",
        "endless",
        "hybrid",
    }
    assert (fields["interrupted"], fields["blocks"], fields["hybrid"]) == (False, 10, None)
    assert fields["source"]["trace"] == str(trace)
    assert fields["service"] == {
        "prefill_rate": 1_000,
        "decode_rate": 10,
        "at_once": 256,
        "speed": 1,
        "one_at_a_time": False,
    }
    for engine in ("with_cache", "without_cache", "endless"):
        assert set(fields[engine]) == RESULT
        assert set(fields[engine]["first_token"]) == {"mean", "p50", "p90", "p99"}


def test_figures_of_a_small_trace(trace: Path) -> None:
    fields = json_of(trace, *RATES)
    # First tokens at 1.5, 1.5 + 0.512 and 2.012 + 0.788; without a cache at 1.5, 3.036 and 4.336.
    assert fields["with_cache"]["first_token"]["mean"] == pytest.approx((1.5 + 1.512 + 2.3) / 3)
    assert fields["without_cache"]["first_token"]["mean"] == pytest.approx((1.5 + 2.536 + 3.836) / 3)
    assert fields["with_cache"]["seconds"] == pytest.approx(2.8 + 1)
    assert fields["endless"] == fields["with_cache"]
    engine = fields["with_cache"]["engine"]
    assert (engine["hit_blocks"], engine["hit_tokens"], engine["computed_tokens"]) == (3, 1_536, 2_800)
    assert fields["without_cache"]["engine"]["hit_blocks"] == 0


def test_speed_and_at_once_change_the_waiting(trace: Path) -> None:
    fields = json_of(trace, *RATES, "--speed", 10, "--at-once", 1)
    # Each begins when the one before has ended: 0, 2.5, 4.012; they came at 0, 0.05, 0.05.
    assert fields["with_cache"]["waiting"]["mean"] == pytest.approx((0 + 2.45 + 3.962) / 3)


def test_one_at_a_time_nobody_waits(trace: Path) -> None:
    fields = json_of(trace, *RATES, "--one-at-a-time")
    assert fields["with_cache"]["waiting"] == {"mean": 0, "p50": 0, "p90": 0, "p99": 0}
    assert fields["service"]["one_at_a_time"]


def test_requests_that_never_fit_are_counted(trace: Path) -> None:
    fields = json_of(trace, *RATES, "--blocks", 3)
    assert [fields["with_cache"][name] for name in ("arrived", "finished", "refused")] == [3, 2, 1]
    assert fields["endless"]["refused"] == 0


def test_a_hash_id_is_a_block_whatever_the_block_size(trace: Path) -> None:
    assert json_of(trace, *RATES, "--block-size", 4)["with_cache"] == json_of(trace, *RATES)["with_cache"]


def test_tokens_make_blocks_of_the_block_size(tmp_path: Path) -> None:
    trace = tmp_path / "tokens.jsonl"
    trace.write_text((json.dumps({"timestamp": 0, "tokens": list(range(40))}) + "\n") * 2)
    assert json_of(trace)["with_cache"]["engine"]["hit_tokens"] == 32
    assert json_of(trace, "--block-size", 8)["with_cache"]["engine"]["hit_tokens"] == 40


def test_slots_make_the_model_a_hybrid_one(trace: Path) -> None:
    fields = json_of(trace, *RATES, "--slots", 0)
    counts = fields["with_cache"]["engine"]["hybrid"]
    assert (counts["usable_hit_tokens"], counts["recompute_tokens"]) == (0, 1_536)
    assert fields["without_cache"]["engine"]["hybrid"] is None
    assert fields["hybrid"] == {
        "slots": 0,
        "tier_gb": 0,
        "snapshot_bytes": None,
        "tier_snapshots": 0,
        "snapshot_every": None,
        "snapshot_at": ["prompt-end"],
        "sweep_slots": [],
        "sweep_tier_gb": [],
    }


def test_snapshots_are_taken_where_the_options_say(trace: Path) -> None:
    def usable(*options: object) -> int:
        counts = json_of(trace, *RATES, "--slots", 8, *options)["with_cache"]["engine"]["hybrid"]
        return int(counts["usable_hit_tokens"])

    assert usable("--snapshot-at", "none") == 0
    assert usable("--snapshot-at", "none", "--snapshot-every", 1) == 1_536
    assert usable("--snapshot-at", "prompt-end,fork") == 1_024
    assert json_of(trace, "--slots", 8, "--snapshot-at", "tail, fork")["hybrid"]["snapshot_at"] == ["fork", "tail"]


def test_a_tier_has_room_for_as_many_snapshots_as_its_bytes_allow(trace: Path) -> None:
    fields = json_of(trace, "--slots", 1, "--tier-gb", 0.5, "--snapshot-bytes", 150_000_000)
    assert fields["hybrid"]["tier_snapshots"] == 3


def test_a_sweep_says_what_each_slot_and_each_gb_buys() -> None:
    workload = ("--requests", 300, "--sessions", 10, "--speed", 0.1)
    fields = json_of(*workload, "--sweep-slots", "16,0,4", "--sweep-tier-gb", "0,1.5", "--snapshot-bytes", 100_000_000)
    hybrid = fields["hybrid"]
    assert hybrid["slots"] == 16
    slots = hybrid["sweep_slots"]
    assert [row["slots"] for row in slots] == [0, 4, 16]
    usable = [row["engine"]["hybrid"]["usable_hit_tokens"] for row in slots]
    assert usable[0] == 0 < usable[1] < usable[2]
    assert [row["gained_tokens_per_slot"] for row in slots] == [None, usable[1] / 4, (usable[2] - usable[1]) / 12]
    assert usable[2] == fields["with_cache"]["engine"]["hybrid"]["usable_hit_tokens"]
    tier = hybrid["sweep_tier_gb"]
    gained = tier[1]["engine"]["hybrid"]["usable_hit_tokens"] - usable[2]
    assert [(row["tier_gb"], row["gained_tokens_per_gb"]) for row in tier] == [(0, None), (1.5, gained / 1.5)]
    assert gained > 0


def test_tables_name_every_figure_and_fit_80_columns(trace: Path) -> None:
    finished = run(
        *(trace, *RATES, "--blocks", 4, "--sweep-slots", "0,4", "--sweep-tier-gb", "0,1", "--snapshot-bytes", 10**9)
    )
    assert (finished.exit_code, finished.stderr) == (0, "")
    rows = [line.split() for line in finished.stdout.splitlines()]
    for row in (
        ["requests", "served", "3", "3", "3"],
        ["refused,", "since", "they", "never", "fit", "0", "0", "0"],
        ["hit", "blocks", "3", "0", "3"],
        ["usable", "hit", "tokens", "1,024", "1,024"],
        ["hit", "tokens", "to", "recompute", "512", "512"],
        ["0", "0", "0.00%", "-", "3.624"],
        ["4", "1,024", "66.67%", "256", "2.941"],
    ):
        assert row in rows
    assert max(map(len, finished.stdout.splitlines())) <= 80


def test_without_a_limit_there_is_no_third_column(trace: Path) -> None:
    assert "endless" not in run(trace).stdout
    assert "endless" in run(trace, "--blocks", 5).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tier-gb", "1"], "--tier-gb is for a hybrid model: say with --slots how many it has."),
        (["--snapshot-at", "fork"], "--snapshot-at is for a hybrid model: say with --slots how many it has."),
        (["--slots", "1", "--tier-gb", "1"], "--snapshot-bytes must say how many snapshots the tier has room for."),
        (["--slots", "1", "--snapshot-at", "end"], "'end' is none of prompt-end, tail, fork, and not none."),
        (["--sweep-slots", "1,x"], "'x' is not a valid integer range."),
        (["--sweep-slots", "-1"], "-1 is not in the range 0<=x<=10000000."),
        (["--sweep-slots", ",".join(map(str, range(33)))], "these are 33 amounts, and at most 32 can be tried."),
        (["--speed", "0"], "0.0 is not in the range 0.001<=x<=1000000000.0."),
        (["--prefill-rate", "nan"], "nan is no number."),
        (["--slots", "1", "--sweep-tier-gb", "0,nan", "--snapshot-bytes", "1"], "nan is no number."),
        (["missing.jsonl"], "missing.jsonl: cannot be opened: No such file or directory"),
    ],
)
def test_bad_arguments_are_told_of_and_end_with_status_2(arguments: list[str], message: str) -> None:
    finished = run(*arguments)
    assert (finished.exit_code, finished.stdout) == (2, "")
    assert message in " ".join(finished.stderr.split())


def test_a_bad_line_is_told_of_and_ends_with_status_2(trace: Path) -> None:
    trace.write_text(LINES[0] + "damaged\n")
    finished = run(trace)
    assert (finished.exit_code, finished.stdout) == (2, "")
    assert finished.stderr.startswith(f"Error: {trace}:2: not JSON")


def console_examples() -> list[tuple[list[str], list[str]]]:
    """The commands that the page shows, and the lines that it says they print."""
    examples = []
    for block in re.findall(r"code-block:: console\n\n((?:   .*\n|\n)+)", PAGE.read_text(encoding="utf-8")):
        lines = [line.strip() for line in block.replace("\\\n", "").splitlines() if line.strip()]
        examples.append((lines[0].removeprefix("$ metrale-numba simulate ").split(), lines[1:]))
    return examples


@pytest.mark.parametrize(("arguments", "lines"), console_examples(), ids=["times", "sweeps"])
def test_an_example_of_the_page_prints_what_it_says(arguments: list[str], lines: list[str]) -> None:
    printed = [line.strip() for line in run(*arguments).stdout.splitlines() if line.strip()]
    if lines[0] == "...":
        lines = lines[1:]
        printed = printed[-len(lines) :]
    assert printed == lines


def rows_of_places() -> list[list[str]]:
    """The rows of the table of places: workload, places, and the usable part by slots."""
    table = PAGE.read_text(encoding="utf-8").split("   * - workload")[1].split("\n\n")[0]
    rows = [re.findall(r"- ?(.*)", row) for row in table.split("   * ")]
    workload = ""
    for row in rows[1:]:
        row[0] = workload = row[0] or workload
    return rows[1:]


@pytest.mark.parametrize("row", [row for row in rows_of_places() if row[0] == "few-shot"], ids=lambda row: row[1])
def test_a_row_of_the_table_of_places_is_what_a_sweep_says(row: list[str]) -> None:
    fields = json_of(
        *("--workload", row[0], "--snapshot-at", row[1], "--sweep-slots", "4,16,64,256,1024"),
        *("--requests", 3_000, "--sessions", 200, "--blocks", 5_000, "--speed", 0.1),
    )
    assert row[2:] == [
        f"{swept['engine']['hybrid']['usable_hit_tokens'] / swept['engine']['hit_tokens']:.1%}"
        for swept in fields["hybrid"]["sweep_slots"]
    ]


def test_the_page_has_every_option_of_its_own_and_no_other() -> None:
    shared = {"--limit", "--workload", "--seed", "--requests", "--sessions", "--think-time", "--help"}
    options = {name for parameter in main.commands["simulate"].params for name in parameter.opts}
    documented = re.findall(r"^\.\. option:: (\S+)", PAGE.read_text(encoding="utf-8"), re.M)
    assert sorted(documented) == sorted(options - shared - {"trace"} | {"TRACE"})


def in_a_process(*arguments: object, **streams: Any) -> subprocess.Popen[bytes]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "COLUMNS")}
    package = str(Path(metrale_numba.__file__).parents[1])
    # Tests started in the background ignore Ctrl-C, and the command would inherit that; a handler it does not.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-W", "error", "-m", "metrale_numba", "simulate", *map(str, arguments)]
    process = subprocess.Popen(command, env={**inherited, "PYTHONPATH": package, "TERM": "xterm"}, **streams)
    signal.signal(signal.SIGINT, before)
    return process


def test_ctrl_c_prints_what_was_counted_and_ends_with_status_130() -> None:
    screen, stderr = pty.openpty()
    process = in_a_process("-", *RATES, "--json", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)
    os.close(stderr)
    assert process.stdin is not None
    process.stdin.write("".join(LINES).encode())
    process.stdin.flush()
    seen = b""
    # The bar shows that the first request is under way, since the pipe stays open.
    while b"requests" not in seen:
        seen += os.read(screen, 4_096)
    process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate(timeout=PATIENCE)
    os.close(screen)
    assert process.returncode == 130
    fields = json.loads(stdout)
    assert fields["interrupted"]
    assert fields["with_cache"]["arrived"] >= 1
    assert fields["with_cache"]["finished"] == 0


def test_no_bar_is_drawn_into_a_pipe(trace: Path) -> None:
    process = in_a_process(trace, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stderr) == (0, b"")
    assert stdout.startswith(b"Simulation of ")


def test_the_same_command_prints_the_same_to_the_last_digit() -> None:
    arguments = ("--requests", 200, "--blocks", 300, "--slots", 8, "--snapshot-at", "tail,fork", "--json")
    assert run(*arguments).stdout == run(*arguments).stdout
