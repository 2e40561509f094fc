"""Counts the work that kernels do, in a build of their own; in the normal one :func:`tally` leaves no trace.

How long a call takes depends on the machine and on who else uses it; how many nodes it visits and how many tokens it
hashes does not. With ``METRALE_COUNT_WORK=1`` in the environment when the first cache is made, kernels count that. It
is for development (``tests/count_work.py``): such kernels are slower, count for one thread at a time, and are never
kept on disk.
"""

from __future__ import annotations

import os

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

VARIABLE = "METRALE_COUNT_WORK"
IS_ON = os.environ.get(VARIABLE) == "1"

KINDS = (
    "nodes visited",  # each whose parent or chunk a walk compares, found or not
    "nodes climbed",  # each passed on the way back to the root
    "searches by hash",  # of a child that is not in the next row
    "hashes made ahead",  # of blocks that a walk has not come to yet
    "slots probed",  # each look into a hash table, the first one and the empty one included
    "tokens hashed",  # by the check hash
    "tokens keyed",  # by the tier key
    "tokens copied",  # into chunks and partial suffixes
    "candidates moved",  # each place written in the order of eviction
    "nodes added",  # roots too
    "nodes removed",  # roots too
    "entries looked at",  # of the snapshot index
)
(
    NODES_VISITED,
    NODES_CLIMBED,
    SEARCHES,
    HASHES_AHEAD,
    SLOTS_PROBED,
    TOKENS_HASHED,
    TOKENS_KEYED,
    TOKENS_COPIED,
    CANDIDATES_MOVED,
    NODES_ADDED,
    NODES_REMOVED,
    ENTRIES_LOOKED_AT,
) = range(len(KINDS))

# Its address becomes part of the code, so it is made once and never replaced.
counts = np.zeros(len(KINDS), np.int64)


@intrinsic
def tally(_typing_context, _kind, _number):
    """Add to a count in the counting build; nothing at all in the normal one."""

    def codegen(context, builder, _signature, args):
        if IS_ON:
            word = ir.IntType(64)
            first = ir.Constant(word, counts.ctypes.data).inttoptr(word.as_pointer())
            place = builder.gep(first, [args[0]])
            builder.store(builder.add(builder.load(place), args[1]), place)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen
