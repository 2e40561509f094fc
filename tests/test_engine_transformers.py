"""Real models with random weights: what the engine generates is what the model generates without it.

The oracle is the model itself, run over all tokens at once with nothing cached. Every comparison has a negative control
that plants the fault which it is there to notice.
"""

import copy
import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from metrale_numba import NoPrefixCaching, RadixTree
from metrale_numba.errors import CacheFileError
from metrale_numba.serving import DirectoryTier, MemoryTier, OutOfBlocks, TierError

torch = pytest.importorskip("torch", reason="needs the extra 'transformers'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")

from tiny_models import SLIDING_WINDOW, VOCAB_SIZE, cold_run, tiny_model  # noqa: E402

from metrale_numba.engines.transformers import TransformersEngine, greedy  # noqa: E402

BLOCK_SIZE = 8
NUM_TURNS = 5
NEW_TOKENS = 11
USER_TOKENS = 13

# The largest difference of two logits, relative to the largest logit: float error is some 1e-6, a fault 1e-2 or more.
TOLERANCE = 1e-4
TIE = 1e-5

WITHOUT_STATES = ["llama"]
WITH_STATES = ["bamba", "falcon_h1", "zamba2", "qwen3_next", "lfm2", "mistral", "gemma2", "jamba", "mamba"]
WITH_BLOCKS = ["llama", "bamba", "falcon_h1", "zamba2", "qwen3_next", "lfm2", "gemma2", "jamba"]
EVERY = WITHOUT_STATES + WITH_STATES


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Recorder:
    """Chooses as `greedy`, and keeps the logits from which it chose."""

    def __init__(self):
        self.logits = []

    def __call__(self, logits):
        self.logits.append(logits.clone())
        return greedy(logits)


def new_engine(name, num_blocks=128, num_slots=16, **options):
    if "cache" not in options and "saved" not in options:
        options.setdefault("block_size", BLOCK_SIZE)
    return TransformersEngine(tiny_model(name), num_blocks, num_slots, **options)


def some_tokens(count, seed):
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, count).tolist()


def assert_as_cold(model, prompt, new_tokens, logits=None):
    """The tokens are those that the model chooses with nothing cached; so are the logits, within float error."""
    cold = cold_run(model, prompt + new_tokens)[0][len(prompt) - 1 : -1]
    chosen = cold.gather(1, torch.tensor(new_tokens)[:, None])
    # Where two are equal but for float error, another machine may choose the other.
    assert (cold.amax(dim=1, keepdim=True) - chosen).max() <= TIE * cold.abs().max()
    if logits is not None:
        assert (torch.stack(logits) - cold).abs().max() <= TOLERANCE * cold.abs().max()


def assert_blocks_as_cold(engine, model, tokens):
    """What is in the blocks of a cached prefix is what the model computes for it, in every layer, token by token."""
    with engine.serving.begin(tokens, min_compute=0) as sequence:
        num_tokens = sequence.cached_tokens
        stored = engine.memory.blocks.read(sequence.block_table, num_tokens)
    assert num_tokens == len(tokens) // BLOCK_SIZE * BLOCK_SIZE
    cache = cold_run(model, tokens[:num_tokens])[1]
    for layer, (keys, values) in zip(engine.runner.layout.attention, stored, strict=True):
        for found, wanted in ((keys, cache.layers[layer.index].keys), (values, cache.layers[layer.index].values)):
            assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


def assert_all_given_back(engine, num_blocks):
    """Every sequence has ended, and every block is free or could be."""
    engine.serving.check_integrity()
    stats = engine.serving.stats()
    assert stats.running == 0
    assert stats.free_blocks + stats.evictable_blocks == num_blocks


class Chat:
    """A conversation, every turn of which is compared with a cold run."""

    def __init__(self, engine, model, recorder, session):
        self.engine = engine
        self.model = model
        self.recorder = recorder
        self.session = session
        self.tokens = []
        self.turn = 0

    def take_turn(self):
        self.turn += 1
        prompt = self.tokens + some_tokens(USER_TOKENS, seed=100 * self.session + self.turn)
        self.recorder.logits.clear()
        (generation,) = self.engine.generate([prompt], NEW_TOKENS, sessions=[self.session])
        assert_as_cold(self.model, prompt, generation.tokens, self.recorder.logits)
        self.engine.serving.check_integrity()
        self.tokens = prompt + generation.tokens
        return generation


def new_chat(name, session=5, **options):
    recorder = Recorder()
    return Chat(new_engine(name, choose=recorder, **options), tiny_model(name), recorder, session)


# Chats


@pytest.mark.parametrize("name", EVERY)
def test_five_turns_come_out_as_without_a_cache(name):
    chat = new_chat(name)
    for turn in range(NUM_TURNS):
        before = len(chat.tokens)
        generation = chat.take_turn()
        # All but the last new token was computed, and whole blocks of that were cached, with the state at their end.
        reused = (before - 1) // BLOCK_SIZE * BLOCK_SIZE if turn else 0
        assert (generation.cached_tokens, generation.compute_from) == (reused, reused)
    stats = chat.engine.serving.stats()
    assert (stats.requests, stats.aborted) == (NUM_TURNS, 0)
    # A chat keeps its tail and the sibling of that, however long it gets.
    assert stats.snapshots == (2 if name in WITH_STATES else 0)


@pytest.mark.parametrize("name", EVERY)
def test_blocks_hold_what_a_cold_run_computes(name):
    chat = new_chat(name)
    for _ in range(NUM_TURNS):
        chat.take_turn()
    assert_blocks_as_cold(chat.engine, chat.model, chat.tokens[:-1])


@pytest.mark.parametrize("name", EVERY)
def test_two_chats_under_eviction_and_with_spills_come_out_as_without_a_cache(name, tmp_path):
    # One chat of 120 tokens has room, two have not; a turn saves two snapshots, and there are two slots.
    recorder = Recorder()
    tier = DirectoryTier(tmp_path, max_bytes=2**24)
    engine = new_engine(name, num_blocks=17, num_slots=2, choose=recorder, tier=tier)
    chats = [Chat(engine, tiny_model(name), recorder, session) for session in (1, 2)]
    for _ in range(NUM_TURNS):
        for chat in chats:
            chat.take_turn()
    stats = engine.serving.stats()
    assert stats.evicted_blocks > 0
    if name in WITH_STATES:
        assert stats.spills > 0
        assert stats.fault_ins > 0
        assert stats.tier_errors == stats.tier_misses == 0
    tier.close()


@pytest.mark.parametrize("name", WITH_STATES)
def test_a_chat_with_one_slot_and_no_tier_comes_out_as_without_a_cache(name):
    chat = new_chat(name, num_slots=1)
    for _ in range(3):
        chat.take_turn()


@pytest.mark.parametrize("name", ["llama", "bamba", "gemma2"])
def test_chats_with_shared_tails_come_out_as_without_a_cache(name):
    cache = RadixTree(block_size=BLOCK_SIZE, partial_tail_sharing=True)
    chat = new_chat(name, cache=cache)
    for _ in range(NUM_TURNS):
        chat.take_turn()
    # The same prompt once more ends inside a block, which is copied and not written to.
    engine, prompt = chat.engine, chat.tokens[:-4]
    chat.recorder.logits.clear()
    (generation,) = engine.generate([prompt], NEW_TOKENS, sessions=[6])
    assert generation.cached_tokens == len(prompt) - 1
    assert generation.cached_tokens % BLOCK_SIZE != 0
    assert_as_cold(chat.model, prompt, generation.tokens, chat.recorder.logits)
    assert_blocks_as_cold(engine, chat.model, prompt[: len(prompt) // BLOCK_SIZE * BLOCK_SIZE])
    engine.serving.check_integrity()


@pytest.mark.parametrize("name", ["llama", "bamba"])
def test_chats_without_prefix_caching_come_out_the_same(name):
    chat = new_chat(name, cache=NoPrefixCaching())
    for _ in range(2):
        assert chat.take_turn().cached_tokens == 0


@pytest.mark.parametrize("name", ["llama", "bamba", "mistral"])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 24])
def test_a_prompt_in_chunks_comes_out_as_in_one(name, chunk_tokens):
    chat = new_chat(name, chunk_tokens=chunk_tokens)
    for _ in range(2):
        chat.take_turn()
    assert_blocks_as_cold(chat.engine, chat.model, chat.tokens[:-1])


# Several at once


@pytest.mark.parametrize("name", EVERY)
def test_sessions_that_take_turns_do_not_mix(name):
    engine, model = new_engine(name, chunk_tokens=16), tiny_model(name)
    shared = some_tokens(20, seed=1)
    prompts = [shared + some_tokens(7 + 9 * number, seed=2 + number) for number in range(3)]
    for _ in range(2):
        generations = engine.generate(prompts, NEW_TOKENS, sessions=[1, 2, 3])
        for prompt, generation in zip(prompts, generations, strict=True):
            assert_as_cold(model, prompt, generation.tokens)
        engine.serving.check_integrity()
        prompts = [prompt + g.tokens + [9, 8, 7] for prompt, g in zip(prompts, generations, strict=True)]
    for prompt in prompts:
        assert_blocks_as_cold(engine, model, prompt[:-4])


def test_prompts_of_one_call_share_what_they_have_in_common():
    engine = new_engine("llama", chunk_tokens=16)
    common = some_tokens(40, seed=1)
    answers = engine.generate([common + some_tokens(5, seed=seed) for seed in range(2, 6)], 3)
    assert [answer.cached_tokens for answer in answers] == [0, 40, 40, 40]


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="model must be a model of transformers, not str"):
        TransformersEngine("gpt2", 3)


def test_tokens_are_chosen_in_turn():
    recorder = Recorder()
    engine = new_engine("llama", choose=recorder)
    first, second = engine.generate([some_tokens(9, seed=1), some_tokens(9, seed=2)], 4)
    chosen = [greedy(logits) for logits in recorder.logits]
    assert chosen == [token for pair in zip(first.tokens, second.tokens, strict=True) for token in pair]


@pytest.mark.parametrize("name", ["llama", "bamba", "qwen3_next", "mistral", "jamba"])
def test_who_gives_way_goes_on_as_if_nothing_had_been(name):
    # Each needs 3 blocks at first and 6 in the end, so of three that were let in two must give way.
    engine, model = new_engine(name, num_blocks=10), tiny_model(name)
    prompts = [some_tokens(20, seed=number) for number in range(3)]
    generations = engine.generate(prompts, 25, sessions=[1, 2, 3])
    for prompt, generation in zip(prompts, generations, strict=True):
        assert_as_cold(model, prompt, generation.tokens)
    assert sum(generation.num_preemptions for generation in generations) > 0
    assert generations[0].num_preemptions == 0
    stats = engine.serving.stats()
    assert (stats.requests, stats.running) == (3, 0)
    engine.serving.check_integrity()


def test_who_gives_way_is_the_next_to_be_let_in_when_somebody_has_ended():
    engine = new_engine("llama", num_blocks=10)
    prompts = [some_tokens(20, seed=number) for number in range(5)]
    begin, finish = engine._execution.begin, engine._execution.finish
    begun, finished = [], []

    def record_and_begin(request):
        begun.append(request.prompt)
        return begin(request)

    def record_and_finish(progress):
        finished.append(progress.request.prompt)
        finish(progress)

    engine._execution.begin, engine._execution.finish = record_and_begin, record_and_finish
    generations = engine.generate(prompts, 25)
    assert finished == prompts
    assert [generation.num_preemptions for generation in generations] == [0, 1, 1, 1, 2]
    # What it finds of its own does not count as cached.
    assert [generation.cached_tokens for generation in generations] == [0] * 5
    # Each time that somebody has ended, those that have room and one that has none; and not at every token.
    assert len(begun) == 12


def test_who_finds_no_room_waits():
    engine, model = new_engine("bamba", num_blocks=7), tiny_model("bamba")
    prompts = [some_tokens(40, seed=number) for number in range(3)]
    generations = engine.generate(prompts, 6)
    for prompt, generation in zip(prompts, generations, strict=True):
        assert_as_cold(model, prompt, generation.tokens)
        assert generation.num_preemptions == 0
    assert engine.serving.stats().requests == 3
    waits = [generation.seconds_to_first_token for generation in generations]
    assert waits == sorted(waits)


def test_no_more_run_at_once_than_allowed():
    engine = new_engine("llama", max_running=2)
    most = 0

    def choose(logits):
        nonlocal most
        most = max(most, engine.serving.stats().running)
        return greedy(logits)

    engine._choose = choose
    engine.generate([some_tokens(9, seed=number) for number in range(5)], 3)
    assert most == 2


def test_a_prompt_that_can_never_fit_is_refused_before_anything_is_done():
    engine = new_engine("bamba", num_blocks=4)
    with pytest.raises(OutOfBlocks, match=r"prompts\[1\] needs 5 blocks, and there are 4"):
        engine.generate([some_tokens(8, seed=1), some_tokens(30, seed=2)], 4)
    assert engine.serving.stats().requests == 0
    # The last of the new tokens needs no room.
    assert len(engine.generate([some_tokens(30, seed=2)], 3)[0].tokens) == 3


def test_blocks_that_others_hold_are_not_waited_for():
    engine = new_engine("llama", num_blocks=4)
    with engine.serving.begin(some_tokens(24, seed=1)) as other:
        other.allocate()
        with pytest.raises(OutOfBlocks):
            engine.generate([some_tokens(16, seed=2)], 4)
    engine.serving.check_integrity()
    assert len(engine.generate([some_tokens(16, seed=2)], 4)[0].tokens) == 4


@pytest.mark.parametrize("name", ["llama", "bamba"])
@pytest.mark.parametrize("position", [1, 4, 10])
def test_an_error_in_the_middle_gives_everything_back(name, position):
    recorder = Recorder()

    def choose(logits):
        if len(recorder.logits) == position:
            raise KeyboardInterrupt
        return recorder(logits)

    engine, model = (
        new_engine(name, num_blocks=12, num_slots=3, choose=choose, tier=MemoryTier(2**20)),
        tiny_model(name),
    )
    prompts = [some_tokens(20, seed=number) for number in range(3)]
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, 12, sessions=[1, 2, 3])
    assert_all_given_back(engine, 12)
    engine._choose = greedy
    for prompt, generation in zip(prompts, engine.generate(prompts, 12, sessions=[1, 2, 3]), strict=True):
        assert_as_cold(model, prompt, generation.tokens)
    engine.serving.check_integrity()


@pytest.mark.parametrize("name", ["llama", "bamba"])
def test_a_clear_in_the_middle_changes_no_answer(name):
    engine, model = new_engine(name), tiny_model(name)
    chosen = []

    def choose(logits):
        chosen.append(greedy(logits))
        if len(chosen) == 7:
            engine.serving.clear()
        return chosen[-1]

    engine._choose = choose
    prompts = [some_tokens(20, seed=number) for number in range(2)]
    for prompt, generation in zip(prompts, engine.generate(prompts, 12, sessions=[1, 2]), strict=True):
        assert_as_cold(model, prompt, generation.tokens)
    engine.serving.check_integrity()
    assert engine.serving.num_free_blocks == 128


@pytest.mark.parametrize("name", ["llama", "bamba", "gemma2", "jamba"])
@pytest.mark.parametrize("seed", [0, 1])
def test_random_traffic_comes_out_as_without_a_cache(name, seed, tmp_path):
    # Room for two of the longest prompts, and for the states of one turn.
    tier = DirectoryTier(tmp_path, max_bytes=2**18)
    cache = RadixTree(block_size=BLOCK_SIZE, partial_tail_sharing=bool(seed % 2))
    engine = new_engine(name, num_blocks=40, num_slots=3, cache=cache, tier=tier, chunk_tokens=20, snapshot_every=3)
    model, random = tiny_model(name), np.random.default_rng(seed)
    known = [some_tokens(60, seed=seed)]
    for number in range(12):
        prompts = []
        for _ in range(int(random.integers(1, 4))):
            # What somebody said before, as far as that goes, and something new.
            start = known[int(random.integers(len(known)))]
            start = start[: int(random.integers(len(start) + 1))]
            prompts.append(start[:130] + some_tokens(int(random.integers(1, 16)), seed=1000 * seed + number))
        sessions = random.integers(0, 4, len(prompts)).tolist()
        generations = engine.generate(prompts, int(random.integers(1, 20)), sessions=sessions)
        engine.serving.check_integrity()
        for prompt, generation in zip(prompts, generations, strict=True):
            assert_as_cold(model, prompt, generation.tokens)
            known.append(prompt + generation.tokens)
    stats = engine.serving.stats()
    assert stats.evicted_blocks > 0
    assert stats.running == 0
    assert (stats.fault_ins > 0) == (name != "llama")
    tier.close()


# What is shared


@pytest.mark.parametrize("name", ["bamba", "gemma2"])
def test_blocks_of_others_are_never_written_to(name):
    engine, model = new_engine(name), tiny_model(name)
    shared = some_tokens(32, seed=1)
    engine.generate([shared + some_tokens(9, seed=2)], 3)
    with engine.serving.begin(shared, min_compute=0) as sequence:
        table = torch.from_numpy(sequence.block_table.astype(np.int64))
    tensors = engine.memory.blocks.keys + engine.memory.blocks.values
    # Without a state at their end they are not read either; what would be written is what was there.
    for tensor in tensors:
        tensor[table] = 77.0
    prompt = shared + some_tokens(9, seed=3)
    (generation,) = engine.generate([prompt], 3)
    assert (generation.cached_tokens, generation.compute_from) == (32, 0)
    assert_as_cold(model, prompt, generation.tokens)
    assert all((tensor[table] == 77.0).all() for tensor in tensors)


def test_no_more_rows_of_a_block_are_copied_than_asked_for():
    memory = new_engine("llama").memory
    tensors = memory.blocks.keys + memory.blocks.values
    for tensor in tensors:
        tensor[:] = torch.arange(len(tensor))[:, None, None, None]
    memory.copy_rows(source=5, target=9, rows=3)
    for tensor in tensors:
        assert (tensor[9, :3] == 5).all()
        assert (tensor[9, 3:] == 9).all()
        assert (tensor[5] == 5).all()


@pytest.mark.parametrize("name", ["bamba", "mistral"])
def test_where_two_prompts_part_a_third_finds_a_state(name):
    engine, model = new_engine(name), tiny_model(name)
    shared = some_tokens(32, seed=1)
    found = []
    for seed in (2, 3, 4):
        prompt = shared + some_tokens(9, seed=seed)
        (generation,) = engine.generate([prompt], 3)
        assert_as_cold(model, prompt, generation.tokens)
        found.append((generation.cached_tokens, generation.compute_from))
    assert found == [(0, 0), (32, 0), (32, 32)]


def test_snapshots_are_taken_at_every_so_many_blocks():
    engine, model = new_engine("bamba", snapshot_every=2), tiny_model("bamba")
    shared = some_tokens(40, seed=1)
    engine.generate([shared + some_tokens(9, seed=2)], 3)
    prompt = shared + some_tokens(9, seed=3)
    (generation,) = engine.generate([prompt], 3)
    assert (generation.cached_tokens, generation.compute_from) == (40, 32)
    assert_as_cold(model, prompt, generation.tokens)


def test_the_same_prompt_again_leaves_one_token_to_compute():
    engine, model = new_engine("bamba"), tiny_model("bamba")
    prompt = some_tokens(4 * BLOCK_SIZE + 1, seed=1)
    first, second = (engine.generate([prompt], 5)[0] for _ in range(2))
    assert second.compute_from == second.cached_tokens == 4 * BLOCK_SIZE
    assert second.tokens == first.tokens
    assert_as_cold(model, prompt, second.tokens)


def test_an_answer_that_does_not_come_back_leaves_the_state_at_the_end_of_the_prompt():
    engine, model = new_engine("bamba"), tiny_model("bamba")
    prompt = some_tokens(4 * BLOCK_SIZE + 1, seed=1)
    engine.generate([prompt], 20, sessions=[7])
    edited = prompt + some_tokens(10, seed=2)
    (generation,) = engine.generate([edited], 5, sessions=[7])
    assert generation.compute_from == 4 * BLOCK_SIZE
    assert_as_cold(model, edited, generation.tokens)


class Adapters:
    """A copy of a model, and a switch that turns its embeddings further for each adapter."""

    def __init__(self, name):
        self.model = copy.deepcopy(tiny_model(name))
        self.strength = 0.5
        self.activated = []
        self._plain = self.model.get_input_embeddings().weight.detach().clone()

    def activate(self, adapter):
        self.activated.append(adapter)
        with torch.no_grad():
            turned = self._plain + self._plain.roll(1, 0) * (adapter * self.strength)
            self.model.get_input_embeddings().weight.copy_(turned)

    def new_engine(self, **options):
        options = {"block_size": BLOCK_SIZE, "activate_adapter": self.activate, **options}
        return TransformersEngine(self.model, 128, 16, **options)

    def assert_as_cold(self, prompt, adapter, new_tokens):
        self.activate(adapter)
        assert_as_cold(self.model, prompt, new_tokens)


def test_adapters_share_nothing_with_each_other():
    switch = Adapters("bamba")
    engine = switch.new_engine()
    prompt = some_tokens(30, seed=1)
    adapters = [0, 2, 0, 2, 1, 1]
    generations = [engine.generate([prompt], 6, adapters=[adapter])[0] for adapter in adapters]
    assert [generation.compute_from for generation in generations] == [0, 0, 24, 24, 0, 24]
    generations += engine.generate([prompt] * 3, 6, adapters=[2, 0, 1])
    for adapter, generation in zip([*adapters, 2, 0, 1], generations, strict=True):
        switch.assert_as_cold(prompt, adapter, generation.tokens)
    engine.serving.check_integrity()


def test_an_adapter_is_activated_for_each_call_and_when_another_was():
    switch = Adapters("llama")
    engine = switch.new_engine()
    assert switch.activated == [0]
    prompt = some_tokens(20, seed=1)
    for adapters in ([0], [0], [2], [2, 2, 1]):
        engine.generate([prompt] * len(adapters), 1, adapters=adapters)
    assert switch.activated == [0, 0, 0, 2, 2, 1]


@pytest.mark.parametrize("failing", [1, 0])
def test_after_an_activation_that_failed_the_next_call_activates_its_own(failing):
    switch = Adapters("llama")
    fails = False

    def activate(adapter):
        # It fails when it has switched already, which the engine cannot know.
        switch.activate(adapter)
        if fails and adapter == failing:
            raise RuntimeError("half read")

    engine = switch.new_engine(activate_adapter=activate)
    prompt = some_tokens(40, seed=1)
    fails = True
    with pytest.raises(RuntimeError, match="half read"):
        # The other one is running when the next is let in.
        engine.generate([prompt, prompt], 4, adapters=[1 - failing, failing])
    assert_all_given_back(engine, 128)
    fails = False
    for adapter in (1 - failing, failing):
        (generation,) = engine.generate([prompt], 8, adapters=[adapter])
        switch.assert_as_cold(prompt, adapter, generation.tokens)


def test_after_an_activation_that_failed_even_a_run_under_the_one_before_activates_it():
    switch = Adapters("llama")
    fails = False

    def activate(adapter):
        switch.activate(adapter)
        if fails and adapter:
            raise RuntimeError("half read")

    runner = switch.new_engine(activate_adapter=activate).runner
    tokens = np.array(some_tokens(5, seed=1), np.uint32)
    with torch.inference_mode():
        wanted = runner.run(runner.new_cache(), tokens, 0)
        fails = True
        with pytest.raises(RuntimeError, match="half read"):
            runner.run(runner.new_cache(), tokens, 0, 1)
        assert torch.equal(runner.run(runner.new_cache(), tokens, 0), wanted)


def test_an_activation_that_fails_at_first_is_not_taken_for_a_fault_of_the_model():
    def activate(adapter):
        raise ValueError("no adapters here")

    with pytest.raises(ValueError, match=r"^no adapters here"):
        new_engine("llama", activate_adapter=activate)


def test_engines_that_share_a_model_in_turn_find_it_under_the_right_adapter():
    switch = Adapters("llama")
    first = switch.new_engine()
    prompt = some_tokens(40, seed=1)
    first.generate([prompt], 1, adapters=[1])
    second = switch.new_engine()
    assert second.runner.fingerprint() == first.runner.fingerprint()
    for engine, adapter in ((first, 1), (second, 0), (first, 0), (second, 2), (first, 1), (second, 2)):
        (generation,) = engine.generate([prompt], 6, adapters=[adapter])
        switch.assert_as_cold(prompt, adapter, generation.tokens)


@pytest.mark.parametrize("name", ["llama", "bamba"])
def test_an_adapter_that_was_trained_on_is_computed_anew_after_a_drop(name, tmp_path):
    switch = Adapters(name)
    tier = DirectoryTier(tmp_path / "tier", max_bytes=2**24)
    engine = switch.new_engine(tier=tier)
    prompt = some_tokens(40, seed=1)
    engine.generate([prompt] * 2, 6, adapters=[1, 2])
    # In the same engine, with the adapter active; and in the one that takes over.
    for is_restart in (False, True):
        switch.strength /= -2
        if is_restart:
            engine.save(tmp_path / "saved")
            options = {"block_size": None, "saved": tmp_path / "saved", "tier": tier}
            engine = switch.new_engine(**options)
        engine.serving.drop_adapter(2)
        (generation,) = engine.generate([prompt], 6, adapters=[2])
        assert generation.cached_tokens == 0
        switch.assert_as_cold(prompt, 2, generation.tokens)
    tier.close()


def test_states_of_half_precision_come_back_from_the_tier_bit_for_bit():
    model = transformers.AutoModelForCausalLM.from_config(tiny_model("bamba").config).to(torch.bfloat16)
    logits = []
    for num_slots in (1, 16):
        recorder = Recorder()
        engine = TransformersEngine(
            model, 128, num_slots, block_size=BLOCK_SIZE, choose=recorder, tier=MemoryTier(2**24), continuation="chunk"
        )
        for turn in range(3):
            for session in (1, 2):
                prompt = some_tokens(USER_TOKENS + turn * 24, seed=session)
                engine.generate([prompt], NEW_TOKENS, sessions=[session])
        assert (engine.serving.stats().fault_ins > 0) == (num_slots == 1)
        logits.append(torch.stack(recorder.logits))
    assert torch.equal(*logits)


def test_a_tier_that_fails_costs_time_and_nothing_else():
    class Broken(MemoryTier):
        def get(self, key, into):
            raise TierError("out of order")

    recorder = Recorder()
    engine = new_engine("bamba", num_slots=2, choose=recorder, tier=Broken(2**20))
    chats = [Chat(engine, tiny_model("bamba"), recorder, session) for session in (1, 2)]
    for _ in range(3):
        for chat in chats:
            chat.take_turn()
    stats = engine.serving.stats()
    assert stats.tier_errors > 0
    assert stats.fault_ins == 0


@pytest.mark.parametrize("kind", [set, np.array, torch.tensor])
def test_a_stop_token_ends_the_answer(kind):
    engine = new_engine("llama")
    prompt = some_tokens(20, seed=1)
    answer = engine.generate([prompt], 8)[0].tokens
    stopped = engine.generate([prompt], 8, stop_tokens=kind([answer[3]]))[0].tokens
    assert stopped == answer[: answer.index(answer[3]) + 1]


@pytest.mark.parametrize(
    "choose",
    [
        lambda logits: logits.argmax(),
        lambda logits: logits.argmax(0, keepdim=True),
        lambda logits: np.int64(logits.argmax()),
        lambda logits: np.uint32(logits.argmax()),
    ],
)
def test_a_chosen_token_may_be_any_integer_and_comes_out_as_a_plain_one(choose):
    prompt = some_tokens(20, seed=1)
    answer = new_engine("llama").generate([prompt], 8)[0].tokens
    engine = new_engine("llama", choose=choose)
    stopped = engine.generate([prompt], 8, stop_tokens=[answer[3]])[0].tokens
    assert stopped == answer[: answer.index(answer[3]) + 1]
    assert {type(token) for token in stopped} == {int}


@pytest.mark.parametrize("name", ["llama", "bamba"])
@pytest.mark.parametrize("max_new_tokens", [1, 5])
@pytest.mark.parametrize("position", [0, 3])
@pytest.mark.parametrize(
    ("chosen", "error", "message"),
    [
        (-1, ValueError, "the token that choose gave is -1, outside 0..199"),
        (VOCAB_SIZE, ValueError, "the token that choose gave is 200, outside 0..199"),
        (torch.tensor(VOCAB_SIZE), ValueError, "the token that choose gave is 200, outside 0..199"),
        (2**31, ValueError, "outside 0..199"),
        (1.0, TypeError, "the token that choose gave must be an integer, not 1.0"),
        (torch.tensor(1.0), TypeError, "the token that choose gave must be an integer"),
        (torch.tensor([1, 2]), TypeError, "the token that choose gave must be an integer"),
        (None, TypeError, "the token that choose gave must be an integer, not None"),
        (True, TypeError, "the token that choose gave must be an integer, not True"),
    ],
)
def test_what_is_no_token_is_refused_and_everything_given_back(name, max_new_tokens, position, chosen, error, message):
    count = 0

    def choose(logits):
        nonlocal count
        count += 1
        return chosen if count > position else greedy(logits)

    engine = new_engine(name, num_blocks=24, choose=choose)
    prompts = [some_tokens(20, seed=number) for number in range(4)]
    with pytest.raises(error, match=message):
        engine.generate(prompts, max_new_tokens, sessions=[1, 2, 3, 4])
    assert_all_given_back(engine, 24)
    engine._choose = greedy
    for prompt, generation in zip(prompts, engine.generate(prompts, 5, sessions=[1, 2, 3, 4]), strict=True):
        assert_as_cold(tiny_model(name), prompt, generation.tokens)


# A restart


