"""The command `policies` as a user runs it: its table, JSON, CSV and picture, Ctrl-C, and what it refuses."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import metrale_numba
from metrale_numba.cli import main
from metrale_numba.cli import policies as command
from metrale_numba.replay import TraceReader, chat_workload, workload
from metrale_numba.replay.policies import POLICIES, simulate
from metrale_numba.replay.prefix_nodes import PrefixNodes

# Of two blocks, LRU has evicted the 1 when it is asked for again; the others have not.
LINES = [
    '{"timestamp": 0, "input_length": 512, "output_length": 5, "hash_ids": [1]}\n',
    '{"timestamp": 1, "input_length": 512, "output_length": 5, "hash_ids": [1]}\n',
    '{"timestamp": 2, "input_length": 100, "output_length": 5, "hash_ids": [2]}\n',
    '{"timestamp": 3, "input_length": 512, "output_length": 5, "hash_ids": [3]}\n',
    '{"timestamp": 4, "input_length": 512, "output_length": 5, "hash_ids": [1]}\n',
]
TOKENS = ['{"tokens": [1, 2, 3, 4, 5]}\n', '{"tokens": [1, 2, 3, 4]}\n']
FIELDS = ["capacity", "policy", "hit_blocks", "evicted_blocks", "cached_blocks"]
RATES = ["block_hit_rate", "token_hit_rate", "of_optimum"]
PAGE = Path(__file__).parent.parent / "docs" / "policies.rst"
# Seconds that nothing takes, not even compiling on a busy machine.
PATIENCE = 300


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(LINES))
    return path


@pytest.fixture
def _ctrl_c_arrives() -> Iterator[None]:
    """Whoever started the tests in the background may have had them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["policies", *map(str, arguments)])


def json_of(*arguments: object) -> dict[str, Any]:
    finished = run(*arguments, "--json")
    assert (finished.exit_code, finished.stderr) == (0, "")
    assert finished.stdout.count("\n") == 1
    fields: dict[str, Any] = json.loads(finished.stdout)
    return fields


def text_of(picture: Path) -> str:
    return picture.read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------- results


def test_json_is_one_object_with_a_result_for_each_capacity_and_policy(trace: Path) -> None:
    fields = json_of(trace, "--blocks", "2,3")
    assert set(fields) == {"interrupted", "source", "requests", "blocks", "distinct_blocks", "results"}
    assert (fields["interrupted"], fields["requests"], fields["blocks"], fields["distinct_blocks"]) == (False, 5, 5, 3)
    assert fields["source"]["trace"] == str(trace)
    assert [list(result) for result in fields["results"]] == [FIELDS + RATES] * 2 * len(POLICIES)
    expected = [(capacity, policy) for capacity in (2, 3) for policy in POLICIES]
    assert [(result["capacity"], result["policy"]) for result in fields["results"]] == expected


def test_counts_rates_and_part_of_the_optimum_of_a_small_trace(trace: Path) -> None:
    results = {result["policy"]: result for result in json_of(trace, "--blocks", 2)["results"]}
    assert [results["lru"][name] for name in FIELDS] == [2, "lru", 1, 2, 2]
    assert [results["lru"][name] for name in RATES] == [1 / 5, 512 / 2_148, 1 / 2]
    assert [results["sieve"][name] for name in FIELDS] == [2, "sieve", 2, 1, 2]
    assert [results["optimum"][name] for name in RATES] == [2 / 5, 1_024 / 2_148, 1.0]


def test_where_the_optimum_hits_nothing_nothing_is_part_of_it(trace: Path) -> None:
    trace.write_text(LINES[0])
    results = json_of(trace, "--blocks", 2)["results"]
    assert [result["of_optimum"] for result in results] == [None] * len(POLICIES)
    assert ["lru", "0", "0", "0.00%", "0.00%", "-"] in [line.split()[1:] for line in run(trace).stdout.splitlines()]


