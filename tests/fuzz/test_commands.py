"""Command lines and web requests of anybody: an answer, or a sentence; never a traceback."""

from __future__ import annotations

import random
import socket
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
from fuzzing import Tally, for_a_while, hostile
from typer.testing import CliRunner

from affinear import cli
from affinear.lens.microscope import pictures
from affinear.lens.microscope.desk import Desk
from affinear.lens.microscope.pictures import Album
from affinear.lens.microscope.server import Microscope
from affinear.models.making import takes
from affinear.tasks.classify import ClassifySettings
from affinear.train import Recipe

MODEL = "affinear_trunk_micro"
WORDS = (
    "",
    "x",
    "-1",
    "0",
    "1",
    "99999999999999999999",
    "1e400",
    "nan",
    "inf",
    "none",
    "true",
    "1,2",
    "1,,",
    "=",
    "😀",
)


def word(draw: random.Random) -> str:
    text = draw.choice(WORDS) if draw.random() < 0.7 else str(hostile(draw))
    return text.replace("\x00", "0").encode("utf-8", "replace").decode()


def command(draw: random.Random, folder: Path) -> list[str]:
    def setting() -> str:
        return f"{draw.choice([*Recipe.names(), *ClassifySettings.names(), 'epoch', ''])}={word(draw)}"

    def argument() -> str:
        return f"{draw.choice([*takes(MODEL), 'pretrained', 'checkpoint_path', 'x'])}={word(draw)}"

    there = draw.choice((folder / "nothing", folder / "bad.safetensors", folder))
    commands: tuple[list[str], ...] = (
        ["train", MODEL, "--data", "digits", "--dry-run", "--set", setting(), "--output", str(folder / "run")],
        ["train", MODEL, "--data", "digits", "--dry-run", "--model-arg", argument()],
        ["train", word(draw), "--data", word(draw) or "x", "--dry-run"],
        ["compare", "--seeds", draw.choice(("0", "-1", "99999999999999999999", "a", "1,b", "1," + "9" * 5000, ","))],
        ["compare", "--model-arg", f"num_heads={draw.choice(('0', '-1', 'x', '7', '1e9'))}", "--output", "/dev/null/x"],
        ["compare", "--set", f"epochs={draw.choice(('x', '-1', '0', 'nan', '1.5'))}"],
        ["compare", "--mechanisms", word(draw).replace("none", "x") or ",", "--model-arg", "num_heads=0"],
        ["eval", str(there), "--data", "digits"],
        ["predict", str(there), "--weights", str(there)],
        ["convert", str(there), "--model", word(draw), "--output", str(folder / "out.safetensors")],
        ["models", word(draw) or "x"],
        ["lens", "report", "--model", word(draw), "--data", str(there)],
    )
    return draw.choice(commands)


@pytest.mark.filterwarnings("ignore")
def test_hostile_command_lines(tally: Tally, draw: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.safetensors").write_bytes(b"no weights")
    CliRunner().invoke(cli.app, ["compare", "--seeds", "0"])  # all that is imported on the way
    for _ in for_a_while():
        line = command(draw, tmp_path)
        tally.tries += 1
        done = CliRunner().invoke(cli.app, line)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            told = "".join(traceback.format_exception(done.exception))[-1500:]
            tally.failures.append(f"affinear {' '.join(line)}: {told}")
        elif done.exit_code and not done.output.strip():
            tally.failures.append(f"affinear {' '.join(line)}: nothing was said")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["bad.safetensors"]
    tally.check()


def request(draw: random.Random) -> bytes:
    path = draw.choice(
        ("/", "/api/start", "/api/rows", "/api/image", "/api/layers", "/api/curves", "/../etc/passwd", "")
    )
    names = ("image", "patch", "factor", "layer", "head", "window", "source", "id")
    query = "&".join(f"{draw.choice(names)}={word(draw)}" for _ in range(draw.choice((0, 1, 3, 30, 300))))
    method = draw.choice(("GET", "GET", "GET", "POST", "PUT", "get", ""))
    host = draw.choice(("127.0.0.1", "127.0.0.1", "localhost", "evil.example", "", "[::"))
    headers = [f"Host: {host}", "Connection: close"]
    if method == "POST":
        headers += ["Content-Type: application/octet-stream", f"Content-Length: {draw.choice((0, 3, -1, 10**30, 'x'))}"]
    if draw.random() < 0.1:
        headers += [f"X-{number}: {word(draw)}" for number in range(200)]
    text = f"{method} {path}?{query} HTTP/1.1\r\n" + "\r\n".join(headers) + "\r\n\r\nabc"
    content = text.encode("utf-8", "replace")
    return content if draw.random() < 0.8 else draw.randbytes(draw.choice((1, 50, 70_000)))


def test_hostile_web_requests(tally: Tally, draw: random.Random, capsys: pytest.CaptureFixture[str]):
    with Microscope("127.0.0.1", 0, Desk(Album(pictures.samples()))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            address: Any = server.server_address[:2]
            for _ in for_a_while(5):
                tally.tries += 1
                content = request(draw)
                answer = ask(address, content)
                if b" 500 " in answer[:40]:
                    tally.failures.append(f"{content[:200]!r} gave {answer[:300]!r}")
            assert b" 200 " in ask(address, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")[:40]
        finally:
            server.shutdown()
            thread.join()
    assert "Traceback" not in capsys.readouterr().err
    tally.check()


def ask(address: Any, content: bytes) -> bytes:
    with socket.create_connection(address, timeout=10) as client:
        try:
            client.sendall(content)
            client.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := client.recv(65536):
                answer += piece
        except OSError:  # which it may end, as who asks in this way is not heard to the end
            answer = b""
    return answer