@pytest.mark.parametrize("name", EVERY)
def test_a_chat_goes_on_after_a_restart_as_if_there_had_been_none(name, tmp_path):
    chat = new_chat(name, tier=DirectoryTier(tmp_path / "tier", max_bytes=2**24))
    for _ in range(2):
        chat.take_turn()
    chat.engine.save(tmp_path / "saved")
    chat.engine.serving.tier.close()
    chat.engine = new_engine(
        name, choose=chat.recorder, saved=tmp_path / "saved", tier=DirectoryTier(tmp_path / "tier", max_bytes=2**24)
    )
    chat.engine.serving.check_integrity()
    before = len(chat.tokens)
    generation = chat.take_turn()
    assert generation.compute_from == generation.cached_tokens == (before - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert_blocks_as_cold(chat.engine, chat.model, chat.tokens[:-1])
    chat.engine.serving.tier.close()


def test_without_a_tier_a_restart_brings_back_the_blocks_alone(tmp_path):
    chat = new_chat("bamba")
    chat.take_turn()
    chat.engine.save(tmp_path)
    chat.engine = new_engine("bamba", choose=chat.recorder, saved=tmp_path)
    generation = chat.take_turn()
    assert generation.cached_tokens > 0
    assert generation.compute_from == 0


def test_a_save_takes_the_place_of_the_one_before(tmp_path):
    chat = new_chat("llama")
    for _ in range(2):
        chat.take_turn()
        chat.engine.save(tmp_path)
    assert len(list(tmp_path.glob("saved-*"))) == 1
    chat.engine = new_engine("llama", choose=chat.recorder, saved=tmp_path)
    assert chat.take_turn().cached_tokens == 40


@pytest.mark.parametrize("place", ["torch.save", "os.fsync", "pathlib.Path.replace"])
def test_a_save_that_fails_leaves_the_one_before(tmp_path, monkeypatch, place):
    chat = new_chat("llama")
    chat.take_turn()
    chat.engine.save(tmp_path)
    chat.take_turn()

    def fail(*_, **__):
        raise OSError("no more room")

    with monkeypatch.context() as patch:
        patch.setattr(place, fail)
        with pytest.raises(OSError, match="no more room"):
            chat.engine.save(tmp_path)
    assert len(list(tmp_path.glob("saved-*"))) == 1
    chat.engine = new_engine("llama", choose=chat.recorder, saved=tmp_path)
    assert chat.take_turn().cached_tokens == 16


def test_what_another_model_has_saved_is_refused(tmp_path):
    new_engine("llama").save(tmp_path)
    with pytest.raises(ValueError, match="was saved for"):
        TransformersEngine(tiny_model("llama", seed=1), 128, saved=tmp_path)


def save_of(seed, folder):
    engine = new_engine("llama")
    engine.generate([some_tokens(40, seed)], 5)
    engine.save(folder)
    return engine


def saved_file(folder, name):
    (path,) = folder.glob(f"saved-*/{name}")
    return path


def seal(folder):
    """Make a pointer for what is there, as if it had been written by a save."""
    paths = [saved_file(folder, name) for name in ("index", "blocks")]
    lines = [f"{hashlib.blake2b(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n" for path in paths]
    (folder / "current").write_text("".join(lines))


def flipped(data, position):
    return data[:position] + bytes([data[position] ^ 0x40]) + data[position + 1 :]


@pytest.mark.parametrize("name", ["index", "blocks"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: flipped(data, 0),
        # In the keys and values, where nothing but a checksum notices it.
        lambda data: flipped(data, len(data) // 2),
        lambda data: flipped(data, len(data) - 1),
        lambda data: data[:100],
        lambda data: data + b"x",
        lambda data: b"",
    ],
)
def test_a_damaged_file_is_refused(tmp_path, name, damage):
    save_of(1, tmp_path)
    path = saved_file(tmp_path, name)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CacheFileError, match=f"saved-[^/]*/{name} is damaged, or of another save"):
        new_engine("llama", saved=tmp_path)


@pytest.mark.parametrize("name", ["index", "blocks"])
def test_a_file_of_another_save_is_refused(tmp_path, name):
    for number in (1, 2):
        save_of(number, tmp_path / str(number))
    saved_file(tmp_path / "1", name).write_bytes(saved_file(tmp_path / "2", name).read_bytes())
    with pytest.raises(CacheFileError, match=f"{name} is damaged, or of another save"):
        new_engine("llama", saved=tmp_path / "1")


def test_a_pointer_of_another_save_is_refused(tmp_path):
    for number in (1, 2):
        save_of(number, tmp_path / str(number))
    (tmp_path / "1" / "current").write_bytes((tmp_path / "2" / "current").read_bytes())
    with pytest.raises(CacheFileError, match=r"index is missing, which .*current names"):
        new_engine("llama", saved=tmp_path / "1")


@pytest.mark.parametrize("name", ["index", "blocks"])
def test_a_missing_file_is_refused(tmp_path, name):
    save_of(1, tmp_path)
    saved_file(tmp_path, name).unlink()
    with pytest.raises(CacheFileError, match=f"{name} is missing, which .*current names"):
        new_engine("llama", saved=tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"\xff\xfe",
        lambda data: b"\0",
        lambda data: data[:-1],
        lambda data: data.replace(b"saved-", b"../saved-"),
        lambda data: data.replace(b"saved-", b"/saved-"),
        lambda data: data.replace(b"  saved-", b"  saved-/../../"),
        lambda data: data + data,
    ],
)
def test_a_damaged_pointer_is_refused(tmp_path, damage):
    save_of(1, tmp_path)
    pointer = tmp_path / "current"
    pointer.write_bytes(damage(pointer.read_bytes()))
    with pytest.raises(CacheFileError, match="current is damaged, or was not written by a save"):
        new_engine("llama", saved=tmp_path)


def test_no_flipped_bit_of_a_pointer_is_overlooked(tmp_path):
    save_of(1, tmp_path)
    pointer = tmp_path / "current"
    data = pointer.read_bytes()
    for position in range(len(data)):
        pointer.write_bytes(flipped(data, position))
        with pytest.raises(CacheFileError):
            new_engine("llama", saved=tmp_path)


