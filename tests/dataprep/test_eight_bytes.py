"""SWAR predicates on eight bytes agree with the same predicates byte by byte."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gristmill.dataprep.text.swar import (
    controls_of,
    count_byte,
    equal_to,
    find_byte,
    first_of,
    letters_of,
    number_of,
)
from gristmill.dataprep.text.unicode_tables import code_point_flags

OF_BYTE: dict[str, tuple[Callable, Callable[[int], bool]]] = {
    "letters": (letters_of, lambda byte: byte < 128 and chr(byte).isalpha()),
    "controls": (controls_of, lambda byte: byte < 32),
    "newlines": (lambda eight: equal_to(eight, 10), lambda byte: byte == 10),
    "leads": (lambda eight: equal_to(eight, 0xE2), lambda byte: byte == 0xE2),
}


def as_number(eight: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(eight, "little"))


@pytest.mark.parametrize("kind", OF_BYTE)
def test_every_byte_is_classified_in_every_position(kind: str) -> None:
    function, predicate = OF_BYTE[kind]
    for byte in range(256):
        for filler in (0x00, 0xFF, 0x7F, 0x80):
            for place in (0, 3, 7):
                eight = bytearray([filler] * 8)
                eight[place] = byte
                expected = bytes(0x80 * predicate(value) for value in eight)
                assert function(as_number(bytes(eight))) == as_number(expected), (
                    byte,
                    filler,
                    place,
                )


@given(st.binary(min_size=8, max_size=8))
@example(b"0a\n\xe2\x80\xa6..")
def test_bytes_are_classified_independently(eight: bytes) -> None:
    for function, predicate in OF_BYTE.values():
        mask = np.uint64(function(as_number(eight)))
        expected = [predicate(byte) for byte in eight]
        assert mask == as_number(bytes(0x80 * is_member for is_member in expected))
        assert number_of(mask) == sum(expected)
        assert not mask or first_of(mask) == expected.index(True)


@given(
    st.lists(st.sampled_from([10, 35, 97, 0x8A, 255]), max_size=60).map(bytes),
    st.tuples(*[st.integers(0, 60)] * 2),
)
def test_byte_is_counted_and_found_within_its_range(
    data: bytes, ends: tuple[int, int]
) -> None:
    begin, end = sorted(min(place, len(data)) for place in ends)
    array = np.frombuffer(data, np.uint8)
    assert count_byte(array, begin, end, 10) == data.count(b"\n", begin, end)
    place = data.find(b"\n", begin, end)
    assert find_byte(array, begin, end, 10) == (end if place < 0 else place)


def test_ascii_letters_share_their_flags_and_so_do_digits() -> None:
    flags = code_point_flags()
    for first, last in (("a", "z"), ("A", "Z"), ("0", "9")):
        same = flags[ord(first) : ord(last) + 1]
        assert (same == flags[ord("a" if first == "A" else first)]).all()
