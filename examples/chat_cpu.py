"""Time to first token on the CPU, cold and warm: users who share a long system prompt, with real models.

The weights are random and nothing is downloaded, so the answers mean nothing; but how long they take, and that they are
the same with and without a cache, does not depend on that. It needs the extra ``transformers``:

    pip install 'metrale-numba[transformers]'
    python examples/chat_cpu.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import click
import numpy as np
import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from metrale_numba import NoPrefixCaching, RadixTree
from metrale_numba.engines.transformers import Generation, TransformersEngine

BLOCK_SIZE = 16
VOCAB_SIZE = 8192
USER_TOKENS = 32
SEED = 2026

# Blocks between two snapshots of a model with recurrent layers: four in a system prompt of 2,048 tokens.
SNAPSHOT_EVERY = 32


def llama() -> transformers.PreTrainedModel:
    """Make a model with attention alone, which needs the blocks of a prefix and nothing else."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=384,
            intermediate_size=1152,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=16384,
        )
    )


def bamba() -> transformers.PreTrainedModel:
    """Make a hybrid model, most of whose layers are Mamba-2: it needs their states as well."""
    return transformers.BambaForCausalLM(
        transformers.BambaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=384,
            intermediate_size=1152,
            num_hidden_layers=6,
            attn_layer_indices=[3],
            num_attention_heads=6,
            num_key_value_heads=2,
            mamba_n_heads=12,
            mamba_d_head=64,
            mamba_d_state=32,
            mamba_n_groups=1,
            mamba_chunk_size=32,
            max_position_embeddings=16384,
        )
    )


MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {"llama": llama, "bamba": bamba}


@dataclass
class Turn:
    """One turn of one user, computed without a cache and with one."""

    user: int
    number: int
    prompt_tokens: int
    cold: Generation
    warm: Generation

    @property
    def kind(self) -> str:
        """What the cache can know at this turn."""
        if self.number > 1:
            return "next turn"
        return "new user" if self.user > 1 else "first"


def chats(
    name: str, shared_tokens: int, users: int, turns: int, new_tokens: int, tick: Callable[[], None]
) -> list[Turn]:
    """Let every user have their turns, each computed cold and warm."""
    torch.manual_seed(SEED)
    model = MODELS[name]()
    longest = shared_tokens + turns * (USER_TOKENS + new_tokens)
    blocks = -(-longest // BLOCK_SIZE) * users
    without = TransformersEngine(model, blocks, 1, cache=NoPrefixCaching())
    cached = TransformersEngine(
        model, blocks, 4 * users + 8, cache=RadixTree(block_size=BLOCK_SIZE), snapshot_every=SNAPSHOT_EVERY
    )
    random = np.random.default_rng(SEED)
    shared = random.integers(3, VOCAB_SIZE, shared_tokens).tolist()
    # What is done for the first time takes longer, and is not what this is about.
    for engine in (without, cached):
        engine.generate([random.integers(3, VOCAB_SIZE, USER_TOKENS).tolist()], 2)
    done = []
    for user in range(1, users + 1):
        prompt = list(shared)
        for number in range(1, turns + 1):
            prompt += random.integers(3, VOCAB_SIZE, USER_TOKENS).tolist()
            (cold,) = without.generate([prompt], new_tokens)
            (warm,) = cached.generate([prompt], new_tokens, sessions=[user])
            done.append(Turn(user, number, len(prompt), cold, warm))
            prompt += warm.tokens
            tick()
    cached.serving.check_integrity()
    return done


def summary(results: dict[str, list[Turn]]) -> Table:
    """Put the medians into a table."""
    table = Table(
        title="Seconds to the first token, medians", caption="same: whether the answers are the same, cold and warm"
    )
    table.add_column("model")
    table.add_column("turn")
    for heading in ("prompt", "computed", "cold", "warm", "ratio"):
        table.add_column(heading, justify="right")
    table.add_column("same")
    for name, turns in results.items():
        for kind in dict.fromkeys(turn.kind for turn in turns):
            chosen = [turn for turn in turns if turn.kind == kind]
            cold = median(turn.cold.seconds_to_first_token for turn in chosen)
            warm = median(turn.warm.seconds_to_first_token for turn in chosen)
            table.add_row(
                name,
                kind,
                f"{median(turn.prompt_tokens for turn in chosen):,.0f}",
                f"{median(turn.prompt_tokens - turn.warm.compute_from for turn in chosen):,.0f}",
                f"{cold:.3f}",
                f"{warm:.3f}",
                f"{cold / warm:.1f}x",
                "yes" if all(turn.cold.tokens == turn.warm.tokens for turn in chosen) else "NO",
            )
        table.add_section()
    return table


@click.command(help=__doc__.split("\n\n", maxsplit=1)[0])
@click.option("--model", "names", multiple=True, type=click.Choice(list(MODELS)), help="Default: each.")
@click.option("--shared-tokens", default=2048, show_default=True, type=click.IntRange(1), help="Of the system prompt.")
@click.option("--users", default=3, show_default=True, type=click.IntRange(2))
@click.option("--turns", default=2, show_default=True, type=click.IntRange(1), help="Of each user.")
@click.option("--new-tokens", default=16, show_default=True, type=click.IntRange(1), help="Of each answer.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="That PyTorch may use.")
def main(names: tuple[str, ...], shared_tokens: int, users: int, turns: int, new_tokens: int, threads: int) -> None:
    """Run the chats and print the table."""
    torch.set_num_threads(threads)
    # It says once for each kernel that there is a faster one for other hardware.
    transformers.logging.set_verbosity_error()
    console = Console()
    names = names or tuple(MODELS)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for name in names:
            task = progress.add_task(name, total=users * turns)
            results[name] = chats(
                name, shared_tokens, users, turns, new_tokens, lambda task=task: progress.advance(task)
            )
    console.print(summary(results))


if __name__ == "__main__":
    main()
