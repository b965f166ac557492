"""Texts of PubMed, out of its files of records."""

from __future__ import annotations

import gzip
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path


def abstracts(folder: Path) -> Iterator[str]:
    """Title and abstract of every record in English."""

    def words(element: ElementTree.Element) -> str:
        return " ".join("".join(element.itertext()).split())

    for path in sorted(folder.glob("*.xml.gz")):
        with gzip.open(path) as file:
            for _, record in ElementTree.iterparse(file):
                if record.tag != "PubmedArticle":
                    continue
                if any(language.text == "eng" for language in record.iter("Language")):
                    parts = [words(part) for tag in ("ArticleTitle", "AbstractText") for part in record.iter(tag)]
                    yield "\n".join(part for part in parts if part)
                record.clear()
