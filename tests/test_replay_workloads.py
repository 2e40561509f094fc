"""The built-in workloads: the same for a seed, of the form a trace has, and like their models in what they repeat."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from metrale_numba.replay import TOKENS_PER_HASH_ID, WORKLOADS, Request, chat_workload, workload
from metrale_numba.replay.workloads import agent, few_shot, retrieval
from metrale_numba.replay.workloads.sessions import Draw, Ids, popularity

EVERY_WORKLOAD = pytest.mark.parametrize("name", ["chat", "agent", "retrieval", "few-shot"])


def requests_of(name: str = "chat", seed: int = 0, requests: int = 3_000, sessions: int = 40) -> list[Request]:
    return list(workload(name, seed, requests, sessions))


def as_values(requests: list[Request]) -> list[tuple[object, ...]]:
    return [
        (each.timestamp, each.input_length, each.output_length, each.hash_ids.tolist(), each.session)
        for each in requests
    ]


def full_blocks(request: Request) -> list[int]:
    ids: list[int] = request.hash_ids[: request.input_length // TOKENS_PER_HASH_ID].tolist()
    return ids


def goes_on_from(later: Request, earlier: Request) -> bool:
    """Whether a prompt is an earlier one, its answer and something more."""
    known = full_blocks(earlier)
    is_longer = later.input_length > earlier.input_length + earlier.output_length
    return is_longer and full_blocks(later)[: len(known)] == known


def by_session(requests: list[Request]) -> list[list[Request]]:
    sessions: defaultdict[int, list[Request]] = defaultdict(list)
    for request in requests:
        sessions[request.session].append(request)
    return list(sessions.values())


# --------------------------------------------------------------------------------------------------------------- all


def test_there_are_these_workloads() -> None:
    assert list(WORKLOADS) == ["chat", "agent", "retrieval", "few-shot"]


def test_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no workload 'rag', but chat, agent, retrieval, few-shot"):
        workload("rag", 0, 10, 10)


@EVERY_WORKLOAD
def test_one_seed_makes_one_workload(name: str) -> None:
    assert as_values(requests_of(name, seed=5)) == as_values(requests_of(name, seed=5))


@EVERY_WORKLOAD
def test_another_seed_makes_another_workload(name: str) -> None:
    assert as_values(requests_of(name, seed=5)) != as_values(requests_of(name, seed=6))


@EVERY_WORKLOAD
def test_a_shorter_workload_is_the_start_of_a_longer_one(name: str) -> None:
    assert as_values(requests_of(name, requests=100)) == as_values(requests_of(name, requests=200))[:100]


@EVERY_WORKLOAD
def test_as_many_requests_are_made_as_asked_for(name: str) -> None:
    assert len(requests_of(name, requests=17)) == 17


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("chat", "f068e41371fce417"),
        ("agent", "5c7f4957e75eaa89"),
        ("retrieval", "1ac4e53943a57343"),
        ("few-shot", "825b1fc7c1a8501b"),
    ],
)
def test_the_requests_of_seed_0_never_change(name: str, digest: str) -> None:
    made = hashlib.sha256(repr(as_values(requests_of(name))).encode())
    assert made.hexdigest()[:16] == digest


@EVERY_WORKLOAD
def test_every_prompt_has_one_id_per_512_tokens(name: str) -> None:
    for request in requests_of(name):
        assert request.tokens_per_id == TOKENS_PER_HASH_ID
        assert len(request.hash_ids) == -(-request.input_length // TOKENS_PER_HASH_ID)


@EVERY_WORKLOAD
def test_requests_arrive_in_order(name: str) -> None:
    timestamps = [request.timestamp for request in requests_of(name)]
    assert timestamps == sorted(timestamps)
    assert timestamps[-1] > timestamps[0]


@EVERY_WORKLOAD
def test_equal_ids_mean_equal_prefixes(name: str) -> None:
    prefixes: dict[int, list[int]] = {}
    for request in requests_of(name):
        ids = request.hash_ids.tolist()
        for place, hash_id in enumerate(ids):
            assert prefixes.setdefault(hash_id, ids[:place]) == ids[:place]


@EVERY_WORKLOAD
def test_a_block_that_is_not_full_is_shared_with_no_one(name: str) -> None:
    requests = requests_of(name)
    seen = Counter(hash_id for request in requests for hash_id in request.hash_ids.tolist())
    for request in requests:
        if request.input_length % TOKENS_PER_HASH_ID:
            assert seen[int(request.hash_ids[-1])] == 1


@EVERY_WORKLOAD
def test_sessions_are_counted_from_1_and_go_on_side_by_side(name: str) -> None:
    sessions = [request.session for request in requests_of(name, sessions=40)]
    assert set(sessions[:2_000]) > set(range(1, 41))
    changes = sum(earlier != later for earlier, later in pairwise(sessions))
    assert changes > 0.9 * len(sessions)


@EVERY_WORKLOAD
def test_one_session_at_a_time_is_possible(name: str) -> None:
    sessions = [request.session for request in requests_of(name, sessions=1, requests=300)]
    assert sessions == sorted(sessions)
    assert sessions[0] == 1
    assert set(sessions) == set(range(1, sessions[-1] + 1))


def test_of_ranked_things_the_kth_is_chosen_1_kth_as_often_as_the_first() -> None:
    draw = Draw(0)
    sums = popularity(8)
    chosen = Counter(draw.ranked(sums) for _ in range(30_000))
    assert sorted(chosen) == list(range(8))
    for rank in range(8):
        assert abs(chosen[rank] * (rank + 1) / chosen[0] - 1) < 0.1


# -------------------------------------------------------------------------------------------------------------- chat


def test_the_first_requests_of_seed_0_never_change() -> None:
    assert as_values(requests_of(requests=3, sessions=2)) == [
        (51, 1_131, 470, [20, 241, 242], 2),
        (80, 9_779, 574, [20, 241, *range(243, 261)], 2),
        (101, 10_653, 373, [20, 241, *range(243, 260), 261, 262], 2),
    ]


def test_a_turn_repeats_the_full_blocks_of_the_turn_before_and_adds_its_answer() -> None:
    turns = 0
    for chat in by_session(requests_of(requests=3_000)):
        for earlier, later in pairwise(chat):
            assert goes_on_from(later, earlier)
            turns += 1
    assert turns > 2_000


def test_a_chat_has_2_to_12_turns() -> None:
    lengths = {len(chat) for chat in by_session(requests_of(requests=20_000))[:1_000]}
    assert lengths == set(range(2, 13))


def test_few_system_prompts_open_most_chats() -> None:
    requests = requests_of(requests=20_000, sessions=200)
    first_ids = Counter(int(request.hash_ids[0]) for request in requests)
    shared = [count for hash_id, count in first_ids.most_common(64) if count > 12]
    assert 30 <= len(shared) <= 64
    assert sum(shared[:8]) > 0.4 * len(requests)


def test_a_think_time_is_between_the_turns_of_a_chat() -> None:
    requests = list(chat_workload(0, requests=3_000, sessions=20, think_time=10_000))
    gaps = [later.timestamp - earlier.timestamp for chat in by_session(requests) for earlier, later in pairwise(chat)]
    assert len(gaps) > 2_000
    assert 5_000 <= min(gaps) < 5_200
    assert 14_800 < max(gaps) <= 15_000
    timestamps = [request.timestamp for request in requests]
    assert timestamps == sorted(timestamps)


def test_a_think_time_changes_the_chats_in_nothing_but_their_times() -> None:
    requests = list(chat_workload(0, requests=3_000, sessions=20, think_time=10_000))
    for chat in by_session(requests):
        assert all(goes_on_from(later, earlier) for earlier, later in pairwise(chat))


# ------------------------------------------------------------------------------------------------------------- agent


@pytest.fixture
def _every_step_fills_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that full blocks alone tell which prompt goes on from which."""
    for name in ("_TOOL_TOKENS", "_BRANCH_TASK_TOKENS", "_REPORT_TOKENS", "_TASK_TOKENS"):
        monkeypatch.setattr(agent, name, (TOKENS_PER_HASH_ID, 2 * TOKENS_PER_HASH_ID))


