"""The pages in docs/ against the code: what they list is what there is, their examples run, their engine is sound.

It relies on the sources of the pages alone, and needs none of the tools that build them.
"""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import inspect
import json
import os
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

import metrale_numba
from metrale_numba import NoPrefixCaching, PrefixCache, RadixTree, serving
from metrale_numba.cli import main
from metrale_numba.replay import WORKLOADS, Replay, open_trace, workload
from metrale_numba.settings import Settings, resolve

DOCS = Path(__file__).parent.parent / "docs"
PACKAGE = Path(metrale_numba.__file__).parent
PAGES = sorted(DOCS.glob("*.rst"))

PUBLIC = {name: getattr(metrale_numba, name) for name in metrale_numba.__all__}
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}
RESULT_LIKE = (serving.StoreKey, serving.ServingStats)
METHODS = {
    f"{cls.__name__}.{name}": value
    for cls in (PrefixCache, RadixTree)
    for name, value in inspect.getmembers(cls, inspect.isfunction)
    if not name.startswith("_")
}
SERVING_CLASSES = [
    value for name in serving.__all__ if inspect.isclass(value := getattr(serving, name)) and value not in RESULT_LIKE
]
SERVING_METHODS = {
    f"{cls.__name__}.{name}": value
    for cls in SERVING_CLASSES
    for name, value in inspect.getmembers(cls, inspect.isroutine)
    if not name.startswith("_") and not issubclass(cls, Exception)
}
CALLABLES = {**FUNCTIONS, **METHODS, **SERVING_METHODS}
PROPERTIES = {
    f"{cls.__name__}.{name}": value
    for cls in (PrefixCache, RadixTree, *SERVING_CLASSES)
    for name, value in inspect.getmembers(cls, lambda value: isinstance(value, property))
    if not issubclass(cls, Exception)
}
#: The errors of calls that have others than those that stand for a bad argument.
OTHER_ERRORS = {
    # Any text is a name.
    "RadixTree.unpin": ["TypeError"],
    "RadixTree.save": ["TypeError", "ValueError", "OSError"],
}
RESULTS = [value for value in PUBLIC.values() if inspect.isclass(value) and issubclass(value, tuple)]
RESULTS += RESULT_LIKE


def page(name):
    return (DOCS / name).read_text(encoding="utf-8")


def sections(docstring):
    """The sections of a numpydoc docstring, each as its lines."""
    lines = inspect.cleandoc(docstring).splitlines()
    found = {"": []}
    current = ""
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if line and below == "-" * len(line):
            current = line
            found[current] = []
        else:
            found[current].append(line)
    return found


def names_in(lines):
    """The names that a section of a docstring describes."""
    heads = [line for line in lines if line and not line.startswith((" ", "-"))]
    return [name.strip() for head in heads for name in head.split(" : ")[0].split(",")]


def rows(source, first_cell):
    """The rows of the list-table whose head begins with a cell, each as the text of its cells."""
    tables = re.findall(r"(?<=:header-rows: 1\n)(?:(?:    *.*)?\n)+", source)
    (table,) = (table for table in tables if re.search(rf"\* - (?:\| )?{first_cell}\n", table))
    head, *body = re.split(r"^   \* - ?", table, flags=re.M)[1:]
    cells = [[cell.strip() for cell in re.split(r"^     - ?", row, flags=re.M)] for row in (head, *body)]
    assert {len(row) for row in cells} == {len(cells[0])}
    return cells[1:]


def literals(cell):
    return re.findall(r"``([^`]+)``", cell)


# ----------------------------------------------------------------------------------------------------------- reference


def test_the_reference_has_every_public_name_and_no_other():
    documented = re.findall(r"^\.\. auto(?:class|function|data|exception):: (\S+)$", page("reference.rst"), re.M)
    assert sorted(documented) == sorted(metrale_numba.__all__)


def serving_constructors():
    """The classes of the serving layer that a user makes objects of."""
    made_elsewhere = (serving.Sequence, serving.SnapshotMover, serving.TierStore)
    return [cls for cls in SERVING_CLASSES if not issubclass(cls, Exception) and cls not in made_elsewhere]


def test_the_serving_reference_has_every_public_name_and_no_other():
    source = page("serving_reference.rst")
    documented = re.findall(r"^\.\. auto(?:class|function|data|exception):: (\S+)$", source, re.M)
    # These two modules need other packages, so their names are read and not imported.
    others = [
        name
        for path in ("serving/prometheus.py", "engines/transformers/__init__.py")
        for name in ast.literal_eval(re.search(r"^__all__ = (\[.*?\])$", (PACKAGE / path).read_text(), re.M | re.S)[1])
    ]
    assert sorted(documented) == sorted([*serving.__all__, *others])


