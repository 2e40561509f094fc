"""The command as a user runs it: in a process of its own, in pipes and on a terminal, and stopped half-way."""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import metrale_numba
from metrale_numba.cli import main
from metrale_numba.cli.interrupts import CtrlC
from metrale_numba.replay import workload

LINES = [
    '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}\n',
    '{"timestamp": 9, "input_length": 1500, "output_length": 5, "hash_ids": [1, 2, 4]}\n',
    '{"timestamp": 9, "input_length": 1300, "output_length": 5, "hash_ids": [1, 5, 6]}\n',
]
FIELDS = {
    "requests",
    "blocks",
    "hit_blocks",
    "evicted_blocks",
    "cached_blocks",
    "block_hit_rate",
    "token_hit_rate",
    "requests_per_second",
    "requests_per_cache_second",
    "seconds",
    "cache_seconds",
    "block_size",
    "capacity",
    "interrupted",
    "source",
    "microseconds_per_call",
}
# Seconds that nothing takes, not even compiling on a busy machine.
PATIENCE = 300
COUNTS = ("requests", "blocks", "hit_blocks", "evicted_blocks", "cached_blocks")


@pytest.fixture(autouse=True)
def _ctrl_c_arrives() -> Iterator[None]:
    """Whoever started the tests in the background may have had them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def zstd_compress(content: bytes) -> bytes:
    packed: bytes = pytest.importorskip("zstandard").compress(content)
    return packed


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(LINES))
    return path


def environment(**variables: str) -> dict[str, str]:
    """Ours, so made that the command runs the package under test and takes a pipe for a pipe."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "COLUMNS")}
    package = str(Path(metrale_numba.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    return {**inherited, "PYTHONPATH": path, "TERM": "xterm", **variables}


def run(*arguments: object, stdin: bytes = b"", **variables: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "metrale_numba", *map(str, arguments)]
    return subprocess.run(
        command, input=stdin, capture_output=True, env=environment(**variables), timeout=PATIENCE, check=False
    )


def json_of(finished: subprocess.CompletedProcess[bytes]) -> dict[str, Any]:
    assert finished.returncode == 0, finished.stderr.decode()
    fields: dict[str, Any] = json.loads(finished.stdout)
    return fields


class OnTerminal:
    """The command with standard error on a terminal of 80 columns, and the other streams in pipes."""

    def __init__(self, *arguments: object, **variables: str) -> None:
        self._screen, stderr = pty.openpty()
        self.seen = b""
        # Tests started in the background ignore Ctrl-C, and the command would inherit that; a handler it does not.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "metrale_numba", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment(COLUMNS="80", **variables),
        )
        signal.signal(signal.SIGINT, before)
        os.close(stderr)

    def write(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def wait_for(self, text: bytes) -> None:
        while text not in self.seen:
            piece = self._read()
            assert piece, f"{text!r} never came, but {self.seen!r}"

    def finish(self) -> tuple[int, bytes]:
        """Wait for the end; answers the exit status and what stood on standard output."""
        while self._read():
            pass
        stdout, _ = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, stdout

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self._screen)

    def _read(self) -> bytes:
        ready, _, _ = select.select([self._screen], [], [], PATIENCE)
        assert ready, f"nothing more came after {self.seen!r}"
        try:
            piece = os.read(self._screen, 4_096)
        except OSError:  # What Linux answers once the last process has closed its end.
            piece = b""
        self.seen += piece
        return piece


def pieces_of(screen: int) -> Iterator[bytes]:
    """What was written to a terminal that nobody has open any more."""
    with contextlib.suppress(OSError):  # What Linux answers at the end.
        while True:
            yield os.read(screen, 4_096)


@pytest.fixture
def on_terminal() -> Iterator[Callable[..., OnTerminal]]:
    started: list[OnTerminal] = []

    def start(*arguments: object, **variables: str) -> OnTerminal:
        started.append(OnTerminal(*arguments, **variables))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_json_is_one_object_with_all_fields_and_nothing_else_is_written(trace: Path) -> None:
    finished = run("replay", trace, "--json")
    fields = json_of(finished)
    assert finished.stdout.count(b"\n") == 1
    assert finished.stderr == b""
    assert set(fields) == FIELDS
    assert set(fields["microseconds_per_call"]) == {"lookup", "insert", "evict", "release"}
    assert set(fields["microseconds_per_call"]["lookup"]) == {"calls", "median", "p99"}


def test_counts_and_rates_of_a_small_trace(trace: Path) -> None:
    fields = json_of(run("replay", trace, "--json"))
    assert [fields[name] for name in COUNTS] == [3, 9, 3, 0, 6]
    assert fields["block_hit_rate"] == 3 / 9
    assert fields["token_hit_rate"] == (1_024 + 512) / 3_900
    assert (fields["capacity"], fields["block_size"], fields["interrupted"]) == (None, 1, False)
    assert fields["microseconds_per_call"]["evict"] is None
    assert 0 < fields["requests_per_second"] < fields["requests_per_cache_second"]


def test_blocks_limits_the_cache_and_block_size_changes_no_count(trace: Path) -> None:
    fields = json_of(run("replay", trace, "--json", "--blocks", 3, "--block-size", 16))
    assert [fields[name] for name in COUNTS] == [3, 9, 3, 3, 3]
    assert (fields["capacity"], fields["block_size"]) == (3, 16)
    assert fields["microseconds_per_call"]["evict"]["calls"] == 2


def test_json_names_the_trace_that_was_played(trace: Path) -> None:
    assert json_of(run("replay", trace, "--json"))["source"] == {"trace": str(trace), "format": "mooncake"}


def test_json_names_what_shaped_the_built_in_workload() -> None:
    fields = json_of(run("replay", "--json", "--seed", 3, "--requests", 50, "--sessions", 2, "--limit", 5))
    assert fields["source"] == {"workload": "chat", "seed": 3, "requests": 50, "sessions": 2}
    assert fields["requests"] == 5


def test_json_names_the_think_time_if_there_is_one() -> None:
    fields = json_of(run("replay", "--json", "--requests", 50, "--sessions", 2, "--think-time", 500))
    assert fields["source"] == {"workload": "chat", "seed": 0, "requests": 50, "sessions": 2, "think_time": 500}


@pytest.mark.parametrize("name", ["chat", "agent", "retrieval", "few-shot"])
def test_every_built_in_workload_is_played_by_its_name(name: str) -> None:
    fields = json_of(run("replay", "--json", "--workload", name, "--requests", 60, "--sessions", 5))
    assert fields["source"] == {"workload": name, "seed": 0, "requests": 60, "sessions": 5}
    assert fields["blocks"] == sum(request.hash_ids.size for request in workload(name, 0, 60, 5))


def test_a_trace_of_tokens_is_cached_in_blocks_of_16_tokens(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"tokens": list(range(40)), "adapter": adapter} for adapter in ("a", "b", "a")]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fields = json_of(run("replay", trace, "--json"))
    assert fields["source"] == {"trace": str(trace), "format": "tokens"}
    assert [fields[name] for name in COUNTS] == [3, 6, 2, 0, 4]
    assert (fields["block_size"], fields["token_hit_rate"]) == (16, 32 / 120)
    shown = [line.split() for line in run("replay", trace, "--block-size", 8).stdout.decode().splitlines()]
    assert ["blocks", "(8", "tokens)", "15"] in shown
    assert ["tokens", "per", "block", "8"] in shown


def test_a_bailian_trace_is_cached_in_blocks_of_its_hash_ids(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = (
        '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 40, "output_length": 9, '
        '"type": "text", "turn": 1, "hash_ids": [1, 2, 3]}\n'
    )
    trace.write_text(line * 2)
    fields = json_of(run("replay", trace, "--json"))
    assert fields["source"] == {"trace": str(trace), "format": "bailian"}
    assert [fields[name] for name in COUNTS] == [2, 6, 3, 0, 3]
    assert fields["token_hit_rate"] == 40 / 80
    shown = [line.split() for line in run("replay", trace).stdout.decode().splitlines()]
    assert ["blocks", "(hash", "ids", "of", "16", "tokens)", "6"] in shown


def test_limit_stops_before_what_lies_behind_it(trace: Path) -> None:
    trace.write_text(LINES[0] + LINES[1] + "damaged\n")
    assert json_of(run("replay", trace, "--json", "--limit", 2))["requests"] == 2


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd_compress], ids=["plain", "gzip", "zstd"])
def test_a_dash_reads_standard_input(pack: Callable[[bytes], bytes]) -> None:
    fields = json_of(run("replay", "-", "--json", stdin=pack("".join(LINES).encode())))
    assert [fields[name] for name in COUNTS] == [3, 9, 3, 0, 6]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), [60_000, 992_874, 777_848, 0, 215_026]),
        (("--blocks", 10_000), [60_000, 992_874, 595_185, 387_689, 10_000]),
    ],
)
def test_counts_of_the_default_replay_are_these(arguments: tuple[object, ...], expected: list[int]) -> None:
    fields = json_of(run("replay", "--json", *arguments))
    assert [fields[name] for name in COUNTS] == expected


