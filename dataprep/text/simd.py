"""Operations on 64 bytes at once, by their address, as vectors that LLVM maps to those
of the processor.

A result is a 64-bit mask with one bit per byte, lowest first. See `swar` for
operations without vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gristmill.dataprep.text.kernels import inner_kernel

WIDTH = 64
READ_INTO_ALL_CACHES = (0, 3, 1)
"""Arguments of llvm.prefetch (LLVM Language Reference Manual): for reading, kept in all
caches, of data.
"""
_BYTES = ir.VectorType(ir.IntType(8), WIDTH)


@inner_kernel
def address_of(values: np.ndarray) -> int:
    """Address of an array's data; the caller must keep the array alive."""
    return int(np.int64(values.ctypes.data))


def _all(byte: int) -> Any:
    return ir.Constant(_BYTES, [byte] * WIDTH)


def _load(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, _BYTES.as_pointer()), align=1)


def _within(builder: Any, values: Any, first: int, last: int) -> Any:
    """Mask of the bytes in a range."""
    return builder.icmp_unsigned(
        "<=", builder.sub(values, _all(first)), _all(last - first)
    )


def _of_number(
    generate: Callable[[Any, Any], Any],
) -> Callable[[int | np.uint64], np.uint64]:
    """Intrinsic from one 64-bit number to another, or to a mask, by instructions of
    LLVM.
    """

    @intrinsic
    def operation(typing: Any, number: Any) -> Any:
        def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(generate(builder, arguments[0]), ir.IntType(64))

        return types.uint64(types.uint64), lower

    return operation  # type: ignore[no-any-return]


def _finder(find: Callable[[Any, Any], Any]) -> Callable[[int | np.uint64], np.uint64]:
    """Intrinsic that applies a mask function to the 64 bytes at an address."""
    return _of_number(lambda builder, address: find(builder, _load(builder, address)))


@_finder
def separators_of_64(builder: Any, values: Any) -> Any:
    """Mask of the bytes between fastText's words: a space, a control character from tab
    to carriage return, or zero.
    """
    spaces = builder.or_(
        builder.icmp_unsigned("==", values, _all(0x20)),
        builder.icmp_unsigned("==", values, _all(0)),
    )
    return builder.or_(spaces, _within(builder, values, 0x09, 0x0D))


@_finder
def ends_of_marks_in_64(builder: Any, values: Any) -> Any:
    """Mask of the bytes `>` and `_`."""
    return builder.or_(
        *(builder.icmp_unsigned("==", values, _all(byte)) for byte in b">_")
    )


def _at_least(byte: int) -> Callable[[Any, Any], Any]:
    return lambda builder, values: builder.icmp_unsigned(">=", values, _all(byte))


(
    above_blanks_of_64,
    high_of_64,
    leads_of_64,
    leads_of_three_of_64,
    leads_of_four_of_64,
) = (_finder(_at_least(byte)) for byte in (0x21, 0x80, 0xC0, 0xE0, 0xF0))
"""Masks of the bytes above U+0020, of bytes beyond ASCII, and of lead bytes of
characters with two or more, three or more, and four bytes.
"""


def _copy_intrinsic(lower: bool) -> Callable[[int, int], np.uint64]:
    """Intrinsic that copies 64 bytes with a space for each ASCII whitespace
    (`str.isspace`), optionally lower-cased.
    """

    @intrinsic
    def write(typing: Any, target: Any, source: Any) -> Any:
        """Copy the bytes at one address to another; returns the mask of those beyond
        ASCII.
        """

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            values = _load(builder, arguments[1])
            spaces = builder.or_(
                _within(builder, values, 0x09, 0x0D),
                _within(builder, values, 0x1C, 0x1F),
            )
            output = values
            if lower:
                capitals = _within(builder, values, ord("A"), ord("Z"))
                output = builder.select(
                    capitals, builder.or_(values, _all(0x20)), values
                )
            output = builder.select(spaces, _all(0x20), output)
            builder.store(
                output, builder.inttoptr(arguments[0], _BYTES.as_pointer()), align=1
            )
            return builder.bitcast(
                builder.icmp_signed("<", values, _all(0)), ir.IntType(64)
            )

        return types.uint64(target, source), generate

    return write  # type: ignore[no-any-return]


write_64, write_64_lower = _copy_intrinsic(False), _copy_intrinsic(True)
"""See `_copy_intrinsic`."""


@_of_number
def never_utf8_of_64(builder: Any, address: Any) -> Any:
    """Mask of the bytes that UTF-8 lacks, or lacks before the byte that follows, of the
    65 at an address (Unicode, table 3-7).
    """
    values = _load(builder, address)
    following = _load(builder, builder.add(address, ir.Constant(ir.IntType(64), 1)))
    invalid = builder.or_(
        _within(builder, values, 0xC0, 0xC1), _at_least(0xF5)(builder, values)
    )
    for byte, order, bound in (
        (0xE0, "<", 0xA0),
        (0xED, ">=", 0xA0),
        (0xF0, "<", 0x90),
        (0xF4, ">=", 0x90),
    ):
        here = builder.icmp_unsigned("==", values, _all(byte))
        is_wrong = builder.icmp_unsigned(order, following, _all(bound))
        invalid = builder.or_(invalid, builder.and_(here, is_wrong))
    return invalid


def prefetch(builder: Any, address: Any) -> None:
    """Prefetch the cache line at an address, which need not be valid, for reading."""
    number = ir.IntType(32)
    place = cgutils.voidptr_t
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [place, number, number, number]),
        "llvm.prefetch.p0",
    )
    builder.call(
        function, [builder.inttoptr(address, place), *map(number, READ_INTO_ALL_CACHES)]
    )


@intrinsic
def fetch(typing: Any, address: Any) -> Any:
    """See `prefetch`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(address), generate


ones = _of_number(lambda builder, bits: builder.ctpop(bits))
"""Number of set bits."""
trailing_zeros = _of_number(
    lambda builder, bits: builder.cttz(bits, ir.Constant(ir.IntType(1), 0))
)
"""Number of zero bits below the lowest set bit; 64 for zero."""


@intrinsic
def high_half(typing: Any, one: Any, other: Any) -> Any:
    """Upper half of the 128-bit product of two 64-bit numbers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(argument, wide) for argument in arguments))
        return builder.trunc(
            builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64)
        )

    return types.uint64(types.uint64, types.uint64), generate
