"""Typed views of memory that a kernel knows only by address, and the two instructions Python lacks.

An array argument costs a kernel call about 40 ns, so a kernel gets one header of addresses and builds
its views here. A view does not own what it shows: the caller keeps the arrays alive during the call.
"""

from __future__ import annotations

from typing import Any

from numba import carray, from_dtype, types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from metrale_numba.kernels import layout


def _pointer_to(element: Any) -> Any:
    @intrinsic
    def pointer(_typing_context, _address):
        signature = types.CPointer(element)(types.int64)

        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return signature, codegen

    return pointer


_int64_at = _pointer_to(types.int64)
_uint64_at = _pointer_to(types.uint64)
_uint32_at = _pointer_to(types.uint32)
_node_at = _pointer_to(from_dtype(layout.NODE))
_link_at = _pointer_to(from_dtype(layout.LINK))
_suffix_at = _pointer_to(from_dtype(layout.SUFFIX))
_entry_at = _pointer_to(from_dtype(layout.ENTRY))


@register_jitable
def int64_view(address, length):
    """View `length` int64 at `address`."""
    return carray(_int64_at(address), (length,))


@register_jitable
def uint64_view(address, length):
    """View `length` uint64 at `address`."""
    return carray(_uint64_at(address), (length,))


@register_jitable
def uint32_view(address, length):
    """View `length` uint32 at `address`."""
    return carray(_uint32_at(address), (length,))


@register_jitable
def node_view(address, length):
    """View `length` records of :data:`layout.NODE` at `address`."""
    return carray(_node_at(address), (length,))


@register_jitable
def link_view(address, length):
    """View `length` records of :data:`layout.LINK` at `address`."""
    return carray(_link_at(address), (length,))


@register_jitable
def suffix_view(address, length):
    """View `length` records of :data:`layout.SUFFIX` at `address`."""
    return carray(_suffix_at(address), (length,))


@register_jitable
def entry_view(address, length):
    """View `length` records of :data:`layout.ENTRY` at `address`."""
    return carray(_entry_at(address), (length,))


@intrinsic
def multiply_high(_typing_context, _left, _right):
    """Upper 64 bits of the 128-bit product of two uint64; Python integers have no such operation in Numba."""
    signature = types.uint64(types.uint64, types.uint64)

    def codegen(_context, builder, _signature, args):
        wide = cgutils.ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        return builder.trunc(builder.lshr(product, cgutils.ir.Constant(wide, 64)), cgutils.ir.IntType(64))

    return signature, codegen


@intrinsic
def leading_zeros(_typing_context, _word):
    """Zero bits above the highest set bit of a uint64 that is not 0."""
    signature = types.int64(types.uint64)

    def codegen(_context, builder, _signature, args):
        return builder.ctlz(args[0], cgutils.ir.Constant(cgutils.ir.IntType(1), 1))

    return signature, codegen
