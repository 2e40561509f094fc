"""What a measurement was made on: date, processor, cores, and the versions of Python and of packages."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

__all__ = ["describe_machine"]

_CPU_INFO = Path("/proc/cpuinfo")


def _processor() -> str:
    # platform.processor() knows no more than the architecture on Linux.
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text().splitlines():
            field, _, value = line.partition(":")
            if field.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def describe_machine() -> Mapping[str, str | int]:
    """Describe this machine.

    Returns
    -------
    mapping of str to str or int
        ``date``, ``processor``, ``cores``, ``system``.
    """
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
    }
