"""BLAKE2b-128 of many texts at once: the digests of `hashlib`, without Python objects
or the GIL.

For short texts `hashlib` keeps the GIL, so that hashing threads block threads that run
other kernels.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.text.hashing import load64
from gristmill.dataprep.text.kernels import kernel

INITIAL = np.array(
    [
        0x6A09E667F3BCC908,
        0xBB67AE8584CAA73B,
        0x3C6EF372FE94F82B,
        0xA54FF53A5F1D36F1,
        0x510E527FADE682D1,
        0x9B05688C2B3E6C1F,
        0x1F83D9ABFB41BD6B,
        0x5BE0CD19137E2179,
    ],
    np.uint64,
)
"""RFC 7693, section 2.6."""
SCHEDULE = np.array(
    [
        [int(digit, 16) for digit in order]
        for order in (
            "0123456789abcdef ea489fd61c02b753 b8c052fdae367194 "
            "7931dcbe265a40f8 905724afe1bc683d 2c6a0b834d75fe19 "
            "c51fed4a0763928b db7ec13950f4862a 6fe9b308c2d714a5 "
            "a2847615fb9e3cd0"
        ).split()
    ],
    np.uint8,
)
"""Message schedule: words of a block in the order of the steps (RFC 7693, section 2.7),
a hexadecimal digit each; rounds 10 and 11 repeat the first two.
"""
ROUNDS, BLOCK_BYTES = 12, 128
PARAMETERS = np.uint64(0x01010010)
"""No key, 16 bytes of digest (RFC 7693, section 2.8)."""


@kernel
def digest_texts(data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """BLAKE2b-128 of every text: uint64 of shape (n, 2), whose bytes are the digests.

    Args:
        data, offsets: as from `text_buffers`.
    """
    digests = np.empty((len(offsets) - 1, 2), np.uint64)
    state = np.empty(8, np.uint64)
    words = np.empty(16, np.uint64)
    last = np.empty(BLOCK_BYTES, np.uint8)
    for text in range(len(offsets) - 1):
        pos = offsets[text]
        end = offsets[text + 1]
        length = end - pos
        state[:] = INITIAL
        state[0] ^= PARAMETERS
        hashed = 0
        while length - hashed > BLOCK_BYTES:
            for word in range(16):
                words[word] = load64(data, pos + 8 * word)
            pos += BLOCK_BYTES
            hashed += BLOCK_BYTES
            _compress(state, words, np.uint64(hashed), np.uint64(0))
        last[:] = 0
        last[: end - pos] = data[pos:end]
        for word in range(16):
            words[word] = load64(last, 8 * word)
        _compress(state, words, np.uint64(length), ~np.uint64(0))
        digests[text, 0], digests[text, 1] = state[0], state[1]
    return digests


@kernel
def _compress(
    state: np.ndarray, words: np.ndarray, hashed: np.uint64, final: np.uint64
) -> None:
    """Function F of RFC 7693, section 3.2."""
    v0 = state[0]
    v1 = state[1]
    v2 = state[2]
    v3 = state[3]
    v4 = state[4]
    v5 = state[5]
    v6 = state[6]
    v7 = state[7]
    v8 = INITIAL[0]
    v9 = INITIAL[1]
    v10 = INITIAL[2]
    v11 = INITIAL[3]
    v12 = INITIAL[4] ^ hashed
    v13 = INITIAL[5]
    v14 = INITIAL[6] ^ final
    v15 = INITIAL[7]
    for number in range(ROUNDS):
        order = SCHEDULE[number % 10]
        v0, v4, v8, v12 = _mix(v0, v4, v8, v12, words[order[0]], words[order[1]])
        v1, v5, v9, v13 = _mix(v1, v5, v9, v13, words[order[2]], words[order[3]])
        v2, v6, v10, v14 = _mix(v2, v6, v10, v14, words[order[4]], words[order[5]])
        v3, v7, v11, v15 = _mix(v3, v7, v11, v15, words[order[6]], words[order[7]])
        v0, v5, v10, v15 = _mix(v0, v5, v10, v15, words[order[8]], words[order[9]])
        v1, v6, v11, v12 = _mix(v1, v6, v11, v12, words[order[10]], words[order[11]])
        v2, v7, v8, v13 = _mix(v2, v7, v8, v13, words[order[12]], words[order[13]])
        v3, v4, v9, v14 = _mix(v3, v4, v9, v14, words[order[14]], words[order[15]])
    state[0] ^= v0 ^ v8
    state[1] ^= v1 ^ v9
    state[2] ^= v2 ^ v10
    state[3] ^= v3 ^ v11
    state[4] ^= v4 ^ v12
    state[5] ^= v5 ^ v13
    state[6] ^= v6 ^ v14
    state[7] ^= v7 ^ v15


@kernel
def _mix(
    a: np.uint64,
    b: np.uint64,
    c: np.uint64,
    d: np.uint64,
    first: np.uint64,
    second: np.uint64,
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Function G of RFC 7693, section 3.1."""
    a = a + b + first
    d = _rotate(d ^ a, 32)
    c = c + d
    b = _rotate(b ^ c, 24)
    a = a + b + second
    d = _rotate(d ^ a, 16)
    c = c + d
    return a, _rotate(b ^ c, 63), c, d


@kernel
def _rotate(value: np.uint64, bits: int) -> np.uint64:
    return value >> np.uint64(bits) | value << np.uint64(64 - bits)
