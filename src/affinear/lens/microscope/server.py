"""The server: a fixed list of files and a few questions, for this machine alone unless told otherwise."""

from __future__ import annotations

import io
import ipaddress
import json
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

from affinear.lens.microscope.answers import Answer
from affinear.lens.microscope.desk import Desk, Network, make_desk
from affinear.lens.microscope.refusal import Refusal

MOST_BYTES = 16 * 2**20  # of an upload
MOST_FIELDS = 20  # of a question
MOST_OPEN = 64  # connections
SECONDS = 60.0  # in which a question has to be here whole, however slowly its bytes come
MOST_SKIPPED = 4 * MOST_BYTES  # of one that is too large, read and thrown away so that the answer arrives

STATIC = Path(__file__).parent / "static"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/microscope.css": ("microscope.css", "text/css; charset=utf-8"),
    "/microscope.js": ("microscope.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Microscope(ThreadingHTTPServer):
    """A web server with a desk.

    Args:
        host: Name or address to listen at.
        port: Port; 0 takes a free one.
        desk: What it answers from.
    """

    daemon_threads = False  # Python must not end in the middle of a computation

    def __init__(self, host: str, port: int, desk: Desk) -> None:
        self.host, self.desk = host, desk
        self._open: set[Any] = set()
        self._lock = threading.Lock()
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), Handler)

    @property
    def address(self) -> str:
        """Where a browser on this machine finds the page."""
        host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host and '[' not in host else host}:{self.server_address[1]}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, and remember the connection; who comes when too many are there is turned away."""
        with self._lock:
            full = len(self._open) >= MOST_OPEN
            self._open.add(request)
        if full:
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Hear no more questions, finish the answers that are under way, and close."""
        with self._lock:
            waiting = list(self._open)
        for connection in waiting:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing where a browser went away in the middle of an answer."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Hurried(io.RawIOBase):
    """The incoming half of a connection, on which a question has to be whole in time: a dripping client is cut off."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.begin()

    def readable(self) -> bool:
        """Yes."""
        return True

    def begin(self) -> None:
        """The time for the next question begins now."""
        self._until = time.monotonic() + SECONDS

    def readinto(self, buffer: Any) -> int:
        """Take what has come, or wait for more until the time is over."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the question took too long")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class Handler(BaseHTTPRequestHandler):
    """One connection: checks who asks, finds the answer, and turns every refusal into a sentence."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "affinear", ""
    timeout = SECONDS
    disable_nagle_algorithm = True  # an answer is sent in two pieces, and the second need not wait

    def setup(self) -> None:
        """Hear the connection with a limit of time for each question."""
        super().setup()
        self.rfile.close()
        self._heard = _Hurried(self.connection)
        self.rfile = io.BufferedReader(self._heard)

    def handle_one_request(self) -> None:
        """Hear and answer a question."""
        self._heard.begin()
        super().handle_one_request()

    @property
    def desk(self) -> Desk:
        """What questions are answered from."""
        return cast(Microscope, self.server).desk

    def do_GET(self) -> None:
        """Answer a question, or send one of the page's files."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """Take an image."""
        self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the page says what went wrong."""

    def _answer(self, respond: Callable[[], None]) -> None:
        try:
            check_host(self.headers.get("Host", ""), cast(Microscope, self.server).host)
            respond()
        except Refusal as refusal:
            self._refuse(str(refusal), refusal.status)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            print(f"The microscope could not answer {self.path[:200]!r}: {error!r}", file=sys.stderr)  # noqa: T201
            self._refuse("The microscope could not answer, because of a mistake of its own; its window says more.", 500)

    def _get(self) -> None:
        url = urlsplit(self.path)
        asked = _fields(url.query)
        questions = {"/api/layers": self.desk.layers, "/api/rows": self.desk.rows, "/api/curves": self.desk.curves}
        if url.path in FILES:
            name, kind = FILES[url.path]
            self._send((STATIC / name).read_bytes(), kind)
        elif url.path == "/api/start":
            self._send_json(self.desk.start())
        elif url.path == "/api/image":
            self._send(self.desk.album.find(asked.get("id", "")).shown, "image/jpeg")
        elif url.path in questions:
            self._send_json(questions[url.path](asked))
        else:
            raise Refusal("There is no such page; the microscope is at the address without a path.", 404)

    def _post(self) -> None:
        if urlsplit(self.path).path != "/api/image":
            raise Refusal("There is nothing to send to this address; images go to /api/image.", 404)
        # A page of another site can send forms, but not this type, nor without naming itself.
        if self.headers.get("Content-Type") != "application/octet-stream":
            raise Refusal("Content-Type: expected application/octet-stream; send the bytes of the image.", 415)
        origin = self.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != self.headers.get("Host"):
            raise Refusal("Origin: expected the microscope's own page, got another; open the microscope itself.", 403)
        self._send_json(self.desk.add(self._body()))

    def _body(self) -> bytes:
        text = self.headers.get("Content-Length", "")
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise Refusal("Content-Length: expected the number of bytes of the image; send it in one piece.", 411)
        length = int(text)
        if length > MOST_BYTES:
            self._skip(min(length, MOST_SKIPPED))
            raise Refusal(
                f"The file has {length / 2**20:.1f} MB, expected at most {MOST_BYTES // 2**20}; make it smaller.",
                413,
            )
        content = self.rfile.read(length)
        if len(content) < length:
            raise ConnectionError("the upload ended early")
        return content

    def _skip(self, length: int) -> None:
        while length > 0 and (piece := self.rfile.read(min(length, 2**16))):
            length -= len(piece)

    def _refuse(self, sentence: str, status: int) -> None:
        self.close_connection = True  # what is left of the request has not been read
        with suppress(ConnectionError):
            self._send_json({"error": sentence}, status)

    def _send_json(self, answer: Answer, status: int = 200) -> None:
        content = json.dumps(answer, allow_nan=False, separators=(",", ":")).encode()
        self._send(content, "application/json", status)

    def _send(self, content: bytes, kind: str, status: int = 200) -> None:
        self.connection.settimeout(SECONDS)
        self.send_response(HTTPStatus(status))
        headers = {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}
        if self.close_connection:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def _fields(query: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(query, max_num_fields=MOST_FIELDS))
    except ValueError:
        raise Refusal(f"The question has more than {MOST_FIELDS} fields; ask as the page does.") from None


def check_host(header: str, bound: str) -> None:
    """Raise a Refusal if a browser was led here under a name of somebody else's (DNS rebinding).

    A numeric address cannot be rebound. It is let through if it is this machine's own, or if the server was told to
    listen for others too.
    """
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        name = ""
    if name and name in ("localhost", bound.lower().strip("[]")):
        return
    with suppress(ValueError):
        if ipaddress.ip_address(name).is_loopback or not _loopback(bound):
            return
    raise Refusal("Host: expected localhost or the address that `affinear lens` printed; open that address.", 403)


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_server(host: str = "127.0.0.1", port: int = 0, network: Network | None = None) -> Microscope:
    """A microscope that is ready to serve, `serve_forever()`; its `address` is where the page is.

    Args:
        host: Where to listen; only this machine by default.
        port: Port; 0 takes a free one.
        network: One to look into, such as `affinear.tasks.networks.open_network` opens; None for raw patches alone.

    Raises:
        OSError: If the port is taken.

    Example:
        >>> from affinear.lens.microscope import make_server
        >>> with make_server() as server:
        ...     server.address.startswith("http://127.0.0.1:")
        True
    """
    return Microscope(host, port, make_desk(network))


def serve(
    host: str = "127.0.0.1",
    port: int = 0,
    network: Network | None = None,
    open_browser: bool = True,
) -> None:
    """Show the microscope until Ctrl-C; arguments as for `make_server`.

    Args:
        host: Where to listen; only this machine by default.
        port: Port; 0 takes a free one.
        network: One to look into.
        open_browser: Whether to open the page.
    """
    with make_server(host, port, network) as server:
        print(f"The microscope is at {server.address} (Ctrl-C ends it)", flush=True)  # noqa: T201
        if not _loopback(host):
            print("Everybody who reaches this machine can use it.", flush=True)  # noqa: T201
        if open_browser:
            # In a thread of its own, because a browser in the terminal would keep this one.
            threading.Thread(target=webbrowser.open, args=(server.address,), daemon=True).start()
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    print("The microscope is closed.", flush=True)  # noqa: T201
