"""A Redis server of the tests' own: on a socket in a directory of its own, to be killed, stopped and started again.

It relies on a ``redis-server`` in the path, and says why a test is skipped that would need one.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class RedisServer:
    """A server that keeps nothing beyond its end, unless an option says so."""

    def __init__(self, directory: str, *options: str) -> None:
        self.directory = directory
        self.socket = str(Path(directory, "redis.sock"))
        self.url = f"unix://{self.socket}"
        self.options = options
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it, and wait until it says that it is ready."""
        command = ["redis-server", "--port", "0", "--unixsocket", self.socket, "--dir", self.directory, "--save", ""]
        self._process = subprocess.Popen([*command, *self.options], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        lines = []
        for line in self._process.stdout:
            if "eady to accept connections" in line:
                return
            lines.append(line)
        raise AssertionError(f"redis-server did not start: {''.join(lines)[-2000:]}")

    def kill(self) -> None:
        assert self._process is not None
        # One that is stopped gets it all the same.
        self._process.kill()
        self._process.communicate()
        self._process = None

    def pause(self) -> None:
        """Let it answer nobody, though it is there."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        if self._process is not None:
            self.kill()


@contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    """A server that runs; the test is skipped if there can be none."""
    pytest.importorskip("redis", reason="the package redis is not installed")
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server in the path")
    # Not pytest's own directory: the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="redis-") as directory:
        server = RedisServer(directory, *options)
        server.start()
        try:
            yield server
        finally:
            server.end()
