"""How all tests run: the Hypothesis profiles, an environment without cache settings, a clock that stands still.

It relies on pytest loading this file before Hypothesis chooses its profile, and promises that ``normal`` holds unless
``--hypothesis-profile`` names another.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from pair import Clock

#: For a second run under other circumstances.
SHORT_EXAMPLES = 30
NORMAL_EXAMPLES = 300
LONG_EXAMPLES = 10 * NORMAL_EXAMPLES
STEPS = 50

#: The variables that stand in for constructor keywords left out; a test that wants one sets it itself.
CACHE_VARIABLES = (
    "METRALE_PREFIX_SUBBLOCK",
    "METRALE_DISABLE_SSM_TAIL_PROTECT",
    "METRALE_SSM_TAIL_LEASE_TTL",
    "METRALE_SNAP_EVICT_ALPHA",
    "METRALE_SNAP_EVICT_LEGACY",
    "METRALE_HERMETIC",
    "METRALE_ADOPT_BLOCKS",
)

# For defects planted on purpose: the same examples each time, and no search for the smallest that fails.
settings.register_profile(
    "planted-faults",
    max_examples=NORMAL_EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate,),
    suppress_health_check=tuple(HealthCheck),
)
for _profile, _examples in (("short", SHORT_EXAMPLES), ("normal", NORMAL_EXAMPLES), ("long", LONG_EXAMPLES)):
    settings.register_profile(
        _profile,
        max_examples=_examples,
        stateful_step_count=STEPS,
        deadline=None,
        # A busy machine is no defect of the strategies.
        suppress_health_check=(HealthCheck.too_slow,),
        print_blob=True,
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--hypothesis-profile", default=None):
        settings.load_profile("normal")


@pytest.fixture(scope="session", autouse=True)
def _no_cache_variables() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in CACHE_VARIABLES:
            patch.delenv(name, raising=False)
        yield


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The monotonic clock, which stands still but for what a test adds to its seconds."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock
