"""Eviction policies told in the plainest way: nodes are prefixes in lists, and every choice looks at all of them.

It relies on the standard library alone and shares no code with the package. A policy is a class that is told what
happens and is asked for a victim among the leaves that may go; :func:`replayed` plays requests through one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

#: An adapter and all ids from the first block to this one's.
Prefix = tuple[int, tuple[int, ...]]
Paths = Sequence[Sequence[Prefix]]


def path_of(adapter: int, hash_ids: Sequence[int]) -> list[Prefix]:
    return [(adapter, tuple(hash_ids[:end])) for end in range(1, len(hash_ids) + 1)]


def parent_of(node: Prefix) -> Prefix:
    return node[0], node[1][:-1]


class Policy:
    """What all policies are told: when a request begins, what it hits, what goes, and what is new."""

    def __init__(self, paths: Paths, capacity: int) -> None:
        self.paths = paths
        self.capacity = capacity
        self.resident: list[Prefix] = []

    def begin(self, number: int) -> None:
        self.number = number

    def hit(self, node: Prefix) -> None:
        pass

    def choose(self, leaves: list[Prefix]) -> Prefix:
        raise NotImplementedError

    def forget(self, node: Prefix) -> None:
        pass

    def add(self, nodes: list[Prefix]) -> None:
        pass

    def has_child(self, node: Prefix) -> bool:
        return any(parent_of(other) == node for other in self.resident)


class Replayed(NamedTuple):
    hits: list[int]
    victims: list[Prefix]
    resident: list[Prefix]


def replayed(paths: Paths, capacity: int, make: Callable[[Paths, int], Policy]) -> Replayed:
    policy = make(paths, capacity)
    resident = policy.resident
    hits: list[int] = []
    victims: list[Prefix] = []
    for number, path in enumerate(paths):
        policy.begin(number)
        held = [node for node in path if node in resident]
        hits.append(len(held))
        for node in held:
            policy.hit(node)
        while len(resident) + len(path) - len(held) > capacity:
            leaves = [node for node in resident if node not in held and not policy.has_child(node)]
            if not leaves:
                break
            victim = policy.choose(leaves)
            assert victim in leaves
            resident.remove(victim)
            victims.append(victim)
            policy.forget(victim)
        room = capacity - len(resident)
        new = list(path[len(held) :])[:room]
        resident += new
        policy.add(new)
    return Replayed(hits, victims, resident)


class Lru(Policy):
    def __init__(self, paths: Paths, capacity: int) -> None:
        super().__init__(paths, capacity)
        self.used: dict[Prefix, int] = {}

    def hit(self, node: Prefix) -> None:
        self.used[node] = self.number

    def add(self, nodes: list[Prefix]) -> None:
        for node in nodes:
            self.used[node] = self.number

    def choose(self, leaves: list[Prefix]) -> Prefix:
        return min(leaves, key=lambda node: self.used[node])


class Lfu(Lru):
    """`halving` capacities of blocks are asked for, whole prompts at a time, until all counts are halved."""

    halving = 2

    def __init__(self, paths: Paths, capacity: int) -> None:
        super().__init__(paths, capacity)
        self.counts: dict[Prefix, int] = {}
        self.asked = 0

    def begin(self, number: int) -> None:
        super().begin(number)
        while self.asked >= max(1, self.halving * self.capacity):
            self.asked -= max(1, self.halving * self.capacity)
            self.counts = {node: count // 2 for node, count in self.counts.items()}
        self.asked += len(self.paths[number])

    def hit(self, node: Prefix) -> None:
        super().hit(node)
        self.counts[node] += 1

    def add(self, nodes: list[Prefix]) -> None:
        super().add(nodes)
        self.counts.update(dict.fromkeys(nodes, 1))

    def choose(self, leaves: list[Prefix]) -> Prefix:
        return min(leaves, key=lambda node: (self.counts[node], self.used[node]))


class Optimum(Policy):
    """Looks for each leaf's next use in all that is to come; of those without one, the first ever seen goes first."""

    def choose(self, leaves: list[Prefix]) -> Prefix:
        seen = list(dict.fromkeys(node for path in self.paths for node in path))

        def rank(node: Prefix) -> tuple[int, int]:
            uses = (number for number in range(self.number, len(self.paths)) if node in self.paths[number])
            return -next(uses, len(self.paths)), seen.index(node)

        return min(leaves, key=rank)


class Sieve(Policy):
    """A list of all nodes, the oldest first, and the hand as a place in it."""

    def __init__(self, paths: Paths, capacity: int) -> None:
        super().__init__(paths, capacity)
        self.queue: list[Prefix] = []
        self.visited: dict[Prefix, bool] = {}
        self.hand = 0

    def hit(self, node: Prefix) -> None:
        self.visited[node] = True

    def choose(self, leaves: list[Prefix]) -> Prefix:
        while True:
            if self.hand >= len(self.queue):
                self.hand = 0
            node = self.queue[self.hand]
            if node in leaves and not self.visited[node]:
                return node
            if node not in self.paths[self.number]:
                self.visited[node] = False
            self.hand += 1

    def forget(self, node: Prefix) -> None:
        assert self.queue[self.hand] == node
        del self.queue[self.hand]

    def add(self, nodes: list[Prefix]) -> None:
        # A hand that has passed the newest starts again at the oldest, whatever comes behind it meanwhile.
        if self.hand >= len(self.queue):
            self.hand = 0
        self.visited.update(dict.fromkeys(nodes, False))
        self.queue += nodes


class S3Fifo(Policy):
    """Two lists, the oldest first, and a third of all that ever left the small one and did not come back."""

    def __init__(self, paths: Paths, capacity: int) -> None:
        super().__init__(paths, capacity)
        self.small_share = max(1, capacity // 10)
        self.small: list[Prefix] = []
        self.main: list[Prefix] = []
        self.uses: dict[Prefix, int] = {}
        self.departed: list[Prefix | None] = []

    def hit(self, node: Prefix) -> None:
        self.uses[node] = min(self.uses[node] + 1, 3)

    def choose(self, leaves: list[Prefix]) -> Prefix:
        while True:
            if len(self.small) >= self.small_share or not set(self.main).intersection(leaves):
                oldest = self.small.pop(0)
                if oldest in leaves and self.uses[oldest] <= 1:
                    self.departed.append(oldest)
                    return oldest
                self.uses[oldest] = 0
            else:
                oldest = self.main.pop(0)
                if oldest in leaves and self.uses[oldest] == 0:
                    return oldest
                self.uses[oldest] = max(0, self.uses[oldest] - 1)
            self.main.append(oldest)

    def add(self, nodes: list[Prefix]) -> None:
        room = self.capacity - self.small_share
        remembered = self.departed[-room:] if room > 0 else []
        for node in reversed(nodes):
            self.uses[node] = 0
            (self.main if node in remembered else self.small).append(node)
        self.departed = [None if node in nodes else node for node in self.departed]


NAIVE = {"lru": Lru, "sieve": Sieve, "s3-fifo": S3Fifo, "lfu": Lfu, "optimum": Optimum}


def most_hits_of_any_choice(paths: Paths, capacity: int) -> int:
    """The most blocks that can be hit if at every eviction any leaf may be chosen, by trying them all."""
    states: dict[frozenset[Prefix], int] = {frozenset(): 0}
    for path in paths:
        after: dict[frozenset[Prefix], int] = {}
        for resident, hits in states.items():
            held = resident.intersection(path)
            outcomes = {resident}
            finished: set[frozenset[Prefix]] = set()
            while outcomes:
                state = outcomes.pop()
                parents = {parent_of(node) for node in state}
                leaves = state - held - parents
                if len(state) + len(path) - len(held) <= capacity or not leaves:
                    finished.add(state.union(path[: len(held) + capacity - len(state)]))
                else:
                    outcomes.update(state - {leaf} for leaf in leaves)
            for state in finished:
                after[state] = max(after.get(state, 0), hits + len(held))
        states = after
    return max(states.values())


def most_hits_without_a_tree(paths: Paths, capacity: int) -> int:
    """The most blocks that can be hit if blocks may go in any order and at any time, by trying every set to keep.

    Each request leaves the blocks of its prompt behind, cut to the capacity, and any others there is room for of those
    that were there before.
    """
    states: dict[frozenset[Prefix], int] = {frozenset(): 0}
    for path in paths:
        own = frozenset(path[:capacity])
        after: dict[frozenset[Prefix], int] = {}
        for resident, hits in states.items():
            kept = {frozenset[Prefix]()}
            for node in resident - own:
                kept |= {state | {node} for state in kept if len(state) + len(own) < capacity}
            for state in kept:
                left = state | own
                after[left] = max(after.get(left, 0), hits + len(resident & own))
        states = after
    return max(states.values())