@pytest.mark.parametrize("title", CALLABLES)
def test_a_docstring_begins_with_one_line_that_says_what_the_call_does(title):
    first, *others = inspect.getdoc(CALLABLES[title]).splitlines()
    assert first.endswith(".")
    assert not any(others[:1])


@pytest.mark.parametrize("title", CALLABLES)
def test_a_docstring_describes_every_parameter_and_no_other(title):
    signature = inspect.signature(CALLABLES[title])
    described = names_in(sections(inspect.getdoc(CALLABLES[title])).get("Parameters", []))
    assert sorted(described) == sorted(set(signature.parameters) - {"self"})


@pytest.mark.parametrize("title", CALLABLES)
def test_a_docstring_describes_what_is_returned_if_anything_is(title):
    returns = inspect.signature(CALLABLES[title]).return_annotation
    assert ("Returns" in sections(inspect.getdoc(CALLABLES[title]))) == (returns not in (None, "None"))


@pytest.mark.parametrize("title", {**FUNCTIONS, **METHODS})
def test_a_docstring_names_the_errors_of_a_call_with_arguments(title):
    if set(inspect.signature(CALLABLES[title]).parameters) - {"self"}:
        errors = OTHER_ERRORS.get(title, ["TypeError", "ValueError"])
        assert names_in(sections(inspect.getdoc(CALLABLES[title]))["Raises"]) == errors


# What an engine writes is called by the serving layer alone.
@pytest.mark.parametrize("title", [title for title in SERVING_METHODS if not title.startswith("SnapshotMover.")])
def test_a_docstring_of_the_serving_layer_names_the_errors_of_bad_arguments(title):
    if set(inspect.signature(SERVING_METHODS[title]).parameters) - {"self", "cls"}:
        errors = names_in(sections(inspect.getdoc(SERVING_METHODS[title]))["Raises"])
        assert {"TypeError", "ValueError"} <= set(errors)


@pytest.mark.parametrize("title", PROPERTIES)
def test_a_property_has_a_docstring(title):
    assert inspect.getdoc(PROPERTIES[title])


@pytest.mark.parametrize("cls", [RadixTree, NoPrefixCaching, *serving_constructors()])
def test_a_class_describes_every_keyword_of_its_constructor(cls):
    described = names_in(sections(cls.__doc__)["Parameters"])
    assert described == list(inspect.signature(cls).parameters)


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: result.__name__)
def test_a_result_describes_every_field_in_order(result):
    assert names_in(sections(result.__doc__)["Attributes"]) == list(result._fields)


def test_the_settings_class_describes_every_field_in_order():
    described = names_in(sections(Settings.__doc__)["Attributes"])
    assert described == [field.name for field in dataclasses.fields(Settings)]


# ------------------------------------------------------------------------------------------------------------ settings


def test_the_settings_table_has_every_keyword_and_no_other():
    keywords = [literals(row[0])[0] for row in rows(page("settings.rst"), "keyword")]
    assert sorted(keywords) == sorted(inspect.signature(RadixTree).parameters)


def test_the_settings_table_has_every_variable_that_is_read_and_no_other(monkeypatch):
    class Recording(dict):
        def get(self, name, default=None):
            asked.append(name)
            return super().get(name, default)

        def __getitem__(self, name):
            asked.append(name)
            return super().__getitem__(name)

        def __contains__(self, name):
            asked.append(name)
            return super().__contains__(name)

    asked = []
    monkeypatch.setattr(os, "environ", Recording())
    resolve()
    variables = [variable for row in rows(page("settings.rst"), "keyword") for variable in literals(row[0])[1:]]
    assert sorted(variables) == sorted(asked)


@pytest.mark.parametrize("row", rows(page("settings.rst"), "keyword"), ids=lambda row: literals(row[0])[0])
def test_a_variable_of_the_settings_table_stands_for_the_keyword_beside_it(row, monkeypatch):
    keyword, *variables = literals(row[0])
    changed = {"tail_lease_ttl": 1, "evict_alpha": 1.0, "tail_protect": False}.get(keyword, True)
    for variable in variables:
        monkeypatch.setenv(variable, "1")
    expected = {keyword: changed} if variables else {}
    assert resolve() == dataclasses.replace(Settings(), **expected)


