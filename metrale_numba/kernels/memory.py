"""Typed views of memory that a kernel knows only by address, and the instructions that Python lacks.

An array argument costs a kernel call about 40 ns, so a kernel gets one header of addresses and builds
its views here. A view does not own what it shows: the caller keeps the arrays alive during the call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import from_dtype, types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable
from numba.np.arrayobj import populate_array

from metrale_numba.kernels import layout

_ID_BYTES = 4


def _view_of(element: Any) -> Any:
    """Make the intrinsic that views `length` elements at `address`.

    An intrinsic, and not `numba.carray`: kernels are compiled without Numba's runtime, where no function may
    return an array.
    """

    @intrinsic
    def view(_typing_context, _address, _length):
        signature = types.Array(element, 1, "C")(types.int64, types.int64)

        def codegen(context, builder, signature, args):
            address, length = args
            array = context.make_array(signature.return_type)(context, builder)
            size = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(element)))
            populate_array(
                array,
                data=builder.inttoptr(address, array.data.type),
                shape=cgutils.pack_array(builder, [length]),
                strides=cgutils.pack_array(builder, [size]),
                itemsize=size,
                meminfo=None,
            )
            return array._getvalue()

        return signature, codegen

    return view


int64_view = _view_of(types.int64)
uint64_view = _view_of(types.uint64)
uint32_view = _view_of(types.uint32)
node_view = _view_of(from_dtype(layout.NODE))
link_view = _view_of(from_dtype(layout.LINK))
suffix_view = _view_of(from_dtype(layout.SUFFIX))
entry_view = _view_of(from_dtype(layout.ENTRY))
floor_view = _view_of(from_dtype(layout.FLOOR))
ghost_view = _view_of(from_dtype(layout.GHOST))


@intrinsic
def _address(_typing_context, _array):
    """Address of an array's first element."""

    def codegen(context, builder, signature, args):
        view = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.ptrtoint(view.data, ir.IntType(64))

    return types.uint64(_array), codegen


@register_jitable(forceinline=True)
def is_whole(ids):
    """Whether an array of uint32 is aligned and without gaps, as its type says.

    A kernel that is called without a dispatcher gets any array.
    """
    is_aligned = _address(ids) % np.uint64(_ID_BYTES) == np.uint64(0)
    # An empty one is wherever it pleases, and a stride says nothing before there is a second element.
    return (is_aligned and (ids.strides[0] == _ID_BYTES or ids.size == 1)) or ids.size == 0


@intrinsic
def multiply_high(_typing_context, _left, _right):
    """Upper 64 bits of the 128-bit product of two uint64."""
    signature = types.uint64(types.uint64, types.uint64)

    def codegen(_context, builder, _signature, args):
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return signature, codegen


@intrinsic
def multiply_add(_typing_context, _high, _low, _left, _right):
    """``high * 2**64 + low + left * right`` of four uint64, again as two, modulo 2**128."""
    signature = types.UniTuple(types.uint64, 2)(types.uint64, types.uint64, types.uint64, types.uint64)

    def codegen(context, builder, signature, args):
        wide = ir.IntType(128)
        high, low, left, right = (builder.zext(arg, wide) for arg in args)
        total = builder.or_(builder.shl(high, ir.Constant(wide, 64)), low)
        total = builder.add(total, builder.mul(left, right))
        halves = [builder.lshr(total, ir.Constant(wide, 64)), total]
        parts = [builder.trunc(half, ir.IntType(64)) for half in halves]
        return context.make_tuple(builder, signature.return_type, parts)

    return signature, codegen


