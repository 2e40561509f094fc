"""PyTorch and transformers, imported in one place so that one message says what is missing.

Both are an extra and not installed where this package is type-checked, so they are `Any` to the rest of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, TypeAlias

__all__ = ["Cache", "Model", "Tensor", "cache_utils", "torch"]

Tensor: TypeAlias = Any
"""A ``torch.Tensor``."""

Cache: TypeAlias = Any
"""A ``transformers.DynamicCache``: the keys, values and states of one sequence."""

Model: TypeAlias = Any
"""A causal language model of transformers."""


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{name} could not be imported ({error}); install it with: pip install 'metrale-numba[transformers]'"
        ) from error


torch = _imported("torch")
cache_utils = _imported("transformers.cache_utils")

# Earlier releases keep the states of a layer in another form, and take the cache under another name.
_OLDEST = (5, 24)
_version = _imported("transformers").__version__
if tuple(int(part) for part in _version.split(".")[:2]) < _OLDEST:
    raise ImportError(
        f"transformers {_version} is too old; update it with: pip install --upgrade 'metrale-numba[transformers]'"
    )
