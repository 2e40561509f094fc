"""Typed views of memory that a kernel knows only by address, and the two instructions Python lacks.

An array argument costs a kernel call about 40 ns, so a kernel gets one header of addresses and builds
its views here. A view does not own what it shows: the caller keeps the arrays alive during the call.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import from_dtype, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from metrale_numba.kernels import layout


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
def leading_zeros(_typing_context, _word):
    """Zero bits above the highest set bit of a uint64 that is not 0."""
    signature = types.int64(types.uint64)

    def codegen(_context, builder, _signature, args):
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 1))

    return signature, codegen
