"""Operations on float32 rows by address: sixteen numbers per step, in a fixed order of
addition on all machines.

A loop over the columns of an array is ten times slower for a row of 16 numbers: numba's
LLVM compiles it for rows of any length, and checks for an overlap first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gristmill.dataprep.text.kernels import inlined_kernel, inner_kernel
from gristmill.dataprep.text.simd import address_of, fetch

FLOAT_BYTES = 4


@inlined_kernel
def add_rows(target: int, sources: np.ndarray, number: np.uint64, size: int) -> None:
    """Add rows of `size` numbers to the sum, one row after another.

    A part of the sum stays in registers while that part of all rows is added.

    Args:
        target: address of the sum.
        sources: 64-bit integers, the addresses of the rows.
        number: of rows.
    """
    at = address_of(sources)
    beyond = at + 8 * int(np.int64(number))
    offset = 0
    while size >= 64:
        _add_rows_64(target + offset, at, beyond, offset)
        offset = offset + 256
        size = size - 64
    if size >= 32:
        _add_rows_32(target + offset, at, beyond, offset)
        offset = offset + 128
        size = size - 32
    if size >= 16:
        _add_rows_16(target + offset, at, beyond, offset)
        offset = offset + 64
        size = size - 16
    while size >= 4:
        _add_rows_4(target + offset, at, beyond, offset)
        offset = offset + 16
        size = size - 4
    while size > 0:
        _add_rows_1(target + offset, at, beyond, offset)
        offset = offset + 4
        size = size - 1


@intrinsic
def set_floats(typing: Any, target: Any, size: Any) -> Any:
    """Set `size` numbers at an address to zero."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        cgutils.memset(
            builder,
            target,
            builder.mul(arguments[1], ir.Constant(ir.IntType(64), FLOAT_BYTES)),
            0,
        )
        return context.get_dummy_value()

    return types.void(target, size), generate


@inner_kernel
def dot_floats(first: int, second: int, size: int) -> np.float32:
    """Dot product of `size` numbers at two addresses."""
    total = np.float32(0)
    while size >= 16:
        total += _dot_16(first, second)
        first = first + 64
        second = second + 64
        size = size - 16
    while size >= 4:
        total += _dot_4(first, second)
        first = first + 16
        second = second + 16
        size = size - 4
    while size > 0:
        total += _dot_1(first, second)
        first = first + 4
        second = second + 4
        size = size - 1
    return total


@inlined_kernel
def fetch_floats(address: int, size: int) -> None:
    """Prefetch the cache lines of `size` numbers."""
    for at in range(0, FLOAT_BYTES * size, 64):
        fetch(address + at)


def _load(builder: Any, address: Any, width: int) -> Any:
    lanes = ir.VectorType(ir.FloatType(), width)
    return builder.load(
        builder.inttoptr(address, lanes.as_pointer()), align=FLOAT_BYTES
    )


def _adds_of_rows(width: int) -> Callable[[int, int, int, int], None]:
    """Create an intrinsic that adds `width` numbers at an offset of rows to those at an
    address.
    """

    @intrinsic
    def add(typing: Any, target: Any, first: Any, beyond: Any, offset: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            target, first, beyond, offset = arguments
            total = cgutils.alloca_once_value(builder, _load(builder, target, width))
            address = ir.IntType(64)
            size = ir.Constant(ir.IntType(64), 8)
            with cgutils.for_range(
                builder, builder.udiv(builder.sub(beyond, first), size)
            ) as loop:
                source = builder.add(first, builder.mul(loop.index, size))
                row = builder.load(builder.inttoptr(source, address.as_pointer()))
                part = _load(builder, builder.add(row, offset), width)
                builder.store(builder.fadd(builder.load(total), part), total)
            lanes = ir.VectorType(ir.FloatType(), width)
            builder.store(
                builder.load(total),
                builder.inttoptr(target, lanes.as_pointer()),
                align=FLOAT_BYTES,
            )
            return context.get_dummy_value()

        return types.void(target, first, beyond, offset), generate

    return add  # type: ignore[no-any-return]


def _dots(width: int) -> Callable[[int, int], np.float32]:
    """Create an intrinsic for the dot product of `width` numbers; it adds halves of the
    products until one is left.
    """

    @intrinsic
    def dot(typing: Any, first: Any, second: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            lanes_left = width
            index = ir.IntType(32)
            products = builder.fmul(
                *(_load(builder, address, width) for address in arguments)
            )
            while lanes_left > 1:
                lanes_left //= 2
                low, high = (
                    ir.Constant(
                        ir.VectorType(index, lanes_left),
                        list(range(first, first + lanes_left)),
                    )
                    for first in (0, lanes_left)
                )
                products = builder.fadd(
                    builder.shuffle_vector(products, products, low),
                    builder.shuffle_vector(products, products, high),
                )
            return builder.extract_element(products, ir.Constant(index, 0))

        return types.float32(first, second), generate

    return dot  # type: ignore[no-any-return]


_add_rows_64, _add_rows_32, _add_rows_16, _add_rows_4, _add_rows_1 = map(
    _adds_of_rows, (64, 32, 16, 4, 1)
)
_dot_16, _dot_4, _dot_1 = _dots(16), _dots(4), _dots(1)
