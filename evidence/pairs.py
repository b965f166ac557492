"""What counts of tokens and of pairs tell about text without a network: their perplexity, beside language.py's.

    PYTHONPATH=src:evidence python evidence/pairs.py pubmed --tokens 1916928

Counted on so many training tokens, in rows drawn by chance as those of a training are, and judged on all test tokens:
single tokens, and pairs, which go back to single tokens by Witten and Bell's rule. No document begins anew: a pair may
reach over an end.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from affinear.tasks.language.tokens import read

Tokens = NDArray[np.int64]
ROW = 512  # tokens that are drawn together


def main() -> int:
    """Tell both perplexities."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="token files; what language.py --prepare writes")
    parser.add_argument("--tokens", type=int, help="to count; all if left out")
    given = parser.parse_args()
    files = read(given.folder)
    learnt, judged = (np.asarray(half, np.int64) for half in (files.train, files.test))
    learnt = learnt if given.tokens is None else drawn(learnt, given.tokens, np.random.default_rng(0))
    size = files.spelling.size
    print(f"counts of {len(learnt):,} tokens, judged by {len(judged) - 1:,}:")
    print(f"single tokens: perplexity {perplexity(singles(learnt, size)[judged[1:]]):.1f}")
    print(f"pairs: perplexity {perplexity(pairs(learnt, judged, size)):.1f}")
    return 0


def drawn(learnt: Tokens, tokens: int, random: np.random.Generator) -> Tokens:
    """So many tokens or a few less, in rows from everywhere."""
    rows = learnt[: len(learnt) // ROW * ROW].reshape(-1, ROW)
    return rows[np.sort(random.permutation(len(rows))[: tokens // ROW])].ravel()


def singles(learnt: Tokens, size: int) -> NDArray[np.float64]:
    """How likely every token is, each counted once more than it came."""
    return (np.bincount(learnt, minlength=size) + 1) / (len(learnt) + size)


def pairs(learnt: Tokens, judged: Tokens, size: int) -> NDArray[np.float64]:
    """How likely each judged token but the first is after the one before it."""
    seen, counts = np.unique(learnt[:-1] * size + learnt[1:], return_counts=True)
    asked = judged[:-1] * size + judged[1:]
    place = np.searchsorted(seen, asked).clip(max=len(seen) - 1)
    count = np.where(seen[place] == asked, counts[place], 0)
    before = np.bincount(learnt[:-1], minlength=size)[judged[:-1]]
    kinds = np.bincount(seen // size, minlength=size)[judged[:-1]]
    alone = singles(learnt, size)[judged[1:]]
    return np.where(before > 0, (count + kinds * alone) / np.maximum(before + kinds, 1), alone)


def perplexity(shares: Any) -> float:
    """Of what was foretold with these likelihoods.

    Examples:
        >>> round(perplexity([0.5, 0.125]), 6)
        4.0
    """
    return float(np.exp(-np.log(shares).mean()))


if __name__ == "__main__":
    raise SystemExit(main())
