"""A claim belongs to one process, and ends with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

HOLD = """
import sys, time
from pathlib import Path
from running.claims import claimed
with claimed(Path(sys.argv[1])) as is_mine:
    print(is_mine, flush=True)
    time.sleep(60)
"""


def test_a_claim_is_one_process_s_until_it_ends(script: Any, tmp_path: Path) -> None:
    claims, path = script("running.claims"), tmp_path / "some" / "work.claim"
    folder = Path(claims.__file__).parents[1]
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], cwd=folder, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"True\n"
        with claims.claimed(path) as is_mine:
            assert not is_mine
        other.kill()
    with claims.claimed(path) as is_mine:
        assert is_mine
    with claims.claimed(path, wait=True) as is_mine:
        assert is_mine