def test_the_built_in_workload_has_the_counts_of_simulate() -> None:
    results = json_of("--requests", 300, "--sessions", 10, "--seed", 3, "--blocks", 100)["results"]
    nodes = PrefixNodes.of(chat_workload(3, requests=300, sessions=10))
    assert [result["hit_blocks"] for result in results] == [simulate(nodes, 100, each).hit_blocks for each in POLICIES]


def test_csv_has_the_same_rows_as_json(trace: Path) -> None:
    finished = run(trace, "--blocks", "2,3", "--csv")
    assert (finished.exit_code, finished.stderr) == (0, "")
    rows = list(csv.DictReader(io.StringIO(finished.stdout)))
    results = json_of(trace, "--blocks", "2,3")["results"]
    assert rows == [{name: str(value) for name, value in result.items()} for result in results]


def test_the_table_has_a_row_for_each_policy_and_fits_80_columns(trace: Path) -> None:
    finished = run(trace, "--blocks", "2,3")
    assert (finished.exit_code, finished.stderr) == (0, "")
    rows = [line.split() for line in finished.stdout.splitlines()]
    assert ["5", "requests,", "5", "blocks,", "3", "of", "which", "differ"] in rows
    assert ["2", "lru", "1", "2", "20.00%", "23.84%", "50.00%"] in rows
    assert ["sieve", "2", "1", "40.00%", "47.67%", "100.00%"] in rows
    assert ["3", "lru", "2", "0", "40.00%", "47.67%", "100.00%"] in rows
    assert max(map(len, finished.stdout.splitlines())) <= 80


def test_capacities_are_sorted_and_each_is_played_once(trace: Path) -> None:
    results = json_of(trace, "--blocks", "9, 2,9")["results"]
    assert [result["capacity"] for result in results] == [2] * len(POLICIES) + [9] * len(POLICIES)