@pytest.mark.parametrize("row", rows(page("settings.rst"), "keyword"), ids=lambda row: literals(row[0])[0])
def test_a_default_of_the_settings_table_is_the_default(row):
    keyword = literals(row[0])[0]
    # Quotas may change while a cache lives, so they are none of the settings that stay.
    default = inspect.signature(RadixTree).parameters[keyword].default if keyword == "quotas" else None
    default = getattr(Settings(), keyword, default)
    if default is None:
        word = {"check_secret": "random", "max_pinned_blocks": "any", "quotas": "none"}[keyword]
    else:
        word = {False: "off", True: "on"}[default] if isinstance(default, bool) else str(default)
    assert row[1] == word


def test_the_table_of_loggers_has_every_logger_and_no_other():
    logging_modules = [
        ".".join(("metrale_numba", *source.relative_to(PACKAGE).with_suffix("").parts))
        for source in PACKAGE.rglob("*.py")
        if "logging.getLogger(__name__)" in source.read_text(encoding="utf-8")
    ]
    documented = [name for row in rows(page("settings.rst"), "logger") for name in literals(row[0])]
    assert sorted(documented) == sorted(logging_modules)


# -------------------------------------------------------------------------------------------------------------- replay


def test_the_replay_page_has_every_option_and_no_other():
    with main.make_context("metrale-numba", ["replay"], resilient_parsing=True) as context:
        command = main.commands["replay"]
        options = [
            name if parameter.param_type_name == "option" else name.upper()
            for parameter in command.get_params(context)
            for name in parameter.opts
        ]
    documented = [
        name.split()[0]
        for line in re.findall(r"^\.\. option:: (.+)$", page("replay.rst"), re.M)
        for name in line.split(", ")
    ]
    # --help is added by click when the command runs, in a context of its own.
    assert sorted({*options, "-h", "--help"}) == sorted(documented)


def test_a_default_of_the_replay_page_is_the_default():
    with main.make_context("metrale-numba", ["replay"], resilient_parsing=True) as context:
        expected = {
            parameter.opts[0]: f"{parameter.default:,}"
            for parameter in main.commands["replay"].get_params(context)
            if type(parameter.default) is int
        }
    options = re.split(r"^\.\. option:: ", page("replay.rst"), flags=re.M)[1:]
    defaults = {option.split()[0]: re.findall(r"([\d,]*\d) by\s+default", option) for option in options}
    assert {name: default for name, (default,) in filter(all, defaults.items())} == expected
    assert len(expected) == 3


@pytest.mark.parametrize("row", rows(page("replay.rst"), "workload"), ids=lambda row: row[0].strip("`"))
def test_the_figures_of_a_workload_are_those_of_a_replay(row):
    def hit_rate(capacity):
        player = Replay(RadixTree(block_size=1), capacity=capacity)
        for request in workload(literals(row[0])[0], seed=0, requests=20_000, sessions=1_000):
            player.play(request)
        return player.result().block_hit_rate, player.result().blocks

    (without_limit, blocks), (limited, _) = hit_rate(None), hit_rate(10_000)
    assert row[1:] == [f"{blocks:,}", f"{without_limit:.2%}", f"{limited:.2%}"]


def test_the_replay_page_has_an_example_of_every_format_of_a_trace(tmp_path):
    examples = re.findall(r"^.. code-block:: json\n\n((?:   .+\n)+)", page("replay.rst"), re.M)
    formats = []
    for example in examples:
        trace = tmp_path / "trace.jsonl"
        trace.write_text(" ".join(example.split()))
        with open_trace(trace) as reader:
            assert len(list(reader)) == 1
            formats.append(reader.format)
    assert formats == ["mooncake", "bailian", "tokens"]


def test_the_replay_page_has_every_workload_and_no_other():
    assert [literals(row[0])[0] for row in rows(page("replay.rst"), "workload")] == list(WORKLOADS)


def test_the_replay_page_has_every_field_of_the_json_object_and_no_other():
    ran = CliRunner().invoke(main, ["replay", "--json", "--requests", "20", "--blocks", "50"], catch_exceptions=False)
    documented = [name for row in rows(page("replay.rst"), "field") for name in literals(row[0])]
    assert documented == list(json.loads(ran.stdout))


# ------------------------------------------------------------------------------------------------------------ examples


