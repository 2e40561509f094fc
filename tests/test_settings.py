"""Keywords, variables and defaults: which one holds, and what is refused or passed over."""

import dataclasses
import logging

import numpy as np
import pytest

from metrale_numba.settings import Settings, resolve

SWITCHES = {
    "partial_tail_sharing": "METRALE_PREFIX_SUBBLOCK",
    "hermetic": "METRALE_HERMETIC",
    "adopt_blocks": "METRALE_ADOPT_BLOCKS",
}
PROTECT = "METRALE_DISABLE_SSM_TAIL_PROTECT"
TTL = "METRALE_SSM_TAIL_LEASE_TTL"
ALPHA = "METRALE_SNAP_EVICT_ALPHA"
LEGACY = "METRALE_SNAP_EVICT_LEGACY"
VARIABLES = [*SWITCHES.values(), PROTECT, TTL, ALPHA, LEGACY]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def errors(caplog):
    """The errors logged so far, and nothing else may be logged."""

    def logged():
        assert all(record.levelno == logging.ERROR for record in caplog.records)
        assert all(record.name == "metrale_numba.settings" for record in caplog.records)
        return [record.getMessage() for record in caplog.records]

    caplog.set_level(logging.DEBUG)
    return logged


def test_without_keywords_and_variables_the_defaults_hold(errors):
    assert resolve() == Settings(
        partial_tail_sharing=False,
        tail_protect=True,
        tail_lease_ttl=64,
        evict_alpha=0.0,
        evict_legacy=False,
        hermetic=False,
        adopt_blocks=False,
        block_size=16,
        check_secret=None,
        strict=False,
        max_pinned_blocks=None,
        reserve=0,
        ghosts=0,
    )
    assert errors() == []


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("partial_tail_sharing", True),
        ("tail_protect", False),
        ("tail_lease_ttl", 0),
        ("tail_lease_ttl", 2**63 - 1),
        ("evict_alpha", 0.0),
        ("evict_alpha", 0.75),
        ("evict_alpha", 8.0),
        ("evict_legacy", True),
        ("hermetic", True),
        ("adopt_blocks", True),
        ("block_size", 1),
        ("block_size", 256),
        ("check_secret", b"shared by all replicas"),
        ("check_secret", b""),
        ("reserve", 1),
        ("reserve", 2**31),
        ("ghosts", 1),
        ("ghosts", 2**31),
    ],
)
def test_a_keyword_sets_its_own_field_only(keyword, value):
    assert resolve(**{keyword: value}) == dataclasses.replace(Settings(), **{keyword: value})


@pytest.mark.parametrize(
    ("keyword", "value", "want"),
    [
        ("evict_alpha", 3, 3.0),
        ("evict_alpha", np.float32(0.5), 0.5),
        ("evict_alpha", np.int64(8), 8.0),
        ("tail_lease_ttl", np.int64(5), 5),
        ("block_size", np.uint8(32), 32),
        ("reserve", np.uint16(1000), 1000),
    ],
)
def test_numbers_of_other_types_come_out_as_plain_ones(keyword, value, want):
    got = getattr(resolve(**{keyword: value}), keyword)
    assert got == want
    assert type(got) is type(want)


@pytest.mark.parametrize(
    ("keyword", "values"),
    [
        *((name, [0, 1, "1", "on", 1.0, np.True_, [], b"1"]) for name in [*SWITCHES, "tail_protect", "evict_legacy"]),
        ("tail_lease_ttl", [True, 1.0, "64", [64], np.array(64)]),
        ("evict_alpha", [True, np.True_, "0.5", 1j, [1.0], np.array(1.0)]),
        ("block_size", [True, 16.0, "16", [16], np.array(16)]),
        ("reserve", [None, True, 16.0, "16", [16], np.array(16)]),
        ("check_secret", ["secret", 5, bytearray(b"secret"), [1]]),
    ],
)
def test_a_keyword_of_the_wrong_type_is_a_type_error_naming_it(keyword, values):
    for value in values:
        with pytest.raises(TypeError, match=f"^{keyword} must be"):
            resolve(**{keyword: value})


@pytest.mark.parametrize(
    ("keyword", "values"),
    [
        ("tail_lease_ttl", [-1, 2**63]),
        ("evict_alpha", [-0.001, 8.001, float("nan"), float("inf"), float("-inf"), -1, 9, 2**20000]),
        ("block_size", [0, -1, 2**63]),
        ("reserve", [-1, 2**31 + 1, 2**63, 2**64]),
    ],
)
def test_a_keyword_out_of_range_is_a_value_error_naming_it(keyword, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"^{keyword} is .*, outside \d\.\."):
            resolve(**{keyword: value})


def test_a_refused_secret_is_not_shown():
    with pytest.raises(TypeError) as refusal:
        resolve(check_secret="hunter2")
    assert "hunter2" not in str(refusal.value)


def test_settings_do_not_show_their_secret():
    assert "hunter2" not in repr(resolve(check_secret=b"hunter2"))


def test_settings_are_given_by_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        resolve(True)


def test_settings_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolve().block_size = 1


