"""Unigram language model over pre-tokens, by the expectation maximisation of
`sentencepiece` (Kudo 2018).

The trainer of `tokenizers` iterates over words in the order of a hash map and returns
another vocabulary every time, so `sentencepiece` is used. Its input is the pre-tokens
with their counts, and the seed substrings: its own seeds lack every word that is not
part of another.
"""

from __future__ import annotations

import io
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

THREADS = 4
"""Fixed, since float32 sums depend on the number of parts."""
LONGEST_PIECE = 16
"""Longest piece in characters, here bytes; the library's default."""
LONGEST_WORD = 4192
"""Longest pre-token for training, in bytes; the library's default."""
SEEDS = 10
"""Seed substrings per piece. With the library's default, a million, 16,000 pieces cover
less text (2 % on many languages) and training takes twice the memory.
"""
FACTOR = np.uint64(0x9E3779B97F4A7C15)


def learn_unigram(
    texts: Iterable[str],
    vocab_size: int,
    splitter: PreTokenizer,
    alphabet: Sequence[str],
) -> list[tuple[str, float]]:
    """Learn pieces and their log probabilities, the most probable first.

    Args:
        texts: to learn from.
        vocab_size: most pieces.
        splitter: a byte-level pre-tokenizer.
        alphabet: characters that are always pieces: all bytes as `splitter` writes
            them.

    Raises:
        ImportError: `sentencepiece` is not installed.
    """
    import sentencepiece

    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(word for word, _ in splitter.pre_tokenize_str(text))
    words = sorted(word for word in counts if len(word) <= LONGEST_WORD)
    unseen = sorted({*alphabet}.difference(*words))
    seed_count = SEEDS * vocab_size
    seeds = frequent_substrings(
        words, np.array([counts[word] for word in words], np.int64), seed_count
    )
    model_file = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        seed_file = Path(folder) / "seeds.tsv"
        seed_file.write_text(
            "".join(f"{piece}\t{count}\n" for piece, count in seeds), encoding="utf-8"
        )
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(f"{word}\t{counts[word]}" for word in words),
            model_writer=model_file,
            input_format="tsv",
            model_type="unigram",
            vocab_size=vocab_size - len(unseen) + 1,  # one for its unknown token
            hard_vocab_limit=False,
            seed_sentencepieces_file=str(seed_file),
            seed_sentencepiece_size=seed_count + len(alphabet),
            max_sentencepiece_length=LONGEST_PIECE,
            max_sentence_length=4 * LONGEST_WORD,
            num_threads=THREADS,
            character_coverage=1.0,
            required_chars="".join(alphabet),
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            split_by_unicode_script=False,
            split_by_number=False,
            split_by_whitespace=False,
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            minloglevel=2,
        )
    model = sentencepiece.SentencePieceProcessor(model_proto=model_file.getvalue())
    pieces = [
        (model.id_to_piece(number), model.get_score(number))
        for number in range(1, model.get_piece_size())
    ]
    return [*pieces, *((character, pieces[-1][1]) for character in unseen)]


def frequent_substrings(
    words: Sequence[str], counts: np.ndarray, most: int
) -> list[tuple[str, int]]:
    """Substrings of at least two characters that occur at least twice, by decreasing
    coverage of text.

    Args:
        words: sorted and distinct.
        counts: int64 of shape (len(words),), occurrences of each.
        most: most substrings.
    """
    flat = "".join(words)
    characters = np.frombuffer(flat.encode("utf-32-le"), np.uint32).astype(np.uint64)
    lengths = np.array([*map(len, words)], np.int64)
    ends = np.repeat(np.cumsum(lengths), lengths)
    times = np.repeat(counts, lengths)
    at = np.arange(len(characters))
    hashes = characters
    begins, sizes, totals = ([np.empty(0, np.int64)] for _ in range(3))
    for size in range(2, LONGEST_PIECE + 1):
        inside = at + size <= ends[at]
        at = at[inside]
        hashes = hashes[inside]
        hashes = hashes * FACTOR + characters[at + size - 1]
        _, first, number = np.unique(hashes, return_index=True, return_inverse=True)
        # below 2^53, so exact
        total = np.bincount(number, times[at], len(first)).astype(np.int64)
        often = total >= 2
        begins.append(at[first[often]])
        sizes.append(np.full(often.sum(), size))
        totals.append(total[often])
        at = at[often[number]]
        hashes = hashes[often[number]]
    begin, size_of, count = (np.concatenate(parts) for parts in (begins, sizes, totals))
    order = np.lexsort((begin, -count * size_of))[:most]
    return [
        (flat[begin[place] : begin[place] + size_of[place]], int(count[place]))
        for place in order
    ]