def finished_agents() -> list[list[Request]]:
    """The requests of agents that are done with their task."""
    return [task for task in by_session(requests_of("agent")) if task[0].session <= 40]


def continuations(requests: list[Request]) -> dict[int, list[int]]:
    """By the place of a request of one agent, the places of those that go on from it and from none that is longer."""
    found: dict[int, list[int]] = {place: [] for place in range(len(requests))}
    for place, later in enumerate(requests):
        before = [number for number in range(place) if goes_on_from(later, requests[number])]
        if place:
            assert before
            found[max(before, key=lambda number: requests[number].input_length)].append(place)
    return found


@pytest.mark.usefixtures("_every_step_fills_a_block")
def test_every_step_of_an_agent_goes_on_from_an_earlier_one() -> None:
    agents = by_session(requests_of("agent"))
    steps = sum(len(each) for task in agents for each in continuations(task).values())
    assert steps == 3_000 - len(agents)


@pytest.mark.usefixtures("_every_step_fills_a_block")
def test_an_agent_forks_into_2_to_4_branches_and_goes_on_itself() -> None:
    forks = Counter(len(each) for task in finished_agents() for each in continuations(task).values())
    assert set(forks) == {0, 1, 3, 4, 5}
    assert sum(forks[number] for number in (3, 4, 5)) > 20


@pytest.mark.usefixtures("_every_step_fills_a_block")
def test_an_agent_goes_on_when_all_branches_have_with_all_that_they_reported() -> None:
    merges = 0
    for task in finished_agents():
        after = continuations(task)
        for fork, children in after.items():
            if len(children) > 1:
                *branches, trunk = children
                reported = 0
                for branch in branches:
                    last = branch
                    while after[last]:
                        (last,) = after[last]
                    assert last < trunk
                    reported += task[last].output_length
                assert task[trunk].input_length >= task[fork].input_length + task[fork].output_length + reported
                merges += 1
    assert merges > 20