@intrinsic
def dot_16(_typing_context, _tokens, _start, _powers, _powers_start):
    """Sum of 16 products of a uint32 with a uint64, as the high and the low uint64 of 128 bits.

    Products of halves in vectors take half the time of 16 products of words. Nothing checks the bounds.
    """
    signature = types.UniTuple(types.uint64, 2)(
        types.Array(types.uint32, 1, "C"), types.uint64, types.Array(types.uint64, 1, "C"), types.uint64
    )
    word, wide = ir.IntType(64), ir.IntType(128)
    words = ir.VectorType(word, 16)

    def loaded(context, builder, kind, value, start, bits):
        view = context.make_array(kind)(context, builder, value)
        vector = ir.VectorType(ir.IntType(bits), 16).as_pointer()
        return builder.load(builder.bitcast(builder.gep(view.data, [start]), vector), align=bits // 8)

    def codegen(context, builder, signature, args):
        tokens = builder.zext(loaded(context, builder, signature.args[0], args[0], args[1], 32), words)
        powers = loaded(context, builder, signature.args[2], args[2], args[3], 64)
        mask = ir.Constant(words, [word(0xFFFF_FFFF)] * 16)
        half = ir.Constant(words, [word(32)] * 16)
        low = builder.mul(tokens, builder.and_(powers, mask))
        high = builder.mul(tokens, builder.lshr(powers, half))
        # By weight: 2**0, 2**32 and 2**64. Sixteen numbers of 33 bits are no more than one of 37.
        sums = [
            builder.and_(low, mask),
            builder.add(builder.lshr(low, half), builder.and_(high, mask)),
            builder.lshr(high, half),
        ]
        kind = ir.FunctionType(word, [words])
        reduce = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.add.v16i64")
        total = wide(0)
        for weight, numbers in enumerate(sums):
            number = builder.zext(builder.call(reduce, [numbers]), wide)
            total = builder.add(total, builder.shl(number, wide(32 * weight)))
        parts = [builder.trunc(builder.lshr(total, wide(64)), word), builder.trunc(total, word)]
        return context.make_tuple(builder, signature.return_type, parts)

    return signature, codegen


@intrinsic
def same_16(_typing_context, _left, _left_start, _right, _right_start):
    """Whether two runs of 16 uint32 are equal, as one comparison of 64 bytes.

    A loop of 16 is unrolled before it can become vectors, and takes three times as long. Nothing checks the bounds.
    """
    array = types.Array(types.uint32, 1, "C")
    signature = types.boolean(array, types.uint64, array, types.uint64)

    def codegen(context, builder, signature, args):
        chunk = ir.IntType(512)
        loaded = []
        for kind, value, start in zip(signature.args[::2], args[::2], args[1::2], strict=True):
            view = context.make_array(kind)(context, builder, value)
            element = builder.gep(view.data, [start])
            loaded.append(builder.load(builder.bitcast(element, chunk.as_pointer()), align=4))
        return builder.icmp_unsigned("==", *loaded)

    return signature, codegen


@intrinsic
def copy_16(_typing_context, _to, _to_start, _source, _source_start):
    """Copy a run of 16 uint32 as one move of 64 bytes. Nothing checks the bounds."""
    array = types.Array(types.uint32, 1, "C")
    signature = types.void(array, types.uint64, array, types.uint64)

    def codegen(context, builder, signature, args):
        chunk = ir.IntType(512).as_pointer()
        places = []
        for kind, value, start in zip(signature.args[::2], args[::2], args[1::2], strict=True):
            view = context.make_array(kind)(context, builder, value)
            places.append(builder.bitcast(builder.gep(view.data, [start]), chunk))
        builder.store(builder.load(places[1], align=4), places[0], align=4)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def prefetch(_typing_context, _array, _index):
    """Ask for the cache line of an element, which need not exist."""

    def codegen(context, builder, signature, args):
        view = context.make_array(signature.args[0])(context, builder, args[0])
        place = builder.bitcast(builder.gep(view.data, [args[1]]), ir.IntType(8).as_pointer())
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        # For reading, to be kept in every cache, of the data.
        builder.call(function, [place, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(_array, types.uint64), codegen


@intrinsic
def leading_zeros(_typing_context, _word):
    """Zero bits above the highest set bit of a uint64 that is not 0."""
    signature = types.int64(types.uint64)

    def codegen(_context, builder, _signature, args):
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 1))

    return signature, codegen
