"""What the blocks of a load take in memory: options that tell it, by bytes or by the config of a model.

A command that tells sizes takes these options from here: :func:`memory_options`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import NamedTuple

import click
from click.core import ParameterSource

from metrale_numba.replay.model_size import DTYPE_BYTES, ModelConfigError, ModelSize, model_size

__all__ = ["Memory", "memory_options"]

# A config takes some thousand bytes. Without a bound, a mistyped name of a file of weights would be read whole.
_LARGEST_CONFIG = 16 * 1024 * 1024

# By the names of their parameters.
_OF_A_MODEL = ("kv_dtype", "state_dtype", "tensor_parallel")


class Memory(NamedTuple):
    """What KV takes, as far as the user told of it."""

    bytes_per_token: int | None
    """KV of one token; None if nothing was told."""
    model: ModelSize | None
    """What the config of the model came to; None without."""

    @property
    def devices(self) -> int:
        """On how many devices each block takes what it takes."""
        return 1 if self.model is None else self.model.tensor_parallel

    @property
    def on_each_device(self) -> str:
        """What is to be added in words to a size; nothing if there is one device."""
        return "" if self.devices == 1 else f" on each of {self.devices} devices"

    def bytes_per_block(self, tokens_per_block: int) -> int | None:
        """Give the size of a block.

        Parameters
        ----------
        tokens_per_block : int
            Tokens that it holds.

        Returns
        -------
        int or None
            Bytes; None if nothing was told.
        """
        return None if self.bytes_per_token is None else tokens_per_block * self.bytes_per_token

    def rows(self) -> list[tuple[str, str]]:
        """Give what is known, as labels and values of a table.

        Returns
        -------
        list of tuple of str
            Empty if nothing was told.
        """
        if self.bytes_per_token is None:
            return []
        model, each = self.model, self.on_each_device
        rows = [(f"KV bytes per token{each}", f"{self.bytes_per_token:,}")]
        if model is None:
            return rows
        rows.append(("attention", f"{model.attention} in {model.kv_dtype}"))
        rows.append(("layers that attend to all tokens", f"{model.full_attention_layers:,}"))
        if model.sliding_window_layers:
            rows.append((f"layers that attend to {model.sliding_window:,} tokens", f"{model.sliding_window_layers:,}"))
            rows.append(("KV bytes per token in these", f"{model.sliding_bytes_per_token:,}"))
        if model.recurrent_layers:
            rows.append(("recurrent layers", f"{model.recurrent_layers:,}"))
            rows.append((f"bytes of a snapshot of their state{each}", f"{model.state_bytes:,}"))
        return rows


_OPTIONS = (
    click.option(
        "--kv-bytes-per-token",
        metavar="N",
        type=click.IntRange(min=1),
        help="Bytes of KV that a token takes, to tell capacities in GB, too.",
    ),
    click.option(
        "--model",
        metavar="CONFIG",
        type=click.Path(path_type=Path),
        help="Work these bytes out from the config.json of a model, as Hugging Face has it, or of the directory that "
        "holds it. Nothing is downloaded.",
    ),
    click.option(
        "--kv-dtype",
        type=click.Choice(list(DTYPE_BYTES)),
        show_default="what the model computes in",
        help="What KV is kept as.",
    ),
    click.option(
        "--state-dtype",
        type=click.Choice(list(DTYPE_BYTES)),
        show_default="what the config says, or what the model computes in",
        help="What the state of recurrent layers is kept as.",
    ),
    click.option(
        "--tensor-parallel",
        metavar="N",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="Devices that share the model. All sizes are those on one of them.",
    ),
)


def memory_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that tell of a model's memory; it gets them as one, `memory`.

    Parameters
    ----------
    command : callable
        The command, which takes a :class:`Memory` as its keyword `memory`. The decorator stands above
        :func:`click.pass_context`.

    Returns
    -------
    callable
        The command with these options. It refuses what does not go together, and a config that cannot be understood,
        before anything is done.
    """

    @wraps(command)
    def with_memory(
        *arguments: object,
        kv_bytes_per_token: int | None,
        model: Path | None,
        kv_dtype: str | None,
        state_dtype: str | None,
        tensor_parallel: int,
        **others: object,
    ) -> None:
        context = click.get_current_context()
        if model is None:
            for option in _OF_A_MODEL:
                if context.get_parameter_source(option) is not ParameterSource.DEFAULT:
                    raise click.UsageError(f"--{option.replace('_', '-')} goes with --model alone.", context)
            memory = Memory(kv_bytes_per_token, None)
        elif kv_bytes_per_token is not None:
            raise click.UsageError("--kv-bytes-per-token does not go with --model.", context)
        else:
            path = model / "config.json" if model.is_dir() else model
            try:
                size = model_size(
                    _read_config(path), kv_dtype=kv_dtype, state_dtype=state_dtype, tensor_parallel=tensor_parallel
                )
            except ModelConfigError as error:
                message = f"{click.format_filename(path)}: {error}"
                raise click.BadParameter(message, context, param_hint="--model") from None
            memory = Memory(size.kv_bytes_per_token, size)
        command(*arguments, memory=memory, **others)

    decorated: Callable[..., None] = with_memory
    for add in reversed(_OPTIONS):
        decorated = add(decorated)
    return decorated


def _read_config(path: Path) -> Mapping[str, object]:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_CONFIG + 1)
    except OSError as error:
        raise ModelConfigError(f"cannot be read: {error.strerror or error}") from None
    if len(content) > _LARGEST_CONFIG:
        raise ModelConfigError("too large for a config")
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ModelConfigError("not a JSON object")
    return fields
