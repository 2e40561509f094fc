"""Models of the transformers library, served with everything that this package caches.

:class:`TransformersEngine` keeps the KV of full-attention layers in blocks, and the states of recurrent layers and
sliding windows in snapshot slots; :class:`~metrale_numba.serving.ServingCache` says which. It is written to be read and
to be right: what it generates is what the model generates without it, several prompts in turn. It does not batch, and
copies a sequence's blocks into a ``transformers.DynamicCache`` when that begins. It needs the extra ``transformers``.
"""

from metrale_numba.engines.transformers.engine import TransformersEngine, greedy
from metrale_numba.engines.transformers.execution import EngineMemory
from metrale_numba.engines.transformers.requests import Generation

__all__ = ["EngineMemory", "Generation", "TransformersEngine", "greedy"]