def test_the_built_in_workload_can_be_shaped() -> None:
    fields = json_of(run("replay", "--json", "--seed", 3, "--requests", 50, "--sessions", 2))
    other_seed = json_of(run("replay", "--json", "--seed", 4, "--requests", 50, "--sessions", 2))
    assert fields["requests"] == other_seed["requests"] == 50
    assert fields["blocks"] != other_seed["blocks"]


def test_limit_cuts_the_built_in_workload_short() -> None:
    assert json_of(run("replay", "--json", "--limit", 20))["requests"] == 20


def test_tables_name_every_figure_and_fit_80_columns(trace: Path) -> None:
    finished = run("replay", trace, "--blocks", 3)
    assert finished.returncode == 0
    assert finished.stderr == b""
    rows = [line.split() for line in finished.stdout.decode().splitlines()]
    for row in (
        ["requests", "3"],
        ["blocks", "(hash", "ids", "of", "512", "tokens)", "9"],
        ["hit", "blocks", "3"],
        ["hit", "rate", "in", "blocks", "33.33%"],
        ["hit", "rate", "in", "prompt", "tokens", "39.38%"],
        ["evicted", "blocks", "3"],
        ["cached", "blocks", "3"],
        ["capacity", "in", "blocks", "3"],
        ["tokens", "spelled", "per", "hash", "id", "1"],
    ):
        assert row in rows
    labels = [" ".join(row[:-1]) for row in rows]
    assert "requests per second" in labels
    assert "requests per second in the cache" in labels
    assert [row[:2] for row in rows if row and row[0] in ("lookup", "insert", "evict", "release")] == [
        ["lookup", "3"],
        ["insert", "3"],
        ["evict", "2"],
        ["release", "3"],
    ]
    assert max(map(len, finished.stdout.decode().splitlines())) <= 80


def test_tables_are_printed_where_only_ascii_is_known(tmp_path: Path) -> None:
    trace = tmp_path / "größe.jsonl"
    trace.write_text(LINES[0])
    finished = run("replay", trace, PYTHONIOENCODING="ascii")
    assert finished.returncode == 0
    assert b"gr??e.jsonl" in finished.stdout.replace(b"\n", b"")


def test_a_bar_moves_on_a_terminal_and_standard_output_stays_clean(on_terminal: Callable[..., OnTerminal]) -> None:
    running = on_terminal("replay", "--json", "--requests", 2_000)
    status, stdout = running.finish()
    assert status == 0
    assert json.loads(stdout)["requests"] == 2_000
    assert b"Replaying" in running.seen
    assert b"1 requests" in running.seen
    assert b"%" in running.seen


@pytest.mark.parametrize("variables", [{}, {"FORCE_COLOR": "1"}])
def test_no_bar_is_drawn_into_a_pipe(trace: Path, variables: dict[str, str]) -> None:
    assert run("replay", trace, **variables).stderr == b""


@pytest.mark.parametrize(
    ("arguments", "hinted"),
    [([], True), (["--blocks", "3"], False), (["--json"], False)],
    ids=["without a limit", "with a limit", "as JSON"],
)
def test_a_terminal_is_told_of_the_option_that_makes_the_cache_evict(
    trace: Path, arguments: list[str], hinted: bool
) -> None:
    screen, stdout = pty.openpty()
    command = [sys.executable, "-m", "metrale_numba", "replay", str(trace), *arguments]
    subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, env=environment(), timeout=PATIENCE, check=True)
    os.close(stdout)
    shown = b"".join(pieces_of(screen))
    os.close(screen)
    assert (b"--blocks" in shown) == hinted
    assert b"requests" in shown


def test_no_hint_is_written_into_a_pipe(trace: Path) -> None:
    assert b"--blocks" not in run("replay", trace, FORCE_COLOR="1").stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LINES[0] + '{"timestamp": 0, "input_le', ":2: not JSON: Unterminated string starting at (column 18)\n"),
        (LINES[0] + '{"timestamp": 0, "input_le\n', ":2: not JSON: Unterminated string starting at (column 18)\n"),
        (LINES[0] + '{"timestamp": 0, "input_length": 5, "output_length": 1}', ":2: the field hash_ids is missing"),
        (LINES[0].replace("[1", "[1.0"), ":1: hash_ids[0] must be an integer from 0 to 4294967295, and is 1.0"),
        (LINES[0].replace("[1", "[true"), ":1: hash_ids[0] must be an integer from 0 to 4294967295, and is true"),
        ("", ": the file is empty"),
        (None, ": cannot be opened: No such file or directory"),
    ],
    ids=["cut off", "cut off before a line end", "missing field", "fractional id", "boolean id", "empty", "missing"],
)
def test_a_bad_trace_is_told_of_with_its_line_and_ends_with_status_2(
    trace: Path, content: str | None, message: str
) -> None:
    if content is None:
        trace.unlink()
    else:
        trace.write_text(content)
    finished = run("replay", trace, "--json")
    assert finished.returncode == 2
    assert finished.stdout == b""
    assert finished.stderr.decode().startswith(f"Error: {trace}{message}")
    assert finished.stderr.count(b"\n") == 1


def test_a_directory_is_no_trace(tmp_path: Path) -> None:
    finished = run("replay", tmp_path)
    assert (finished.returncode, finished.stdout) == (2, b"")
    assert finished.stderr.decode() == f"Error: {tmp_path}: cannot be opened: Is a directory\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--blocks", "0"], "0 is not in the range"),
        (["--blocks", "many"], "'many' is not a valid integer"),
        (["--blocks", str(2**32)], "is not in the range"),
        (["--block-size", "0"], "0 is not in the range"),
        (["--block-size", "5000"], "5000 is not in the range"),
        (["--limit", "0"], "0 is not in the range"),
        (["--limit", "-1"], "-1 is not in the range"),
        (["--seed", "-1"], "-1 is not in the range"),
        (["--requests", "0"], "0 is not in the range"),
        (["--sessions", "0"], "0 is not in the range"),
        (["trace.jsonl", "--seed", "0"], "--seed shapes the built-in workload and does not go with a TRACE"),
        (["trace.jsonl", "--requests", "9"], "--requests shapes the built-in workload"),
        (["trace.jsonl", "--sessions", "9"], "--sessions shapes the built-in workload"),
        (["trace.jsonl", "--workload", "chat"], "--workload shapes the built-in workload"),
        (["trace.jsonl", "--think-time", "9"], "--think-time shapes the built-in workload"),
        (["--workload", "rag"], "'rag' is not one of 'chat', 'agent', 'retrieval', 'few-shot'"),
        (["--workload", "agent", "--think-time", "9"], "--think-time is of the chat workload, and not of agent"),
        (["--think-time", "0"], "0 is not in the range"),
        (["one.jsonl", "two.jsonl"], "unexpected extra argument"),
        (["--fast"], "No such option"),
    ],
)
def test_a_bad_argument_is_refused_with_status_2(arguments: list[str], message: str) -> None:
    refused = CliRunner().invoke(main, ["replay", *arguments])
    assert refused.exit_code == 2
    assert message in refused.output


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_explains_the_command_and_every_option(option: str) -> None:
    shown = CliRunner().invoke(main, ["replay", option])
    assert shown.exit_code == 0
    names = ("TRACE", "--blocks", "--block-size", "--limit", "--json")
    for name in (*names, "--workload", "--seed", "--requests", "--sessions", "--think-time"):
        assert name in shown.output


def test_help_of_the_group_names_the_commands() -> None:
    shown = CliRunner().invoke(main, ["-h"])
    assert shown.exit_code == 0
    assert "replay" in shown.output


def test_version_is_the_packages() -> None:
    finished = run("--version")
    assert finished.returncode == 0
    assert finished.stdout.decode() == f"metrale-numba, version {metrale_numba.__version__}\n"


def test_ctrl_c_while_waiting_for_a_request_prints_what_was_counted(on_terminal: Callable[..., OnTerminal]) -> None:
    running = on_terminal("replay", "-", "--json")
    running.write(LINES[0])
    running.wait_for(b"1 requests")
    running.process.send_signal(signal.SIGINT)
    status, stdout = running.finish()
    assert status == 130
    fields = json.loads(stdout)
    assert set(fields) == FIELDS
    assert fields["interrupted"] is True
    assert [fields[name] for name in COUNTS] == [1, 3, 0, 0, 3]
    assert b"Traceback" not in running.seen


