"""The peers, by name: where the adapter of each is, which packages it needs, and how to get them.

Looking a peer up imports nothing of it; :meth:`Entry.load` does, in the process that measures it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

from benchmarks.peers.peer import Peer

__all__ = ["OURS", "PEERS", "REQUIREMENTS", "Entry"]

OURS = "metrale"
REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements-peers.txt"


@dataclass(frozen=True)
class Entry:
    """One peer."""

    name: str
    label: str
    adapter: str
    """Module and class, as in ``module:Class``."""
    packages: tuple[str, ...]
    """What must be installed; the first is the one whose version is told."""
    recipe: tuple[str, ...]
    """Commands that install them."""

    def load(self) -> Peer:
        """Import the adapter, and the peer with it, and make one."""
        module, _, name = self.adapter.partition(":")
        made: Peer = getattr(import_module(f"benchmarks.peers.{module}"), name)()
        return made


def pinned(package: str) -> str:
    """Find the line that pins a package in the requirements of the peers."""
    for line in REQUIREMENTS.read_text().splitlines():
        if line.partition("==")[0] == package:
            return line
    raise LookupError(f"{REQUIREMENTS.name} does not pin {package}")


# torch first and with its dependencies; then everything else just as it is pinned, since what sglang and vllm ask for
# contradicts each other and is mostly not needed.
_ENGINES = (
    "python -m venv peers",
    "peers/bin/pip install torch==2.13.0  # a CPU build is enough",
    "peers/bin/pip install --no-deps -r benchmarks/requirements-peers.txt",
    "python -m benchmarks.compare --python peers/bin/python",
)

PEERS: Mapping[str, Entry] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            Entry(OURS, "metrale_numba", "metrale:Metrale", ("numba", "numpy"), ("pip install '.[benchmarks]'",)),
            Entry(
                "sglang-unified",
                "SGLang unified (Rust)",
                "sglang_unified:SGLangUnified",
                ("sglang", "torch"),
                _ENGINES,
            ),
            Entry("sglang-radix", "SGLang RadixCache", "sglang_radix:SGLangRadix", ("sglang", "torch"), _ENGINES),
            Entry("vllm", "vLLM BlockPool", "vllm_block_pool:VLLMBlockPool", ("vllm", "torch", "xxhash"), _ENGINES),
            Entry(
                "dynamo",
                "Dynamo RadixTree",
                "dynamo_radix:DynamoRadix",
                ("ai-dynamo-runtime",),
                (f"pip install {pinned('ai-dynamo-runtime')}",),
            ),
            Entry(
                "pygtrie", "pygtrie", "pygtrie_trie:PygtrieTrie", ("pygtrie",), (f"pip install {pinned('pygtrie')}",)
            ),
        )
    }
)