@pytest.mark.parametrize(("keyword", "variable"), SWITCHES.items())
@pytest.mark.parametrize(("text", "want"), [("1", True), ("0", False), ("", False)])
def test_a_switch_is_on_for_1_and_off_for_0_and_nothing(monkeypatch, errors, keyword, variable, text, want):
    monkeypatch.setenv(variable, text)
    assert resolve() == dataclasses.replace(Settings(), **{keyword: want})
    assert errors() == []


@pytest.mark.parametrize(("keyword", "variable"), SWITCHES.items())
@pytest.mark.parametrize("text", ["true", "on", "yes", "2", "-1", " 1", "1 ", "01", "nan"])
def test_a_switch_with_anything_else_is_off_and_logged(monkeypatch, errors, keyword, variable, text):
    monkeypatch.setenv(variable, text)
    assert getattr(resolve(), keyword) is False
    assert errors() == [f"{variable} is {text!r}, but must be 0 or 1; it counts as 0"]


@pytest.mark.parametrize("text", ["1", "on", "true"])
def test_tail_protection_is_turned_off_by_three_words(monkeypatch, errors, text):
    monkeypatch.setenv(PROTECT, text)
    assert resolve() == dataclasses.replace(Settings(), tail_protect=False)
    assert errors() == []


@pytest.mark.parametrize("text", ["", "0", "off", "false", "yes", "2", "True", "ON", " 1"])
def test_tail_protection_stays_on_for_any_other_text(monkeypatch, errors, text):
    monkeypatch.setenv(PROTECT, text)
    assert resolve() == Settings()
    assert errors() == []


@pytest.mark.parametrize("text", ["", "0", "1", "off", "anything"])
def test_legacy_eviction_is_turned_on_by_any_text(monkeypatch, errors, text):
    monkeypatch.setenv(LEGACY, text)
    assert resolve() == dataclasses.replace(Settings(), evict_legacy=True)
    assert errors() == []


@pytest.mark.parametrize(("text", "want"), [("0", 0), ("1", 1), ("500", 500), (str(2**63 - 1), 2**63 - 1)])
def test_the_lease_is_read_from_its_variable(monkeypatch, errors, text, want):
    monkeypatch.setenv(TTL, text)
    assert resolve() == dataclasses.replace(Settings(), tail_lease_ttl=want)
    assert errors() == []


@pytest.mark.parametrize("text", ["", " ", "-1", "1.5", "64x", "nan", "inf", "0x10", str(2**63), "9" * 5000])
def test_a_lease_that_is_no_count_is_logged_and_the_default_holds(monkeypatch, errors, text):
    monkeypatch.setenv(TTL, text)
    assert resolve().tail_lease_ttl == 64
    assert errors() == [f"{TTL} is {text!r}, but must be a whole number from 0 on; the default, 64, holds"]


@pytest.mark.parametrize(
    ("text", "want"),
    [("0", 0.0), ("0.25", 0.25), ("1e-3", 0.001), ("8", 8.0), ("8.5", 8.0), ("1e400", 8.0), ("inf", 8.0)],
)
def test_alpha_is_read_from_its_variable_and_clamped(monkeypatch, errors, text, want):
    monkeypatch.setenv(ALPHA, text)
    assert resolve() == dataclasses.replace(Settings(), evict_alpha=want)
    assert errors() == []


@pytest.mark.parametrize("text", ["", "-0.5", "-inf", "nan", "NaN", "much", "1,5"])
def test_an_alpha_that_is_no_weight_is_logged_and_the_default_holds(monkeypatch, errors, text):
    monkeypatch.setenv(ALPHA, text)
    assert resolve().evict_alpha == 0.0
    assert errors() == [f"{ALPHA} is {text!r}, but must be a number from 0 on; the default, 0.0, holds"]


@pytest.mark.parametrize(
    ("variable", "text", "keyword", "value"),
    [
        *((variable, "1", keyword, False) for keyword, variable in SWITCHES.items()),
        (PROTECT, "1", "tail_protect", True),
        (LEGACY, "1", "evict_legacy", False),
        (TTL, "7", "tail_lease_ttl", 0),
        (ALPHA, "7", "evict_alpha", 0.0),
    ],
)
def test_a_keyword_goes_before_its_variable_even_if_it_is_false_or_zero(monkeypatch, variable, text, keyword, value):
    monkeypatch.setenv(variable, text)
    assert getattr(resolve(**{keyword: value}), keyword) == value


def test_a_damaged_variable_is_not_read_where_the_keyword_is_given(monkeypatch, errors):
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "rubbish")
    resolve(
        partial_tail_sharing=False,
        tail_protect=True,
        tail_lease_ttl=1,
        evict_alpha=1.0,
        evict_legacy=False,
        hermetic=False,
        adopt_blocks=False,
    )
    assert errors() == []


def test_variables_are_read_when_asked_and_not_before(monkeypatch):
    assert resolve().tail_lease_ttl == 64
    monkeypatch.setenv(TTL, "3")
    assert resolve().tail_lease_ttl == 3
    monkeypatch.delenv(TTL)
    assert resolve().tail_lease_ttl == 64
