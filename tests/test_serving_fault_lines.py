"""The faults that are planted in the serving layer now and then: every line that one of them changes is still there."""

from __future__ import annotations

import pytest
from serving_faults import FAULTS, Fault, planted


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name.replace(" ", "-") for fault in FAULTS])
def test_the_line_that_a_fault_changes_is_there(fault: Fault) -> None:
    assert planted(fault)