def test_ctrl_c_is_told_of_above_the_tables(on_terminal: Callable[..., OnTerminal]) -> None:
    running = on_terminal("replay", "-")
    running.write(LINES[0])
    running.wait_for(b"1 requests")
    running.process.send_signal(signal.SIGINT)
    status, stdout = running.finish()
    assert status == 130
    assert b"interrupted" in stdout
    assert ["cached", "blocks", "3"] in [line.split() for line in stdout.decode().splitlines()]


def test_ctrl_c_while_the_kernels_are_compiled_prints_zeros(
    on_terminal: Callable[..., OnTerminal], tmp_path: Path
) -> None:
    running = on_terminal("replay", "-", "--json", METRALE_CACHE_DIR=str(tmp_path))
    # Begun, the line keeps the command waiting for its end, should the kernels be there before the signal.
    running.write(LINES[0][:10])
    running.wait_for(b"Loading the kernels")
    running.process.send_signal(signal.SIGINT)
    status, stdout = running.finish()
    assert status == 130
    fields = json.loads(stdout)
    assert set(fields) == FIELDS
    assert fields["interrupted"] is True
    assert fields["source"] == {"trace": "-", "format": None}
    assert [fields[name] for name in COUNTS] == [0, 0, 0, 0, 0]
    assert fields["block_hit_rate"] is fields["token_hit_rate"] is fields["requests_per_second"] is None
    assert fields["requests_per_cache_second"] is None
    assert b"Traceback" not in running.seen


def test_ctrl_c_within_a_request_is_kept_until_the_next_is_read() -> None:
    with CtrlC() as ctrl_c:
        with ctrl_c.may_interrupt():
            pass
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), ctrl_c.may_interrupt():
            pytest.fail("the block was entered")


def test_ctrl_c_while_a_request_is_read_interrupts_at_once() -> None:
    with CtrlC() as ctrl_c, ctrl_c.may_interrupt(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_that_a_callback_swallows_is_raised_again_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        with ctrl_c.may_interrupt():
            ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGINT))()
            for _ in range(10**9):
                pass

    with CtrlC() as ctrl_c, pytest.raises(KeyboardInterrupt):
        work()
    assert capfd.readouterr() == ("", "")


def test_what_a_cut_short_callback_breaks_counts_as_the_interruption() -> None:
    def work() -> None:
        with ctrl_c.may_interrupt():
            ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGINT))()
            raise RuntimeError("the callback did not do its work")

    with CtrlC() as ctrl_c, pytest.raises(KeyboardInterrupt):
        work()


def test_other_errors_in_callbacks_are_told_of_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: told.append(unraisable.exc_type))
    with CtrlC():
        ctypes.CFUNCTYPE(None)(lambda: [].index(1))()
    assert told == [ValueError]


def test_all_handlers_are_put_back() -> None:
    def handlers() -> list[object]:
        return [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM), sys.unraisablehook]

    before = handlers()
    with CtrlC():
        assert handlers() != before
    assert handlers() == before


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with CtrlC() as ctrl_c, ctrl_c.may_interrupt():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_reader_that_has_gone_away_is_no_reason_for_a_traceback(trace: Path, form: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "metrale_numba", "replay", str(trace), *form]
    finished = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, env=environment(), timeout=PATIENCE, check=False
    )
    os.close(writing)
    assert finished.returncode == 1
    assert finished.stderr == b""


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_full_disk_is_told_of(trace: Path, form: list[str]) -> None:
    command = [sys.executable, "-m", "metrale_numba", "replay", str(trace), *form]
    with open("/dev/full", "wb") as full:
        finished = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, env=environment(), timeout=PATIENCE, check=False
        )
    assert finished.returncode == 1
    assert finished.stderr == b"Error: the result cannot be written: No space left on device\n"


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_compiler_that_is_switched_off_is_told_of(trace: Path, form: list[str]) -> None:
    finished = run("replay", trace, *form, NUMBA_DISABLE_JIT="1")
    assert (finished.returncode, finished.stdout) == (1, b"")
    assert finished.stderr == b"Error: metrale_numba needs its kernels compiled; unset NUMBA_DISABLE_JIT\n"


def test_importing_the_package_loads_neither_click_nor_rich() -> None:
    code = "import sys, metrale_numba; sys.exit(any(name in sys.modules for name in ('click', 'rich')))"
    assert subprocess.run([sys.executable, "-c", code], env=environment(), check=False).returncode == 0