def test_what_is_refused_has_touched_nothing_in_the_tier(tmp_path):
    tier = DirectoryTier(tmp_path / "tier", max_bytes=2**24)
    engine = new_engine("bamba", tier=tier)
    prompt = some_tokens(40, seed=1)
    engine.generate([prompt], 5)
    engine.save(tmp_path)
    path = saved_file(tmp_path, "blocks")
    data = path.read_bytes()
    path.write_bytes(flipped(data, len(data) // 2))
    with pytest.raises(CacheFileError, match="blocks is damaged"):
        new_engine("bamba", saved=tmp_path, tier=tier)
    path.write_bytes(data)
    (generation,) = new_engine("bamba", saved=tmp_path, tier=tier).generate([prompt], 5)
    assert generation.compute_from == generation.cached_tokens > 0
    tier.close()


def test_a_folder_without_a_save_has_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        new_engine("llama", saved=tmp_path)


def test_a_save_is_what_b2sum_checks(tmp_path):
    save_of(1, tmp_path)
    pointer = (tmp_path / "current").read_text()
    seal(tmp_path)
    assert (tmp_path / "current").read_text() == pointer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: saved.update(ids=saved["ids"] + 1), "has other blocks than .*index refers to"),
        (lambda saved: saved.update(ids=saved["ids"][:-1]), "has other blocks than .*index refers to"),
        (lambda saved: saved.update(block_size=4), "has other blocks than .*index refers to"),
        (lambda saved: saved["tensors"].pop(), "has blocks of another form"),
        (lambda saved: saved.update(tensors=[rows[:1] for rows in saved["tensors"]]), "has blocks of another form"),
        (lambda saved: saved.update(tensors=[rows.half() for rows in saved["tensors"]]), "has blocks of another form"),
        (lambda saved: saved.pop("ids"), "cannot be read as saved blocks"),
    ],
)
def test_blocks_that_do_not_go_with_the_index_are_refused(tmp_path, change, message):
    save_of(1, tmp_path)
    path = saved_file(tmp_path, "blocks")
    saved = torch.load(path, weights_only=True)
    change(saved)
    torch.save(saved, path)
    seal(tmp_path)
    with pytest.raises(CacheFileError, match=message):
        new_engine("llama", saved=tmp_path)


def test_blocks_of_another_library_are_refused(tmp_path):
    save_of(1, tmp_path)
    saved_file(tmp_path, "blocks").write_bytes(b"x" * 100)
    seal(tmp_path)
    with pytest.raises(CacheFileError, match="cannot be read as saved blocks"):
        new_engine("llama", saved=tmp_path)


def test_without_caching_there_is_nothing_to_save(tmp_path):
    with pytest.raises(TypeError, match="caching is off"):
        new_engine("llama", cache=NoPrefixCaching()).save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


# Models and arguments


def test_a_model_of_mamba_1_goes_on_token_by_token():
    assert not new_engine("jamba").runner.continues_in_chunks
    assert not new_engine("mamba").runner.continues_in_chunks


def test_the_comparison_notices_a_model_of_mamba_1_that_goes_on_in_chunks():
    chat = new_chat("mamba", continuation="chunk")
    with pytest.raises(AssertionError):
        chat.take_turn()


@pytest.mark.parametrize("name", [name for name in EVERY if name not in ("jamba", "mamba")])
def test_a_model_that_can_goes_on_in_chunks(name):
    assert new_engine(name).runner.continues_in_chunks


def test_half_precision_does_not_hide_a_state_that_is_not_read():
    model = transformers.AutoModelForCausalLM.from_config(tiny_model("jamba").config).to(torch.bfloat16)
    assert not TransformersEngine(model, 8, 1).runner.continues_in_chunks


def test_a_model_that_keeps_its_state_to_itself_is_refused():
    with pytest.raises(ValueError, match="keeps its state in the model and not in the cache"):
        new_engine("recurrent_gemma")


def test_a_model_that_keeps_a_part_of_its_state_to_itself_is_refused():
    def add_sum_of_tokens(module, arguments, options, output):
        begins = int(options["position_ids"][0, 0]) == 0
        module.kept_sum = (0 if begins else module.kept_sum) + int(options["input_ids"].sum())
        output.logits += module.kept_sum

    model = transformers.AutoModelForCausalLM.from_config(tiny_model("bamba").config)
    model.register_forward_hook(add_sum_of_tokens, with_kwargs=True)
    with pytest.raises(ValueError, match="BambaForCausalLM does not continue from a state, not even token by token"):
        TransformersEngine(model, 8, 1)


def test_a_model_with_a_cache_of_its_own_is_refused():
    config = transformers.MiniMaxConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        pad_token_id=0,
    )
    with pytest.raises(ValueError, match="MiniMaxForCausalLM does not run with a DynamicCache"):
        TransformersEngine(transformers.MiniMaxForCausalLM(config), 8, 1)


def test_a_model_with_states_is_refused_without_slots():
    with pytest.raises(ValueError, match="MistralForCausalLM keeps states, so num_slots must be at least 1"):
        new_engine("mistral", num_slots=0)


def test_a_model_without_states_gets_no_slots():
    engine = new_engine("llama", num_slots=5)
    assert engine.serving.slots.num_slots == 0
    assert not engine.serving.is_hybrid


def test_models_of_other_weights_have_other_fingerprints():
    runners = [TransformersEngine(tiny_model("llama", seed), 1).runner for seed in (0, 0, 1)]
    first, again, other = (runner.fingerprint() for runner in runners)
    assert first == again != other


def change_one_value(tensor):
    with torch.no_grad():
        tensor.view(-1)[-2] += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "change",
    [
        lambda model: change_one_value(model.model.embed_tokens.weight),
        lambda model: change_one_value(model.model.layers[1].mlp.down_proj.weight),
        lambda model: change_one_value(model.model.norm.weight),
        lambda model: change_one_value(model.model.rotary_emb.inv_freq),
        lambda model: setattr(model.config, "rms_norm_eps", 1e-3),
        lambda model: setattr(model, "__class__", type("Other", (type(model),), {})),
    ],
)
def test_a_model_with_one_thing_changed_has_another_fingerprint(dtype, change):
    model = copy.deepcopy(tiny_model("llama")).to(dtype)
    runner = TransformersEngine(model, 1).runner
    before = runner.fingerprint()
    assert runner.fingerprint() == before
    change(model)
    assert runner.fingerprint() != before


def test_a_fingerprint_is_of_values_and_not_of_where_they_lie():
    model = copy.deepcopy(tiny_model("llama"))
    runner = TransformersEngine(model, 1).runner
    before = runner.fingerprint()
    for parameter in (model.model.norm.weight, model.model.layers[0].mlp.down_proj.weight):
        spread = torch.zeros(*parameter.shape, 2)
        spread[..., 0] = parameter.detach()
        parameter.data = spread[..., 0]
        assert not parameter.is_contiguous()
    assert runner.fingerprint() == before


def test_a_fingerprint_of_weights_in_parts_heeds_all_of_them(monkeypatch):
    runner = TransformersEngine(copy.deepcopy(tiny_model("llama")), 1).runner
    whole = runner.fingerprint()
    monkeypatch.setattr("metrale_numba.engines.transformers.model_runner._HASHED_AT_ONCE", 7)
    assert runner.fingerprint() == whole


