"""Count every network anew and keep what `affinear models` shows with the package; takes about a minute.

python scripts/count_networks.py
"""

from __future__ import annotations

from affinear.lens.files import place
from affinear.listing import COUNTED, as_json
from affinear.models import catalogue


def main() -> None:
    """Write src/affinear/networks.json."""
    rows = list(catalogue.entries(others=True))
    place(as_json(rows).encode(), COUNTED, force=True)
    print(f"{len(rows)} networks: {COUNTED}")


if __name__ == "__main__":
    main()