@pytest.mark.usefixtures("_every_step_fills_a_block")
def test_branches_take_their_steps_in_any_order_among_each_other() -> None:
    mixed = 0
    for task in finished_agents():
        after = continuations(task)
        for children in after.values():
            for first, second in pairwise(children[:-1]):
                mixed += any(place > second for place in after[first])
    assert mixed > 10


def test_agents_of_a_kind_share_their_instructions() -> None:
    firsts = [task[0] for task in by_session(requests_of("agent"))]
    kinds = Counter(tuple(full_blocks(request)[:4]) for request in firsts)
    assert len(kinds) <= 16
    assert max(kinds.values()) > 0.2 * len(firsts)


# --------------------------------------------------------------------------------------------------------- retrieval


def test_every_question_begins_with_the_one_system_prompt() -> None:
    assert len({tuple(request.hash_ids[:2].tolist()) for request in requests_of("retrieval")}) == 1


def test_turns_about_documents_go_on_from_each_other() -> None:
    questions = by_session(requests_of("retrieval"))
    assert {len(each) for each in questions} == {1, 2, 3, 4}
    for each in questions:
        assert all(goes_on_from(later, earlier) for earlier, later in pairwise(each))


@pytest.fixture
def two_documents(monkeypatch: pytest.MonkeyPatch) -> retrieval._Library:
    """A library of two documents of one and two blocks, behind a system prompt of two blocks."""
    monkeypatch.setattr(retrieval, "_SYSTEM_PROMPT_TOKENS", (1_024, 1_024))
    monkeypatch.setattr(retrieval, "_DOCUMENTS", 2)
    monkeypatch.setattr(retrieval, "_DOCUMENTS_FOUND", (1, 2))
    library = retrieval._Library(Draw(0), Ids())
    library._lengths[:] = [512, 1_024]
    return library


def test_documents_are_shared_as_far_as_their_order_is_the_same(two_documents: retrieval._Library) -> None:
    found = {tuple(two_documents.find().hash_ids) for _ in range(100)}
    by_length: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
    for ids in found:
        by_length[len(ids)].append(ids)
    assert {length: len(rows) for length, rows in by_length.items()} == {3: 1, 4: 1, 5: 2}
    (short,), (long,) = by_length[3], by_length[4]
    (short_first,) = (ids for ids in by_length[5] if ids[:3] == short)
    (long_first,) = (ids for ids in by_length[5] if ids[:4] == long)
    assert set(short_first) & set(long_first) == set(short[:2])


def test_rows_of_documents_that_nobody_asks_for_are_forgotten_and_get_new_ids(
    two_documents: retrieval._Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "_ROWS_REMEMBERED", 2)
    found = set()
    for _ in range(200):
        found.add(tuple(two_documents.find().hash_ids))
        assert len(two_documents._rows) <= 2
    assert len(found) > 20


def test_few_documents_stand_first_in_most_prompts() -> None:
    questions = by_session(requests_of("retrieval", requests=10_000))
    firsts = Counter(int(each[0].hash_ids[3]) for each in questions)
    assert firsts.most_common(1)[0][1] > 0.08 * len(questions)
    assert len(firsts) > 200


# ---------------------------------------------------------------------------------------------------------- few-shot


def test_few_tasks_are_asked_most_of_the_questions() -> None:
    requests = requests_of("few-shot", requests=10_000, sessions=400)
    tasks = Counter(int(request.hash_ids[0]) for request in requests)
    common = [count for _, count in tasks.most_common(512)]
    assert sum(common[:16]) > 0.4 * len(requests)
    assert len([count for count in common if count > 1]) > 200


def test_all_questions_of_a_program_stand_behind_the_examples_of_its_task() -> None:
    for program in by_session(requests_of("few-shot")):
        first = full_blocks(program[0])
        # The question may fill one more block.
        for request in program:
            assert full_blocks(request)[: len(first) - 1] == first[:-1]


def test_one_question_in_four_goes_on_from_the_one_before() -> None:
    pairs = [pair for program in by_session(requests_of("few-shot", requests=8_000)) for pair in pairwise(program)]
    going_on = 0
    for earlier, later in pairs:
        known = full_blocks(earlier)
        going_on += goes_on_from(later, earlier) and known[-1] in full_blocks(later)
    # A few others look so, because their questions are longer and filled no block.
    assert 0.24 < going_on / len(pairs) < 0.45


def test_a_program_asks_1_to_16_questions() -> None:
    lengths = {len(program) for program in by_session(requests_of("few-shot", requests=20_000))[:1_000]}
    assert lengths == set(range(1, 17))
    assert few_shot._QUESTIONS == (1, 16)