@pytest.fixture
def example_engine(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("example_engine")


@pytest.mark.parametrize(
    "path", [path for path in PAGES if ">>> " in path.read_text(encoding="utf-8")], ids=lambda path: path.stem
)
@pytest.mark.usefixtures("example_engine")
def test_the_examples_of_a_page_answer_what_it_says(path):
    failed, attempted = doctest.testfile(str(path), module_relative=False, encoding="utf-8")
    assert attempted
    assert not failed


class Load:
    """Requests that come, go on and end at random in the engine of the protocol page.

    Some are aborted, and now and then all that is in the tier is lost.
    """

    def __init__(self, module, seed):
        self.random = random.Random(seed)
        self.module = module
        choose = self.random.choice
        self.cache = RadixTree(
            block_size=choose([1, 2, 3, 4]),
            partial_tail_sharing=choose([True, False]),
            adopt_blocks=choose([True, False]),
            hermetic=choose([True, False]),
        )
        self.engine = module.Engine(
            self.cache, num_blocks=choose([8, 20, 40]), num_slots=choose([1, 2, 4]), tier_size=choose([0, 1, 3])
        )
        self.running = []
        self.prompts = [[]]
        self.lost_keys = set()

    def step(self):
        if not self.running or self.random.random() < 0.2:
            self.admit()
            return
        sequence = self.random.choice(self.running)
        left = len(sequence.tokens) - sequence.computed
        match self.random.choice(["compute", "publish", "decode", "save", "save tail", "finish", "abort", "lose"]):
            case "compute":
                self.engine.compute(sequence, self.random.randint(0, left))
            case "publish":
                self.engine.publish(sequence)
            case "decode":
                self.engine.compute(sequence, left)
                self.engine.decode(sequence, self.random.randint(0, 1))
            case "save":
                self.engine.save_snapshot(sequence)
            case "save tail":
                self.engine.save_snapshot(sequence, tail=True)
            case "finish":
                self.engine.compute(sequence, left)
                self.engine.publish(sequence)
                self.engine.save_snapshot(sequence, tail=True)
                self.end(sequence)
            case "abort":
                self.end(sequence)
            case "lose":
                self.lost_keys |= self.engine.tier.keys()
                self.engine.tier.clear()

    def admit(self):
        known = self.random.choice(self.prompts)
        known = known[: self.random.randint(0, len(known))]
        tokens = known + [self.random.randint(0, 1) for _ in range(self.random.randint(1, 5))]
        sequence = self.engine.admit(tokens, session=self.random.randint(0, 2), adapter=self.random.choice([0, 0, 3]))
        if sequence is not None:
            self.running.append(sequence)

    def end(self, sequence):
        self.engine.end(sequence)
        self.running.remove(sequence)
        self.prompts.append(sequence.tokens)

    def check(self):
        for sequence in self.running:
            states = [sequence.adapter]
            for token in sequence.tokens[: sequence.computed]:
                states.append(self.module.next_state(states[-1], token))
            assert self.engine.kv_of(sequence) == states[1:]
            assert sequence.state == states[-1]
        assert self.cache.stats_detail().over_releases == 0
        in_tables = Counter(block for sequence in self.running for block in sequence.table)
        stored = sum(self.engine.blocks.counts) - in_tables.total()
        detail = self.cache.stats_detail()
        assert stored == detail.num_blocks + detail.num_suffix_blocks
        assert self.cache.settings.partial_tail_sharing or detail.num_suffix_blocks == 0


@pytest.mark.parametrize("seed", range(12))
def test_the_example_engine_keeps_every_block_and_state_right_and_loses_none(example_engine, seed):
    load = Load(example_engine, seed)
    for _ in range(250):
        load.step()
        load.check()
    for sequence in list(load.running):
        load.end(sequence)
    assert load.engine.make_room(len(load.engine.blocks.counts))
    while (slot := load.cache.evict_snapshot_lru()) is not None:
        load.engine.slots.drop([slot])
    assert not any(load.engine.slots.counts)
    for key in load.lost_keys | load.engine.tier.keys():
        load.cache.forget_snapshot_tier_key(key)
    assert load.cache.snapshot_count() == 0


@pytest.mark.parametrize("tail", [False, True])
def test_the_example_engine_keeps_no_slot_and_no_block_where_nothing_is_cached(example_engine, tail):
    engine = example_engine.Engine(NoPrefixCaching(block_size=4), num_blocks=3, num_slots=1, tier_size=1)
    for _ in range(2):
        sequence = engine.admit(range(10), session=1, adapter=3)
        engine.compute(sequence, 10)
        engine.publish(sequence)
        engine.save_snapshot(sequence, tail=tail)
        engine.end(sequence)
        assert engine.slots.counts == [0]
        assert engine.blocks.counts == [0, 0, 0]
