"""Looking at 64 bytes at once, by their address, as vectors that LLVM maps to those of the processor.

What is found is a number of 64 bits, a bit per byte, the lowest one for the first. See `eight_bytes` for what needs no
vectors.
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
_BYTES = ir.VectorType(ir.IntType(8), WIDTH)


@inner_kernel
def address_of(values: np.ndarray) -> int:
    """Where an array begins; whoever asks keeps the array."""
    return int(np.int64(values.ctypes.data))


def _all(byte: int) -> Any:
    return ir.Constant(_BYTES, [byte] * WIDTH)


def _load(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, _BYTES.as_pointer()), align=1)


def _within(builder: Any, values: Any, first: int, last: int) -> Any:
    """Which bytes are in a range."""
    return builder.icmp_unsigned("<=", builder.sub(values, _all(first)), _all(last - first))


def _finder(find: Callable[[Any, Any], Any]) -> Callable[[int], np.uint64]:
    """What finds bytes among the 64 at an address."""

    @intrinsic
    def found(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(find(builder, _load(builder, arguments[0])), ir.IntType(64))

        return types.uint64(address), generate

    return found  # type: ignore[no-any-return]


def _separators(builder: Any, values: Any) -> Any:
    spaces = builder.or_(builder.icmp_unsigned("==", values, _all(0x20)), builder.icmp_unsigned("==", values, _all(0)))
    return builder.or_(spaces, _within(builder, values, 0x09, 0x0D))


def _ends_of_marks(builder: Any, values: Any) -> Any:
    return builder.or_(*(builder.icmp_unsigned("==", values, _all(byte)) for byte in b">_"))


def _at_least(byte: int) -> Callable[[Any, Any], Any]:
    return lambda builder, values: builder.icmp_unsigned(">=", values, _all(byte))


separators_of_64 = _finder(_separators)
"""Which bytes are between fastText's words: a space, a control character from tab to carriage return, or zero."""
ends_of_marks_in_64 = _finder(_ends_of_marks)
"""Which bytes are `>` or `_`."""
above_blanks_of_64, high_of_64, leads_of_64, leads_of_three_of_64, leads_of_four_of_64 = (
    _finder(_at_least(byte)) for byte in (0x21, 0x80, 0xC0, 0xE0, 0xF0)
)
"""Which bytes are above U+0020; which are not of ASCII; which begin a character of two bytes or more, of three or more,
and of four."""


def _writer(lower: bool) -> Callable[[int, int], np.uint64]:
    """What writes 64 bytes with a space for each white space of ASCII (`str.isspace`), perhaps in lower case."""

    @intrinsic
    def write(typing: Any, target: Any, source: Any) -> Any:
        """Write the bytes at one address to another; which ones are not of ASCII."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            values = _load(builder, arguments[1])
            spaces = builder.or_(_within(builder, values, 0x09, 0x0D), _within(builder, values, 0x1C, 0x1F))
            written = values
            if lower:
                capitals = _within(builder, values, ord("A"), ord("Z"))
                written = builder.select(capitals, builder.or_(values, _all(0x20)), values)
            written = builder.select(spaces, _all(0x20), written)
            builder.store(written, builder.inttoptr(arguments[0], _BYTES.as_pointer()), align=1)
            return builder.bitcast(builder.icmp_signed("<", values, _all(0)), ir.IntType(64))

        return types.uint64(target, source), generate

    return write  # type: ignore[no-any-return]


write_64, write_64_lower = _writer(False), _writer(True)
"""See `_writer`."""


@intrinsic
def never_utf8_of_64(typing: Any, address: Any) -> Any:
    """Which bytes no UTF-8 has, or not before the byte behind them: of the 65 at an address (Unicode, table 3-7)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = _load(builder, arguments[0])
        behind = _load(builder, builder.add(arguments[0], ir.Constant(ir.IntType(64), 1)))
        found = builder.or_(_within(builder, values, 0xC0, 0xC1), _at_least(0xF5)(builder, values))
        for byte, order, bound in ((0xE0, "<", 0xA0), (0xED, ">=", 0xA0), (0xF0, "<", 0x90), (0xF4, ">=", 0x90)):
            here = builder.icmp_unsigned("==", values, _all(byte))
            found = builder.or_(found, builder.and_(here, builder.icmp_unsigned(order, behind, _all(bound))))
        return builder.bitcast(found, ir.IntType(64))

    return types.uint64(address), generate


@intrinsic
def fetch(typing: Any, address: Any) -> Any:
    """Ask for the line of memory at an address, to be read."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number, place = ir.IntType(32), cgutils.voidptr_t
        fetch = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [place, number, number, number]), "llvm.prefetch.p0"
        )
        builder.call(fetch, [builder.inttoptr(arguments[0], place), *(ir.Constant(number, way) for way in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(address), generate


@intrinsic
def ones(typing: Any, bits: Any) -> Any:
    """How many bits are set."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@intrinsic
def trailing_zeros(typing: Any, bits: Any) -> Any:
    """How many bits below the lowest one that is set are not: of none 64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate
