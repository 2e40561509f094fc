"""The command `curve` as a user runs it: its table, JSON, CSV and picture, what it keeps on disk, what it refuses."""

from __future__ import annotations

import csv
import io
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import metrale_numba
from metrale_numba.cli import main
from metrale_numba.replay.curve import CurveCounter
from metrale_numba.replay.requests import Request

LINES = [
    '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}\n',
    '{"timestamp": 9, "input_length": 1500, "output_length": 5, "hash_ids": [1, 2, 4]}\n',
    '{"timestamp": 9, "input_length": 1300, "output_length": 5, "hash_ids": [1, 5, 6]}\n',
]
CONFIGS = Path(__file__).parent / "data" / "configs"
PAGE = Path(__file__).parent.parent / "docs" / "curve.rst"
LLAMA = CONFIGS / "llama-3-8b.json"


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where curves are kept for the time of a test. The kernels are ready, and not looked for there."""
    metrale_numba.warmup()
    monkeypatch.setenv("METRALE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "metrale_numba" / "curves"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(LINES))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["curve", *map(str, arguments)], catch_exceptions=False)


def json_of(*arguments: object) -> dict[str, Any]:
    ran = run(*arguments, "--json")
    assert (ran.exit_code, ran.stderr) == (0, "")
    fields: dict[str, Any] = json.loads(ran.stdout)
    return fields


def rows_of(ran: Result) -> list[list[str]]:
    assert (ran.exit_code, ran.stderr) == (0, "")
    return [line.split() for line in ran.stdout.splitlines()]


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*")) if directory.exists() else []


# ------------------------------------------------------------------------------------------------------------- results


def test_json_tells_of_the_load_and_of_every_capacity(trace: Path) -> None:
    fields = json_of(trace)
    assert fields["source"] == {"trace": str(trace), "format": "mooncake"}
    assert [fields[name] for name in ("requests", "blocks", "distinct_blocks", "tokens_per_block")] == [3, 9, 6, 512]
    assert [(point["capacity"], point["hit_blocks"], point["evicted_blocks"]) for point in fields["points"]] == [
        (1, 2, 0),
        (2, 3, 1),
        (5, 3, 1),
        (6, 3, 0),
    ]
    assert fields["endless"] == fields["points"][-1]
    assert (fields["kv_bytes_per_token"], fields["model"], fields["points"][0]["gigabytes"]) == (None, None, None)


def test_a_point_is_what_replay_says_with_that_capacity(trace: Path) -> None:
    (point,) = json_of(trace, "--capacities", "3")["points"]
    replayed = CliRunner().invoke(main, ["replay", str(trace), "--json", "--blocks", "3"], catch_exceptions=False)
    fields = json.loads(replayed.stdout)
    for name in ("capacity", "hit_blocks", "evicted_blocks", "cached_blocks", "block_hit_rate", "token_hit_rate"):
        assert point[name] == fields[name]


def test_the_target_is_the_smallest_capacity_that_reaches_it(trace: Path) -> None:
    target = json_of(trace)["target"]
    assert (target["percent"], target["capacity"], target["hit_blocks"], target["endless_share"]) == (90, 2, 3, 1.0)
    assert json_of(trace, "--target", 60)["target"]["capacity"] == 1


def test_capacities_are_told_in_order_and_each_once(trace: Path) -> None:
    points = json_of(trace, "--capacities", "5, 2,700,2")["points"]
    assert [point["capacity"] for point in points] == [2, 5, 700]


def test_csv_has_a_row_for_each_capacity_with_the_fields_of_a_point(trace: Path) -> None:
    arguments = (trace, "--capacities", "2,5", "--kv-bytes-per-token", 1_000)
    ran = run(*arguments, "--csv")
    assert (ran.exit_code, ran.stderr) == (0, "")
    points = json_of(*arguments)["points"]
    rows = list(csv.DictReader(io.StringIO(ran.stdout)))
    assert rows == [{name: str(value) for name, value in point.items()} for point in points]
    assert len(rows) == 2


def test_the_table_has_a_row_for_each_capacity_and_fits_80_columns(trace: Path) -> None:
    ran = run(trace, "--model", LLAMA)
    rows = rows_of(ran)
    for row in (
        ["requests", "3"],
        ["blocks", "(512", "tokens)", "9"],
        ["distinct", "blocks", "6"],
        ["KV", "bytes", "per", "token", "131,072"],
        ["attention", "GQA", "in", "bf16"],
        ["2", "0.1342", "3", "33.33%", "39.38%", "100.00%", "1"],
        ["90%", "of", "what", "an", "endless", "cache", "hits:", "2", "blocks,", "0.1342", "GB"],
    ):
        assert row in rows
    assert max(map(len, ran.stdout.splitlines())) <= 80


def test_the_table_has_no_sizes_where_nothing_tells_of_the_model(trace: Path) -> None:
    assert "GB" not in run(trace).stdout


def test_a_load_that_never_comes_back_has_no_target(trace: Path) -> None:
    trace.write_text(LINES[0])
    assert json_of(trace)["target"] is None
    assert "An endless cache hits nothing." in run(trace).stdout


def test_a_built_in_workload_is_played_without_a_trace() -> None:
    fields = json_of("--requests", 60, "--sessions", 4, "--seed", 2)
    assert fields["source"] == {"workload": "chat", "seed": 2, "requests": 60, "sessions": 4}
    assert fields["requests"] == 60


def test_tokens_of_a_trace_are_cut_into_blocks(trace: Path) -> None:
    trace.write_text('{"tokens": [1, 2, 3, 4, 5]}\n' * 2)
    fields = json_of(trace, "--block-size", 2)
    assert (fields["blocks"], fields["tokens_per_block"], fields["endless"]["hit_blocks"]) == (4, 2, 2)


# --------------------------------------------------------------------------------------------------------------- sizes


def test_sizes_follow_from_the_bytes_of_a_token(trace: Path) -> None:
    fields = json_of(trace, "--kv-bytes-per-token", 1_000)
    assert fields["kv_bytes_per_token"] == 1_000
    assert fields["target"]["gigabytes"] == 2 * 512 * 1_000 / 1e9


def test_sizes_follow_from_the_config_of_a_model(trace: Path) -> None:
    fields = json_of(trace, "--model", LLAMA)
    assert fields["kv_bytes_per_token"] == fields["model"]["kv_bytes_per_token"] == 131_072
    assert fields["endless"]["gigabytes"] == 6 * 512 * 131_072 / 1e9


def test_a_directory_of_a_model_has_its_config(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(LLAMA.read_bytes())
    assert json_of(trace, "--model", tmp_path)["kv_bytes_per_token"] == 131_072


def test_types_and_devices_change_what_a_token_takes(trace: Path) -> None:
    fields = json_of(trace, "--model", LLAMA, "--kv-dtype", "fp8", "--tensor-parallel", 4)
    assert fields["kv_bytes_per_token"] == 131_072 // 2 // 4


def test_a_snapshot_of_a_hybrid_model_is_told_apart(trace: Path) -> None:
    arguments = (trace, "--model", CONFIGS / "bamba-9b.json")
    state_bytes = json_of(*arguments)["model"]["state_bytes"]
    assert ["bytes", "of", "a", "snapshot", "of", "their", "state", f"{state_bytes:,}"] in rows_of(run(*arguments))
    assert json_of(*arguments, "--state-dtype", "fp32")["model"]["state_bytes"] > state_bytes


def test_layers_with_a_sliding_window_are_told_apart(trace: Path) -> None:
    rows = rows_of(run(trace, "--model", CONFIGS / "gemma-2-9b.json", "--kv-dtype", "bf16"))
    assert ["layers", "that", "attend", "to", "4,096", "tokens", "21"] in rows
    assert ["KV", "bytes", "per", "token", "in", "these", "172,032"] in rows


def test_sizes_on_one_of_several_devices_say_so(trace: Path) -> None:
    shown = run(trace, "--model", LLAMA, "--tensor-parallel", 2).stdout
    assert "KV bytes per token on each of 2 devices" in shown
    assert "2 blocks, 0.0671 GB on each of 2 devices" in shown


# ------------------------------------------------------------------------------------------------------------- on disk


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that are played from now on."""
    requests: list[Request] = []
    play = CurveCounter.play

    def noting(self: CurveCounter, request: Request) -> None:
        requests.append(request)
        play(self, request)

    monkeypatch.setattr(CurveCounter, "play", noting)
    return requests


def test_a_repeat_plays_nothing_and_says_the_same(trace: Path, played: list[Request]) -> None:
    first = json_of(trace)
    again = json_of(trace, "--capacities", "1,2,5,6")
    assert len(played) == 3
    assert (first.pop("from_cache"), again.pop("from_cache")) == (False, True)
    assert first == again


def test_a_repeat_of_a_workload_plays_nothing(played: list[Request]) -> None:
    json_of("--requests", 20)
    assert json_of("--requests", 20)["from_cache"]
    assert len(played) == 20


def test_a_copy_of_a_trace_is_the_same_load(trace: Path, tmp_path: Path) -> None:
    json_of(trace)
    (tmp_path / "copy.jsonl").write_bytes(trace.read_bytes())
    fields = json_of(tmp_path / "copy.jsonl")
    assert (fields["from_cache"], fields["source"]["trace"]) == (True, str(tmp_path / "copy.jsonl"))


def test_what_changes_the_counts_makes_another_curve(trace: Path) -> None:
    json_of(trace)
    assert not json_of(trace, "--limit", 2)["from_cache"]
    assert not json_of(trace, "--block-size", 32)["from_cache"]
    trace.write_text("".join(LINES[:2]))
    assert not json_of(trace)["from_cache"]


@pytest.mark.parametrize("options", [["--target", 50], ["--kv-bytes-per-token", 5], ["--capacities", "3"]])
def test_what_changes_no_count_makes_no_other_curve(trace: Path, options: list[object]) -> None:
    json_of(trace)
    assert json_of(trace, *options)["from_cache"]


