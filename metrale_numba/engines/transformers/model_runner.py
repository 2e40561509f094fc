"""One model of transformers: how it is run over some tokens, and whether it can go on from a state in one piece.

Not every model continues exactly. The scan of Mamba-1 starts from nothing whenever it is given several tokens at once,
and some models keep their state in the model, where sessions mix. What a model does is found out by trying, for the
answer changes from release to release. With transformers 5.24:

* exact with any number of tokens: models with attention alone, sliding windows included (Llama, Mistral, Gemma 2, 3 and
  3n, GPT-OSS, Llama 4, DeepSeek-V3), with Mamba-2 (Mamba2, Bamba, Falcon-H1, Granite 4, Nemotron-H, Zamba2), with gated
  delta rule (Qwen3-Next, Qwen3.5, OLMo-Hybrid), and with short convolutions (LFM2);
* exact token by token alone: those with Mamba-1 (Mamba, Falcon-Mamba, Jamba);
* refused: RecurrentGemma, which keeps its state in the model, and MiniMax, which wants a cache of its own.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from itertools import chain
from typing import Any, Final

import numpy as np

from metrale_numba.arguments import shown
from metrale_numba.engines.transformers.imports import Cache, Model, Tensor, cache_utils, torch
from metrale_numba.engines.transformers.layer_layout import LayerLayout, read_layout
from metrale_numba.engines.transformers.state_store import StateStore
from metrale_numba.interface import Ids

__all__ = ["CONTINUATIONS", "ModelRunner"]

CONTINUATIONS: Final = ("auto", "chunk", "token")
"""How a model may go on from a state: as it is found to be able to, many tokens at once, or one by one."""

# The trial: a prefix long enough to matter to a state, and a rest so short that it cannot make up for a lost one.
_TRIAL_PREFIX: Final = 24
_TRIAL_REST: Final = 4

# How far a continuation may be from a cold start, relative to its size. A lost state is off by nearly its whole size.
_TOLERANCE: Final = 1e-3
_TOLERANCE_HALF: Final = 0.1

# Values of a weight that are hashed at once, so that one on another device is never copied whole.
_HASHED_AT_ONCE: Final = 2**22


class ModelRunner:
    """Runs a model over tokens, always with a cache and with positions.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model; it is put into evaluation mode.
    continuation : {"auto", "chunk", "token"}
        How it goes on from a state. ``"auto"`` finds out, by running it over a few dozen tokens.
    activate_adapter : callable, optional
        Called with the number of an adapter before the model is run under another than before, or nothing is known of
        which is active: at first, after a failure, and after :meth:`forget_adapter`.

    Attributes
    ----------
    layout : LayerLayout
        What the model keeps of its tokens.
    vocab_size : int
        Tokens are smaller than this.
    most_tokens : int or None
        Positions that the model was made for, if it says so.
    continues_in_chunks : bool
        Whether several tokens at once may follow a state.

    Raises
    ------
    TypeError
        If it is no model, or `activate_adapter` cannot be called.
    ValueError
        If the model cannot be continued exactly, or keeps what can be put neither into blocks nor into slots.
    """

    def __init__(
        self,
        model: Model,
        continuation: str = "auto",
        activate_adapter: Callable[[int], object] | None = None,
    ) -> None:
        if continuation not in CONTINUATIONS:
            raise ValueError(f"continuation must be one of {', '.join(CONTINUATIONS)}, not {continuation!r}")
        if not callable(getattr(model, "eval", None)) or not hasattr(model, "config"):
            raise TypeError(f"model must be a model of transformers, not {type(model).__name__}")
        if activate_adapter is not None and not callable(activate_adapter):
            raise TypeError(f"activate_adapter must be callable, not {shown(activate_adapter)}")
        self._model = model.eval()
        self._activate_adapter = activate_adapter
        # The one that is active, if that is known.
        self._adapter: int | None = None
        config = model.config.get_text_config(decoder=True)
        self.vocab_size = int(config.vocab_size)
        self.most_tokens: int | None = getattr(config, "max_position_embeddings", None)
        # Of a long prompt only the last row is of use, and all rows of a large vocabulary take much memory.
        takes_last_only = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._options: dict[str, Any] = {"logits_to_keep": 1} if takes_last_only else {}
        self.layout = self._probe()
        self.continues_in_chunks = continuation == "chunk"
        if continuation == "auto":
            self.continues_in_chunks = self._find_out()

    @property
    def takes_adapters(self) -> bool:
        """Whether the model can be run under adapters other than 0."""
        return self._activate_adapter is not None

    def new_cache(self) -> Cache:
        """Make the cache of a sequence that has no tokens yet."""
        return cache_utils.DynamicCache(config=self._model.config)

    def forget_adapter(self) -> None:
        """Assume nothing of which adapter is active, and with which weights: the next run activates its own."""
        self._adapter = None

    def run(self, cache: Cache, tokens: Ids, start: int, adapter: int = 0) -> Tensor:
        """Compute the tokens that follow the first `start`, and put what is kept of them into the cache.

        Returns
        -------
        tensor, shape (vocab_size,)
            The logits after the last of them.
        """
        self._activate(adapter)
        device = self._model.device
        output = self._model(
            input_ids=torch.from_numpy(tokens.astype(np.int64))[None].to(device),
            # The model would count from the first layer's length, which says nothing if that is a recurrent one.
            position_ids=torch.arange(start, start + tokens.size, device=device)[None],
            cache=cache,
            use_cache=True,
            **self._options,
        )
        return output.logits[0, -1]

    def fingerprint(self) -> str:
        """Name the model by its class, its configuration and its weights.

        What was cached of a model is then taken for that of no other, be it that a single value was trained on. Every
        byte of every parameter and buffer is read, as they are now.
        """
        kind = type(self._model)
        digest = hashlib.blake2b(f"{kind.__module__}.{kind.__qualname__} ".encode(), digest_size=32)
        digest.update(self._model.config.to_json_string(use_diff=False).encode())
        for name, tensor in chain(self._model.named_parameters(), self._model.named_buffers()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            for part in tensor.detach().reshape(-1).split(_HASHED_AT_ONCE):
                # NumPy has no bfloat16, but everything has bytes.
                digest.update(part.cpu().contiguous().view(torch.uint8).numpy())
        return digest.hexdigest()

    def _activate(self, adapter: int) -> None:
        if self._activate_adapter is not None and adapter != self._adapter:
            # If it fails, it may have switched nevertheless, or halfway.
            self._adapter = None
            self._activate_adapter(adapter)
            self._adapter = adapter

    def _probe(self) -> LayerLayout:
        cache = self.new_cache()
        with torch.inference_mode():
            # Here, so that its errors are not taken for the model's.
            self._activate(0)
            try:
                self.run(cache, np.zeros(1, np.uint32), 0)
            except (ValueError, TypeError, AttributeError) as error:
                raise ValueError(f"{type(self._model).__name__} does not run with a DynamicCache: {error}") from error
        return read_layout(cache)

    def _find_out(self) -> bool:
        tokens = ((np.arange(_TRIAL_PREFIX + _TRIAL_REST) * 7 + 3) % self.vocab_size).astype(np.uint32)
        with torch.inference_mode():
            cold = self.new_cache()
            wanted = self._kept(cold, self.run(cold, tokens, 0))
            for step in (_TRIAL_REST, 1):
                found = self._continued(tokens, step)
                if self._is_close(found, wanted) and self._heeds_states(tokens, step, found):
                    return step > 1
        raise ValueError(
            f"{type(self._model).__name__} does not continue from a state, not even token by token, as it computes "
            "from the beginning"
        )

    def _heeds_states(self, tokens: Ids, step: int, found: list[Tensor]) -> bool:
        """Whether the continuation comes out otherwise without its states.

        In half precision a state that fades fast is within the tolerance of none at all. But where it is not even
        read, nothing differs by a single bit.
        """
        for kind in {field.kind for field in self.layout.states} & {"conv", "recurrent"}:
            lost = self._continued(tokens, step, without=kind)
            if all(torch.equal(mine, theirs) for mine, theirs in zip(found, lost, strict=True)):
                return False
        return True

    def _continued(self, tokens: Ids, step: int, without: str = "") -> list[Tensor]:
        """Compute a prefix, forget all but what is kept, and compute the rest; without one kind of state if asked."""
        first = self.new_cache()
        self.run(first, tokens[:_TRIAL_PREFIX], 0)
        states = StateStore(self.layout, 1)
        states.save(first, states.memory[0])
        for field in self.layout.states:
            if field.kind == without:
                states.tensor(states.memory[0], field).zero_()
        # Another sequence in between: what the model keeps to itself is now of that one.
        self.run(self.new_cache(), tokens[::-1].copy(), 0)
        second = self.new_cache()
        for layer in self.layout.attention:
            filled = first.layers[layer.index]
            second.layers[layer.index].update(filled.keys, filled.values)
        states.restore(states.memory[0], second)
        for start in range(_TRIAL_PREFIX, tokens.size, step):
            logits = self.run(second, tokens[start : start + step], start)
        return self._kept(second, logits)

    def _kept(self, cache: Cache, logits: Tensor) -> list[Tensor]:
        states = StateStore(self.layout, 0)
        row = states.new_row()
        states.save(cache, row)
        kept = [logits, *(states.tensor(row, field) for field in self.layout.states)]
        for layer in self.layout.attention:
            kept += [cache.layers[layer.index].keys, cache.layers[layer.index].values]
        return kept

    def _is_close(self, found: list[Tensor], wanted: list[Tensor]) -> bool:
        tolerance = _TOLERANCE_HALF if self._model.dtype.itemsize < 4 else _TOLERANCE
        for mine, theirs in zip(found, wanted, strict=True):
            if mine.shape != theirs.shape:
                return False
            distance = torch.linalg.vector_norm(mine.double() - theirs.double())
            if distance > tolerance * torch.linalg.vector_norm(theirs.double()):
                return False
        return True