def test_a_model_with_a_retrained_token_does_not_take_what_was_saved_before(tmp_path):
    model = copy.deepcopy(tiny_model("llama"))
    TransformersEngine(model, 16).save(tmp_path)
    change_one_value(model.model.embed_tokens.weight[57])
    with pytest.raises(ValueError, match="was saved for"):
        TransformersEngine(model, 16, saved=tmp_path)


def test_a_sliding_window_is_snapshot_with_its_length():
    engine = new_engine("mistral")
    engine.generate([some_tokens(5 * BLOCK_SIZE, seed=1)], 1)
    (length,) = (field for field in engine.runner.layout.states if field.kind == "length" and field.layer == 0)
    (keys,) = (field for field in engine.runner.layout.states if field.kind == "keys" and field.layer == 0)
    row = engine.memory.states.memory[0]
    assert engine.memory.states.tensor(row, length).item() == 4 * BLOCK_SIZE
    assert keys.shape[2] == SLIDING_WINDOW - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": [[]]}, r"prompts\[0\] is empty, and must be at least one token"),
        ({"prompts": [[1], [3, VOCAB_SIZE]]}, r"prompts\[1\]\[1\] is 200, outside 0\.\.199"),
        ({"max_new_tokens": 10**6}, r"prompts\[0\] has 3 tokens, and with 1000000 new ones needs more than"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"sessions": [1, 2]}, "sessions has 2 entries for 1 prompts"),
        ({"stop_tokens": [-1]}, r"stop_tokens\[0\] is -1, outside"),
        ({"adapters": [1]}, r"adapters\[0\] is 1, but the engine has no activate_adapter"),
    ],
)
def test_what_generate_refuses(arguments, message):
    engine = new_engine("llama")
    with pytest.raises(ValueError, match=message):
        engine.generate(**{"prompts": [[1, 2, 3]], "max_new_tokens": 2, **arguments})
    assert engine.serving.stats().requests == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens and max_running must be at least 1"),
        ({"max_running": 0}, "chunk_tokens and max_running must be at least 1"),
        ({"continuation": "never"}, "continuation must be one of auto, chunk, token"),
        (
            {"block_size": 4, "cache": RadixTree(block_size=4)},
            "block_size, cache and saved each say what the block size is",
        ),
    ],
)
def test_what_the_engine_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        new_engine("llama", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"choose": None}, "choose must be callable, not None"),
        ({"activate_adapter": 3}, "activate_adapter must be callable, not 3"),
        ({"cache": 3}, "cache must be a RadixTree or a NoPrefixCaching, not int"),
        ({"saved": 3}, "path must be a str or a path, not 3"),
    ],
)
def test_what_the_engine_refuses_for_its_type(options, message):
    with pytest.raises(TypeError, match=message):
        new_engine("llama", **options)


@pytest.mark.parametrize("stop_tokens", [None, 3, ["a"], "a"])
def test_stop_tokens_that_are_none_are_refused(stop_tokens):
    engine = new_engine("llama")
    with pytest.raises(TypeError):
        engine.generate([[1, 2, 3]], 2, stop_tokens=stop_tokens)
    assert engine.serving.stats().requests == 0


# Negative controls


@pytest.mark.parametrize("name", WITH_STATES)
def test_the_comparison_notices_a_missing_state(name):
    chat = new_chat(name)
    chat.take_turn()
    chat.engine.memory.states.memory.zero_()
    with pytest.raises(AssertionError):
        chat.take_turn()


@pytest.mark.parametrize("name", WITH_STATES)
def test_the_comparison_notices_the_state_of_another_prefix(name):
    chat = new_chat(name)
    chat.take_turn()
    other = new_chat(name, session=6)
    other.take_turn()
    chat.engine.memory.states.memory.copy_(other.engine.memory.states.memory)
    with pytest.raises(AssertionError):
        chat.take_turn()


@pytest.mark.parametrize("name", WITH_STATES)
def test_the_comparison_notices_the_state_of_another_depth(name):
    chat = new_chat(name)
    chat.take_turn()
    memory = chat.engine.memory.states.memory
    # The first two slots have the state at the end of the prompt and that at the end of the answer.
    memory[:2] = memory[:2].flip(0)
    with pytest.raises(AssertionError):
        chat.take_turn()


@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_the_comparison_notices_a_wrong_block(name):
    chat = new_chat(name)
    chat.take_turn()
    other = new_chat(name, session=6)
    other.take_turn()
    with chat.engine.serving.begin(chat.tokens) as sequence:
        block = int(sequence.block_table[1])
    ours, theirs = chat.engine.memory.blocks, other.engine.memory.blocks
    for mine, its in zip(ours.keys + ours.values, theirs.keys + theirs.values, strict=True):
        mine[block] = its[block]
    with pytest.raises(AssertionError):
        assert_blocks_as_cold(chat.engine, chat.model, chat.tokens[:-1])
    with pytest.raises(AssertionError):
        chat.take_turn()


@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_the_comparison_of_blocks_notices_two_that_are_swapped_where_logits_do_not(name):
    chat = new_chat(name)
    chat.take_turn()
    with chat.engine.serving.begin(chat.tokens) as sequence:
        pair = sequence.block_table[:2].tolist()
    for tensor in chat.engine.memory.blocks.keys + chat.engine.memory.blocks.values:
        tensor[pair] = tensor[pair[::-1]]
    with pytest.raises(AssertionError):
        assert_blocks_as_cold(chat.engine, chat.model, chat.tokens[:-1])
    # Keys carry their positions with them, so the order in which they stand is all the same to attention.
    chat.take_turn()


# The example


def test_the_example_shows_the_same_answers_cold_and_warm():
    path = Path(__file__).parent.parent / "examples" / "chat_cpu.py"
    arguments = ["--model", "bamba", "--shared-tokens", "512", "--users", "2", "--turns", "1", "--new-tokens", "3"]
    # A process of its own, for it sets the threads and the messages of the libraries.
    run = subprocess.run([sys.executable, path, *arguments], capture_output=True, text=True, check=True)
    assert "new user" in run.stdout
    assert "yes" in run.stdout
    assert "NO" not in run.stdout