@pytest.mark.parametrize("options", [["--seed", 1], ["--requests", 21], ["--sessions", 9], ["--workload", "agent"]])
def test_what_shapes_a_workload_makes_another_curve(options: list[object]) -> None:
    json_of("--requests", 20)
    assert not json_of("--requests", 20, *options)["from_cache"]


def test_nothing_is_kept_nor_looked_for_without_the_cache(trace: Path, directory: Path) -> None:
    json_of(trace, "--no-cache")
    assert files(directory) == []
    json_of(trace)
    assert not json_of(trace, "--no-cache")["from_cache"]


def test_standard_input_is_never_kept(
    trace: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        with trace.open() as file:
            monkeypatch.setattr(sys, "stdin", file)
            main(["curve", "-", "--json"], standalone_mode=False)
        fields = json.loads(capsys.readouterr().out)
        assert (fields["from_cache"], fields["requests"]) == (False, 3)
    assert files(directory) == []


def test_a_trace_that_grows_meanwhile_is_not_kept(
    trace: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve = CurveCounter.curve

    def growing(self: CurveCounter) -> Any:
        with trace.open("a") as file:
            file.write(LINES[0])
        return curve(self)

    monkeypatch.setattr(CurveCounter, "curve", growing)
    json_of(trace)
    assert files(directory) == []


def test_a_bad_line_is_told_of_and_nothing_is_kept(trace: Path, directory: Path) -> None:
    trace.write_text(LINES[0] + "damaged\n")
    ran = run(trace, "--json")
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert ran.stderr.startswith(f"Error: {trace}:2: not JSON")
    assert files(directory) == []


# ------------------------------------------------------------------------------------------------------------- Ctrl-C


def test_ctrl_c_prints_what_was_counted_and_keeps_nothing(
    trace: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = CurveCounter.play

    def pressing(self: CurveCounter, request: Request) -> None:
        play(self, request)
        if self.requests == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(CurveCounter, "play", pressing)
    # Whoever started the tests in the background may have had them ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ran = run(trace, "--json")
    finally:
        signal.signal(signal.SIGINT, before)
    fields = json.loads(ran.stdout)
    assert ran.exit_code == 130
    assert (fields["interrupted"], fields["requests"], fields["blocks"]) == (True, 2, 6)
    assert files(directory) == []


def test_ctrl_c_before_anything_was_played_prints_zeros_and_draws_nothing(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")

    def press() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("metrale_numba.cli.curve.compile_kernels", press)
    before = signal.getsignal(signal.SIGINT)
    try:
        ran = run(trace, "--plot", tmp_path / "out.svg")
    finally:
        signal.signal(signal.SIGINT, before)
    assert ran.exit_code == 130
    assert "interrupted: counts of the first 0 requests" in ran.stdout
    assert not (tmp_path / "out.svg").exists()


# ------------------------------------------------------------------------------------------------------------ pictures


def text_of(picture: Path) -> str:
    return " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text()))


@pytest.mark.parametrize(
    ("name", "begins"), [("out.svg", b"<?xml"), ("out.png", b"\x89PNG"), ("out.pdf", b"%PDF"), ("OUT.SVG", b"<?xml")]
)
def test_a_picture_has_the_format_of_its_name(trace: Path, tmp_path: Path, name: str, begins: bytes) -> None:
    pytest.importorskip("matplotlib")
    assert run(trace, "--plot", tmp_path / name).exit_code == 0
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_a_picture_says_what_was_played_and_where_the_target_is(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(trace, "--plot", tmp_path / "out.svg", "--kv-bytes-per-token", 1_000_000)
    words = text_of(tmp_path / "out.svg")
    for part in (
        "Hit rate by capacity: trace.jsonl",
        "endless cache: 33.3% with 6 blocks",
        "90% of its hits: 33.3%",
        "with 2 blocks = 1.024 GB",
        "capacity in blocks",
        "capacity in GB of KV",
    ):
        assert part in words


def test_a_picture_without_a_model_has_no_sizes(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(trace, "--plot", tmp_path / "out.svg")
    assert "GB" not in text_of(tmp_path / "out.svg")


def test_a_picture_names_the_devices(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(trace, "--plot", tmp_path / "out.svg", "--model", LLAMA, "--tensor-parallel", 2)
    assert "capacity in GB of KV on each of 2 devices" in text_of(tmp_path / "out.svg")


def test_the_same_curve_makes_the_same_picture(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "two.svg"):
        run(trace, "--plot", tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_prompts_without_a_block_make_no_picture(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace.write_text('{"timestamp": 0, "input_length": 0, "output_length": 5, "hash_ids": []}\n')
    ran = run(trace, "--plot", tmp_path / "out.svg")
    assert (ran.exit_code, ran.stderr) == (1, "Error: there is nothing to draw: the prompts have no block\n")


def test_a_picture_that_cannot_be_written_is_told_of(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "out.svg").mkdir()
    ran = run(trace, "--plot", tmp_path / "out.svg")
    assert (ran.exit_code, ran.stderr) == (
        1,
        f"Error: the picture {tmp_path / 'out.svg'} cannot be written: Is a directory\n",
    )


def test_without_matplotlib_the_extra_is_named_before_anything_is_played(
    trace: Path, played: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = run(trace, "--plot", tmp_path / "out.svg")
    assert ran.exit_code == 2
    assert "drawing needs Matplotlib: pip install 'metrale-numba[plots]'" in ran.stderr
    assert played == []


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--capacities", "5,many"], "'many' is not a valid integer"),
        (["--capacities", "0"], "0 is not in the range"),
        (["--capacities", ""], "'' is not a valid integer"),
        (["--target", "0"], "0 is not in the range"),
        (["--target", "101"], "101 is not in the range"),
        (["--block-size", "5000"], "5000 is not in the range"),
        (["--kv-bytes-per-token", "0"], "0 is not in the range"),
        (["--kv-bytes-per-token", "5", "--model", str(LLAMA)], "--kv-bytes-per-token does not go with --model"),
        (["--kv-dtype", "fp8"], "--kv-dtype goes with --model alone"),
        (["--state-dtype", "fp8"], "--state-dtype goes with --model alone"),
        (["--tensor-parallel", "2"], "--tensor-parallel goes with --model alone"),
        (["--model", str(LLAMA), "--tensor-parallel", "3"], "cannot be shared out among 3 devices"),
        (["--model", str(LLAMA), "--kv-dtype", "int3"], "'int3' is not one of"),
        (["--json", "--csv"], "--json does not go with --csv"),
        (["--plot", "out.gif"], "out.gif: the name must end with one of .svg, .png, .pdf"),
        (["--plot", "/no/such/place/out.svg"], "/no/such/place/out.svg: there is no such directory"),
        (["trace.jsonl", "--seed", "0"], "--seed shapes the built-in workload and does not go with a TRACE"),
    ],
)
def test_a_bad_argument_is_refused_with_status_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, played: list[Request]
) -> None:
    # Where lines are not broken within what is looked for.
    monkeypatch.setenv("COLUMNS", "300")
    ran = run(*arguments)
    assert (ran.exit_code, ran.stdout, played) == (2, "", [])
    assert message in ran.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"{", "not JSON: "),
        (b"\xff\xfe\xfd", "not JSON: "),
        (b"[" * 100_000, "not JSON: "),
        (b"[]", "not a JSON object"),
        (b"{}", "the field dtype (or torch_dtype) is missing"),
        (b'{"dtype": "bf16"}', "the field num_hidden_layers is missing"),
        (b" " * (16 * 1024 * 1024 + 1), "too large for a config"),
    ],
    ids=["missing", "cut off", "no text", "nested", "a list", "empty", "without layers", "large"],
)
def test_a_bad_config_is_told_of_with_its_name(
    trace: Path, tmp_path: Path, content: bytes | None, message: str, played: list[Request]
) -> None:
    config = tmp_path / "some.json"
    if content is not None:
        config.write_bytes(content)
    ran = run(trace, "--model", config)
    assert (ran.exit_code, ran.stdout, played) == (2, "", [])
    assert f"Invalid value for --model: {config}: {message}" in ran.stderr


# ---------------------------------------------------------------------------------------------------------------- page


def test_the_page_has_every_option_and_no_other() -> None:
    with main.make_context("metrale-numba", ["curve"], resilient_parsing=True) as context:
        options = [
            name if parameter.param_type_name == "option" else name.upper()
            for parameter in main.commands["curve"].get_params(context)
            for name in parameter.opts
        ]
    lines = re.findall(r"^\.\. option:: (.+)$", PAGE.read_text(), re.M)
    documented = [name.split()[0] for line in lines for name in line.split(", ")]
    # --help is added by click when the command runs.
    assert sorted({*options, "-h", "--help"}) == sorted(documented)


def test_the_page_has_every_field_of_the_json_object_and_no_other(trace: Path) -> None:
    fields = json_of(trace, "--model", LLAMA)
    parts = PAGE.read_text().split(":header-rows: 1")
    tables = [re.findall(r"^   \* - ``(\w+)``$", part, re.M) for part in parts]
    assert [names for names in tables if names] == [list(fields), list(fields["target"]), list(fields["model"])]