def test_by_default_capacities_are_parts_of_the_blocks_that_differ() -> None:
    fields = json_of("--requests", 300)
    blocks = fields["distinct_blocks"]
    expected = [blocks * percent // 100 for percent in (1, 3, 10, 30)]
    assert sorted({result["capacity"] for result in fields["results"]}) == expected


def test_by_default_no_capacity_is_without_blocks(trace: Path) -> None:
    assert {result["capacity"] for result in json_of(trace)["results"]} == {1}


def test_block_size_cuts_a_trace_of_tokens(trace: Path) -> None:
    trace.write_text("".join(TOKENS))
    fields = json_of(trace, "--block-size", 2, "--blocks", 9)
    assert (fields["blocks"], fields["distinct_blocks"]) == (4, 2)
    assert json_of(trace, "--blocks", 9)["blocks"] == 0


def test_limit_stops_before_what_lies_behind_it(trace: Path) -> None:
    trace.write_text(LINES[0] + LINES[1] + "damaged\n")
    assert json_of(trace, "--limit", 2)["requests"] == 2


# ------------------------------------------------------------------------------------------------------------- picture


@pytest.mark.parametrize(("name", "begins"), [("out.svg", b"<?xml"), ("out.png", b"\x89PNG")])
def test_a_picture_is_drawn_beside_the_results(trace: Path, tmp_path: Path, name: str, begins: bytes) -> None:
    pytest.importorskip("matplotlib")
    finished = run(trace, "--blocks", "2,3", "--plot", tmp_path / name)
    assert (finished.exit_code, finished.stderr) == (0, "")
    assert finished.stdout == run(trace, "--blocks", "2,3").stdout
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_the_picture_names_policies_capacities_and_the_trace(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(trace, "--blocks", "2,30000", "--plot", tmp_path / "out.svg")
    words = text_of(tmp_path / "out.svg")
    for word in (*POLICIES, "30,000", "capacity in blocks", "hit rate in blocks", "Eviction policies: trace.jsonl"):
        assert f">{word}<" in words


def test_the_same_results_give_the_same_picture(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "two.svg"):
        run(trace, "--blocks", "2,3", "--plot", tmp_path / name)
    assert text_of(tmp_path / "one.svg") == text_of(tmp_path / "two.svg")


def test_a_name_that_looks_like_a_formula_is_no_formula(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace = trace.rename(trace.with_name("$x_{$.jsonl"))
    assert run(trace, "--plot", tmp_path / "out.svg").exit_code == 0
    assert ": $x_{$.jsonl<" in text_of(tmp_path / "out.svg")


def test_a_picture_that_cannot_be_written_ends_with_status_1_after_the_results(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "out.svg").mkdir()
    finished = run(trace, "--plot", tmp_path / "out.svg", "--csv")
    assert finished.exit_code == 1
    assert finished.stdout.startswith("capacity,")
    assert finished.stderr == f"Error: the picture {tmp_path / 'out.svg'} cannot be written: Is a directory\n"


def test_without_matplotlib_the_extra_is_named_before_anything_is_played(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    finished = run(trace, "--plot", tmp_path / "out.svg")
    assert (finished.exit_code, finished.stdout) == (2, "")
    assert "pip install 'metrale-numba[plots]'" in finished.stderr


def test_matplotlib_is_not_loaded_unless_something_is_drawn(trace: Path) -> None:
    code = (
        "import sys; from metrale_numba.cli import main\n"
        f"main(['policies', {str(trace)!r}], standalone_mode=False); print('matplotlib' in sys.modules)"
    )
    path = os.pathsep.join(filter(None, [str(Path(metrale_numba.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    finished = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert finished.stdout.endswith("False\n")


# -------------------------------------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.usefixtures("_ctrl_c_arrives")
def test_ctrl_c_while_policies_are_played_prints_the_capacities_that_are_done(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")

    def press_later(nodes: PrefixNodes, capacity: int, policy: str) -> object:
        if (capacity, policy) == (3, "sieve"):
            signal.raise_signal(signal.SIGINT)
        return simulate(nodes, capacity, policy)

    monkeypatch.setattr(command, "simulate", press_later)
    finished = run(trace, "--blocks", "2,3,4", "--json", "--plot", tmp_path / "out.svg")
    assert finished.exit_code == 130
    fields = json.loads(finished.stdout)
    assert fields["interrupted"] is True
    assert [result["capacity"] for result in fields["results"]] == [2] * len(POLICIES)
    assert not (tmp_path / "out.svg").exists()


@pytest.mark.usefixtures("_ctrl_c_arrives")
def test_ctrl_c_while_requests_are_read_prints_no_result(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def press_at_once(requests: object, block_size: int | None = None) -> PrefixNodes:
        if block_size is not None:
            signal.raise_signal(signal.SIGINT)
        return PrefixNodes.of(requests, block_size=block_size)  # type: ignore[arg-type]

    class Pressing:
        of = staticmethod(press_at_once)

    monkeypatch.setattr(command, "PrefixNodes", Pressing)
    finished = run(trace, "--block-size", 1)
    assert finished.exit_code == 130
    assert "interrupted" in finished.stdout
    assert "lru" not in finished.stdout


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--blocks", "0"], "0 is not in the range"),
        (["--blocks", "5,,6"], "'' is not a valid integer"),
        (["--blocks", "many"], "'many' is not a valid integer"),
        (["--blocks", str(2**32)], "is not in the range"),
        (["--blocks", ",".join(map(str, range(1, 34)))], "these are 33, and at most 32 can be compared"),
        (["--block-size", "0"], "0 is not in the range"),
        (["--json", "--csv"], "--json and --csv do not go together"),
        (["--plot", "out.gif"], "out.gif: the name must end with one of .svg, .png, .pdf"),
        (["trace.jsonl", "--seed", "0"], "--seed shapes the built-in workload"),
    ],
)
def test_a_bad_argument_is_refused_with_status_2(arguments: list[str], message: str) -> None:
    refused = run(*arguments)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert message in " ".join(refused.stderr.replace("│", " ").split())


def test_a_bad_trace_is_told_of_with_its_line_and_ends_with_status_2(trace: Path) -> None:
    trace.write_text(LINES[0] + "damaged\n")
    finished = run(trace, "--json")
    assert (finished.exit_code, finished.stdout) == (2, "")
    assert finished.stderr.startswith(f"Error: {trace}:2: ")


def test_help_explains_every_option() -> None:
    shown = run("--help").stdout
    for name in ("TRACE", "--blocks", "--block-size", "--json", "--csv", "--plot", "--workload", "--limit"):
        assert name in shown


# ------------------------------------------------------------------------------------------------------------ the page


def rows_of(first_cell: str) -> list[list[str]]:
    """The rows of the page's list-table whose head begins with a cell, each as the text of its cells."""
    tables = re.findall(r"(?<=:header-rows: 1\n)(?:(?:   +.*)?\n)+", text_of(PAGE))
    (table,) = (table for table in tables if f"* - {first_cell}\n" in table)
    rows = [re.split(r"^     - ", row, flags=re.M) for row in re.split(r"^   \* - ", table, flags=re.M)[2:]]
    return [[" ".join(cell.split()).strip("`") for cell in row] for row in rows]


@cache
def nodes_of(load: str) -> PrefixNodes:
    if load != "conversation trace":
        return PrefixNodes.of(workload(load, 0, requests=20_000, sessions=1_000))
    folder = os.environ.get("METRALE_TRACES")
    if not folder:
        pytest.skip("METRALE_TRACES does not name the folder of the traces")
    with TraceReader(Path(folder) / "mooncake_conversation.jsonl.gz") as requests:
        return PrefixNodes.of(requests)


def beside(hit_blocks: int, lru: int) -> str:
    return f"{hit_blocks / lru - 1:+.1%}"


@pytest.mark.parametrize("row", rows_of("load"), ids=lambda row: f"{row[0]}, {row[1]}")
def test_a_row_of_the_page_is_what_the_policies_hit(row: list[str]) -> None:
    results = [simulate(nodes_of(row[0]), int(row[1].replace(",", "")), policy) for policy in POLICIES]
    lru = results[0]
    assert row[2:] == [f"{lru.block_hit_rate:.2%}", *(beside(each.hit_blocks, lru.hit_blocks) for each in results[1:])]


@pytest.mark.parametrize("row", rows_of("capacity"), ids=lambda row: row[0])
def test_a_row_of_the_page_is_what_lfu_hits_by_its_halving(row: list[str]) -> None:
    nodes, capacity = nodes_of("conversation trace"), int(row[0].replace(",", ""))
    lru = simulate(nodes, capacity, "lru").hit_blocks
    assert row[1:] == [beside(simulate(nodes, capacity, "lfu", halving=each).hit_blocks, lru) for each in (1, 2, 4, 10)]


def test_the_table_on_the_page_is_what_the_command_prints() -> None:
    nodes_of("conversation trace")
    trace = Path(os.environ["METRALE_TRACES"]) / "mooncake_conversation.jsonl.gz"
    printed = run(trace, "--blocks", "1000,3000,10000,30000,100000").stdout.splitlines()[1:]
    assert "\n".join(f"   {line.rstrip()}".rstrip() for line in printed) in text_of(PAGE)


def test_the_page_has_every_option_and_no_other() -> None:
    options = {name if name != "trace" else "TRACE" for parameter in command.policies.params for name in parameter.opts}
    documented = re.findall(r"^\.\. option:: (.+)$", text_of(PAGE), re.M)
    # --help is added by click when the command runs.
    assert sorted({*options, "-h", "--help"}) == sorted(
        name.split()[0] for line in documented for name in line.split(", ")
    )


def test_the_page_has_every_field_and_no_other(trace: Path) -> None:
    fields = json_of(trace)
    assert [row[0] for row in rows_of("field")] == list(fields)
    assert [row[0] for row in rows_of("field of a result")] == list(fields["results"][0])
