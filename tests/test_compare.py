"""The comparison with peers, run end to end on very little work, as ``python -m benchmarks.compare`` in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("psutil", reason="the benchmarks are an extra")

ROOT = Path(__file__).resolve().parent.parent
PEERS = {"metrale", "pygtrie"} if find_spec("pygtrie") else {"metrale"}
TIMED = ["lookup_256", "lookup_2048", "lookup_32768", "miss_2048", "insert_2048"]


def compare(*arguments: str, status: int = 0, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.compare", "--scale", "small", *arguments],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "80"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict, Path]:
    directory = tmp_path_factory.mktemp("compare")
    arguments = ["--write-docs", str(directory)] if find_spec("matplotlib") else []
    shown = compare("--peers", "pygtrie", "--rounds", "2", "--json", str(directory / "out.json"), *arguments)
    return shown, json.loads((directory / "out.json").read_text()), directory


def test_every_round_measures_ours_and_the_peers_that_are_there(compared):
    _, found, _ = compared
    assert set(found["peers"]) == PEERS
    assert all(len(peer["rounds"]) == 2 for peer in found["peers"].values())
    assert all(value > 0 for peer in found["peers"].values() for value in peer["rounds"][0].values())


def test_figures_are_medians_and_ratios_are_to_ours(compared):
    _, found, _ = compared
    rows = {row["key"]: row for row in found["rows"]}
    assert set(TIMED) | {"evict_64", "evict_64_per_block", "simulator", "harness", "bytes_per_block"} <= set(rows)
    for key, row in rows.items():
        for name, figure in row["figures"].items():
            values = [figures[key] for figures in found["peers"][name]["rounds"] if key in figures]
            assert figure == (pytest.approx(sum(values) / 2) if values else None)
        for name, ratio in row["ratios"].items():
            theirs = row["figures"][name]
            assert ratio == (pytest.approx(theirs / row["figures"]["metrale"]) if theirs else None)
    assert all(set(rows[key]["ratios"]) == PEERS - {"metrale"} for key in TIMED)


def test_the_json_holds_what_the_table_shows(compared):
    from_table = {}
    shown, found, _ = compared
    for line in shown.splitlines():
        for row in found["rows"]:
            if line.strip().startswith(f"{row['title']} "):
                from_table[row["key"]] = line.replace(row["title"], "", 1).split()[1]
    assert set(from_table) == {row["key"] for row in found["rows"]}
    for row in found["rows"]:
        assert float(from_table[row["key"]].replace(",", "")) == pytest.approx(row["figures"]["metrale"], rel=0.01)


def test_the_documentation_has_the_same_figures(compared):
    pytest.importorskip("matplotlib")
    _, found, directory = compared
    page = (directory / "comparison.rst").read_text()
    assert all(f'"{row["title"]}","{row["unit"]}",' in page for row in found["rows"])
    assert (directory / "comparison.svg").read_text().count("<svg") == 1
    assert (directory / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_peer_is_named_with_its_recipe(tmp_path):
    # No interpreter of the tests has an engine in it; one that has measures it instead.
    if find_spec("vllm"):
        pytest.skip("vLLM is installed")
    shown = compare("--peers", "vllm", "--rounds", "1", "--section", "insert", "--json", str(tmp_path / "out.json"))
    (missing,) = json.loads((tmp_path / "out.json").read_text())["missing"]
    assert missing["name"] == "vllm"
    assert "vllm" in missing["reason"]
    assert missing["label"] in shown
    assert missing["recipe"]
    assert all(command in shown for command in missing["recipe"])


def test_a_peer_that_fails_is_named_and_the_others_are_shown(tmp_path):
    (tmp_path / "pygtrie.py").write_text("raise ImportError('broken on purpose')")
    info = tmp_path / "pygtrie-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pygtrie\nVersion: 0\n")
    arguments = ["--peers", "pygtrie", "--rounds", "2", "--section", "insert"]
    shown = compare(*arguments, status=1, PYTHONPATH=str(tmp_path))
    assert "insert, 2,048 new tokens" in shown
    assert "pygtrie (pygtrie) was not measured, failed: ImportError: broken on purpose" in shown


def test_an_unknown_peer_is_refused():
    compare("--peers", "nobody", status=2)
