"""How long a move of the microscope's slider takes, through HTTP: median and 95th percentile.

Usage:
    python benchmarks/microscope_latency.py [--moves 200] [--model inline_deit_tiny] [--layer 0]

Without a network it is the 14 x 14 grid of raw patches. The time is that from the request to the last byte of the
answer, over one connection that stays open, as a browser's does; drawing comes on top.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import threading
import time
from typing import Any
from urllib.parse import urlencode, urlsplit

from affinear.lens.microscope import Network, make_server

BAR = 150.0  # milliseconds


def opened(model: str | None) -> Network | None:
    """The network of this name, with random weights."""
    if model is None:
        return None
    from affinear.models.making import make

    return Network(model, make(model, {}).eval())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=200, help="Moves of the slider.")
    parser.add_argument("--model", help="A network to look into, instead of raw patches.")
    parser.add_argument("--layer", type=int, default=0, help="The number of its layer.")
    asked = parser.parse_args()
    with make_server(network=opened(asked.model)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        connection = http.client.HTTPConnection(urlsplit(server.address).netloc)
        common = {"image": "pagoda", "source": "network" if asked.model else "raw", "layer": asked.layer}
        layers = ask(connection, "layers", common)["layers"]
        rows, columns = next(layer["grid"] for layer in layers if layer["number"] == asked.layer)
        moves = [clock(connection, "rows", common, rows * columns, step) for step in range(asked.moves + 5)][5:]
        curves = [clock(connection, "curves", common, rows * columns, step) for step in range(12)][2:]
        report(f"slider, five maps of {rows} x {columns}", moves)
        report("curves of a new patch", curves)
        if rows * columns <= 14 * 14:
            print(f"bar: a move of the slider under {BAR:.0f} ms: {'met' if percentile(moves) < BAR else 'missed'}")
        server.shutdown()


def clock(connection: http.client.HTTPConnection, what: str, common: dict[str, Any], count: int, step: int) -> float:
    """Milliseconds until an answer is there; another factor and another patch each time."""
    factor = 2 ** (((step * 7) % 129 - 64) / 16)
    began = time.perf_counter()
    ask(connection, what, {**common, "patch": (step * 31) % count, "factor": factor})
    return 1000 * (time.perf_counter() - began)


def ask(connection: http.client.HTTPConnection, what: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The server's answer."""
    connection.request("GET", f"/api/{what}?{urlencode(asked)}")
    answer = json.loads(connection.getresponse().read())
    if "error" in answer:
        raise SystemExit(answer["error"])
    return answer


def percentile(times: list[float]) -> float:
    """The 95th."""
    return statistics.quantiles(times, n=20)[-1]


def report(what: str, times: list[float]) -> None:
    """Print a line."""
    print(f"{what}: median {statistics.median(times):.1f} ms, 95th percentile {percentile(times):.1f} ms")


if __name__ == "__main__":
    main()
