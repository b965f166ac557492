"""The microscope's server: the library's numbers, sentences for whatever is wrong, and nothing for strangers."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlencode, urlsplit

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import affinear
from affinear import lens
from affinear.layers import INLINE, MALA, NALA, Attention, AxialRotary
from affinear.lens.microscope import answers, make_server, networks, patches, pictures, serve
from affinear.lens.microscope import server as server_module
from affinear.lens.microscope.answers import Spot
from affinear.lens.microscope.desk import Desk, Network
from affinear.lens.microscope.pictures import Album, Picture
from affinear.lens.microscope.refusal import Refusal
from affinear.lens.microscope.server import FILES, MOST_BYTES, Microscope, check_host
from affinear.lens.microscope.tokens import Layer

KIND = "application/octet-stream"


class Pair(torch.nn.Module):
    """Two attention layers, as a network has them: one whose positions turn, one with a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 32, 32, 32)
        self.rotary = AxialRotary(16)
        self.first = Attention(32, 2, MALA)
        self.second = Attention(32, 2, INLINE, prefix_tokens=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.stem(x).permute(0, 2, 3, 1)
        tokens = self.first(tokens.flatten(1, 2), (7, 7), rotary=self.rotary(tokens))
        return self.second(torch.nn.functional.pad(tokens, (0, 0, 1, 0)), grid=(7, 7))


@contextmanager
def running(server: Microscope) -> Generator[Microscope, None, None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    with server:
        yield server
        server.shutdown()
    thread.join()


@pytest.fixture(scope="module")
def server() -> Iterator[Microscope]:
    torch.manual_seed(0)
    network = Network("pair", Pair().eval())
    with running(Microscope("127.0.0.1", 0, Desk(Album(pictures.samples()), network))) as found:
        yield found


def ask(server: Microscope, path: str, method: str = "GET", body: bytes | None = None, **headers: str):
    """Status, headers and content of an answer; header names are written with underscores."""
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=20)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, names)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, answer.headers, content


def get(server: Microscope, what: str, **asked: Any) -> dict[str, Any]:
    status, _, content = ask(server, f"/api/{what}?{urlencode({'image': 'flower', **asked})}")
    answer = json.loads(content)
    assert status == 200, answer
    return answer


def upload(server: Microscope, content: bytes) -> tuple[int, dict[str, Any]]:
    status, _, answer = ask(server, "/api/image", "POST", content, Content_Type=KIND)
    return status, json.loads(answer)


def file(image: Image.Image, kind: str = "PNG", **given: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **given)
    return content.getvalue()


def noise(*shape: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))


# ---- numbers


@pytest.mark.parametrize("factor", [1 / 16, 1.0, 5.3, 16.0])
def test_rows_of_raw_patches_are_the_librarys(server: Microscope, factor: float):
    answer = get(server, "rows", patch=75, factor=factor)
    tokens = patches.layer(pictures.samples()["flower"]).key
    assert answer["uniform"] == pytest.approx(1 / 196)
    for name, found in answer["mechanisms"].items():
        row = affinear.weights(tokens * factor, tokens, name)[0, 0, 75]
        numbers = lens.measure(row)
        torch.testing.assert_close(torch.tensor(found["row"], dtype=torch.float64), row, atol=1e-6, rtol=1e-6)
        assert found["entropy"] == pytest.approx(numbers.entropy.item(), abs=1e-6)
        assert found["largest"] == pytest.approx(numbers.largest_weight.item(), abs=1e-6)
        assert found["negative"] == pytest.approx(numbers.negative_mass.item(), abs=1e-6)
        moved = 0.5 * (row - affinear.weights(tokens, tokens, name)[0, 0, 75]).abs().sum()
        assert found["moved"] == pytest.approx(moved.item(), abs=1e-6)
        assert found["sum"] == pytest.approx(1, abs=1e-9)


def test_curves_are_the_librarys_and_the_rows_lie_on_them(server: Microscope):
    answer = get(server, "curves", patch=75)
    tokens = patches.layer(pictures.samples()["flower"]).key
    factors, step = answer["factors"], 20
    rows = get(server, "rows", patch=75, factor=factors[step])["mechanisms"]
    assert (factors[0], factors[-1], len(factors)) == (1 / 16, 16, 33)
    for name, curve in answer["mechanisms"].items():
        expected = lens.loudness(tokens[:, 75:76], tokens, factors, name).numbers.entropy.flatten()
        torch.testing.assert_close(torch.tensor(curve["entropy"], dtype=torch.float64), expected, atol=1e-6, rtol=0)
        ratio = lens.score_ratio(lens.Scene(tokens, tokens, name), 75, tuple(curve["keys"]), factors)
        torch.testing.assert_close(torch.tensor(curve["ratio"], dtype=torch.float64), ratio.ratio[:, 0, 0])
        assert curve["pole"] == (None if ratio.pole.isinf() else pytest.approx(ratio.pole.item()))
        assert rows[name]["entropy"] == pytest.approx(curve["entropy"][step], abs=1e-9)
        assert rows[name]["ratio"] == pytest.approx(curve["ratio"][step], rel=1e-9)
    assert answer["mechanisms"]["mala"]["pole"] is not None


def test_keys_of_the_ratio_are_the_strongest_and_the_median(server: Microscope):
    for name, curve in get(server, "curves", patch=75)["mechanisms"].items():
        row = torch.tensor(get(server, "rows", patch=75)["mechanisms"][name]["row"])
        strongest, median = curve["keys"]
        assert row[strongest] == row.max()
        assert (row > row[median]).sum() <= 98 <= (row >= row[median]).sum()


@pytest.mark.parametrize(("layer", "head", "patch"), [(0, 1, 30), (1, 0, 0), (1, 1, 48)])
def test_rows_of_a_network_are_those_of_its_queries_and_keys(server: Microscope, layer: int, head: int, patch: int):
    asked = {"source": "network", "layer": layer, "head": head, "patch": patch}
    model = server.desk.network
    assert model is not None
    tokens = networks.layers(model.model, pictures.samples()["flower"])[layer]
    factors = get(server, "curves", **asked)["factors"]
    for factor in (1.0, factors[25]):
        for name, found in get(server, "rows", factor=factor, **asked)["mechanisms"].items():
            row = affinear.weights(tokens.query * factor, tokens.key, name, rotary=tokens.rotary)
            row = row[0, head, tokens.prefix_tokens + patch]
            torch.testing.assert_close(torch.tensor(found["row"], dtype=torch.float64), row, atol=1e-6, rtol=1e-6)
            curve = get(server, "curves", **asked)["mechanisms"][name]
            assert curve["entropy"][factors.index(factor)] == pytest.approx(found["entropy"], abs=1e-9)
            assert curve["ratio"][factors.index(factor)] == pytest.approx(found["ratio"], rel=1e-6)


def test_a_networks_layers_are_listed(server: Microscope):
    first, second = get(server, "layers", source="network")["layers"]
    assert (first["name"], first["grid"], first["heads"], first["rotary"]) == ("first", [7, 7], 2, True)
    assert (second["mechanism"], second["prefix"], second["windows"]) == ("inline", 1, 1)


def test_tokens_are_what_the_layers_attend_with():
    model = Pair().double()
    image = torch.rand(3, 224, 224, dtype=torch.float64)
    seen: list[torch.Tensor] = []
    model.first.qkv.register_forward_hook(lambda _, __, out: seen.append(torch.as_tensor(out)))
    first, second = networks.tokens_of(model, image)
    torch.testing.assert_close(first.query, seen[-1].unflatten(-1, (4, 2, 16))[:, :, 0])
    torch.testing.assert_close(first.key, seen[-1].unflatten(-1, (4, 2, 16))[:, :, 1])
    assert first.rotary is not None
    assert second.rotary is None
    assert not any(module._forward_pre_hooks for module in model.modules())
    with pytest.raises(ValueError, match="expected one"):
        networks.tokens_of(model, torch.rand(2, 3, 224, 224))


def test_masked_keys_get_nothing():
    query, key = torch.randn(2, 3, 12, 2, 8, dtype=torch.float64).unbind()
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[1, 8:] = False
    spot = Spot(Layer("windows", query, key, (3, 4), key_mask=mask), patch=2, head=1, window=1)
    answer = answers.rows(spot, 2.0)
    assert answer["uniform"] == 1 / 8
    for name, found in answer["mechanisms"].items():
        expected = affinear.weights(query * 2, key, name, key_mask=mask)[1, 1, 2]
        torch.testing.assert_close(torch.tensor(found["row"], dtype=torch.float64), expected)
    curves = answers.curves(spot)
    assert curves["scaled"] == "query"
    assert max(curves["mechanisms"]["mala"]["keys"]) < 8


def test_nala_layers_with_turning_positions_agree_with_the_library():
    rotary = AxialRotary(16)(torch.zeros(1, 5, 4, 16, dtype=torch.float64))
    query, key = torch.randn(2, 1, 20, 2, 16, dtype=torch.float64).unbind()
    layer = Layer("turning", query, key, (5, 4), rotary=(rotary[0].double(), rotary[1].double()))
    for name in answers.MECHANISMS:
        expected = affinear.weights(3 * query, key, name, rotary=layer.rotary)[0, 1, 7]
        torch.testing.assert_close(answers.weights(Spot(layer, 7, 1), name, (1.0, 3.0))[1], expected)
    assert NALA.rotary


# ---- descriptors


def test_descriptors_are_centred_and_a_few_units_long():
    tokens = patches.layer(pictures.samples()["pagoda"]).query.reshape(196, 16)
    assert tokens.mean(0).abs().max() < 1e-9
    assert tokens.square().sum(-1).mean().sqrt() == pytest.approx(3)


def test_equal_patches_get_equal_descriptors_and_a_blank_image_zeros():
    half = torch.zeros(3, 224, 224, dtype=torch.float64)
    half[:, :, 112:] = torch.rand(3, 16, 16, dtype=torch.float64).repeat(1, 14, 7)
    tokens = patches.describe(half).reshape(14, 14, 16)
    torch.testing.assert_close(tokens[3, 9], tokens[10, 12])
    assert (tokens[3, 9] - tokens[3, 3]).norm() > 1
    assert not patches.describe(torch.full((3, 224, 224), 0.3, dtype=torch.float64)).any()


# ---- images


KINDS = {
    "grey": file(noise(40, 60)),
    "grey and transparent": file(noise(40, 60).convert("LA")),
    "transparent": file(noise(40, 60, 4)),
    "palette": file(noise(40, 60, 3).convert("P")),
    "bits": file(noise(40, 60).convert("1")),
    "cmyk": file(noise(40, 60, 3).convert("CMYK"), "JPEG"),
    "sixteen bits": file(Image.fromarray(np.arange(2400, dtype=np.uint16).reshape(40, 60))),
    "tall": file(noise(5000, 2, 3)),
    "wide": file(noise(2, 5000, 3), "JPEG"),
    "dot": file(noise(1, 1, 3)),
    "webp": file(noise(40, 60, 3), "WEBP"),
    "gif": file(noise(40, 60, 3), "GIF"),
    "blank": file(Image.new("RGB", (300, 200), "red")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_image_can_be_looked_at(server: Microscope, kind: str):
    status, answer = upload(server, KINDS[kind])
    assert status == 200, answer
    rows = get(server, "rows", image=answer["id"], patch=0, factor=16)["mechanisms"]
    assert all(row["sum"] == pytest.approx(1, abs=1e-9) for row in rows.values())
    assert Image.open(io.BytesIO(ask(server, f"/api/image?id={answer['id']}")[2])).size == (448, 448)


def test_transparent_parts_become_white():
    picture = pictures.read(file(Image.new("RGBA", (50, 50), (0, 0, 0, 0))))
    assert picture.pixels.eq(255).all()


@pytest.mark.parametrize(
    "content", [b"", b"no image", file(noise(200, 200, 3), "JPEG")[:3000], b"\x89PNG\r\n\x1a\n" + bytes(99)]
)
def test_what_cannot_be_read_gets_a_sentence_and_the_program_goes_on(server: Microscope, content: bytes):
    status, answer = upload(server, content)
    assert status == 400
    assert "could not be read as an image" in answer["error"]
    assert get(server, "rows", patch=0)


def test_too_many_pixels_get_a_sentence(server: Microscope):
    for side in (9000, 60000):
        header = f"P6 {side} {side} 255\n".encode()
        status, answer = upload(server, header + bytes(100))
        assert status == 413
        assert "pixels" in answer["error"]


def test_turned_photographs_stand_upright():
    image = Image.new("RGB", (40, 20), "black")
    image.paste("white", (0, 0, 20, 20))  # the left half, which the camera held as the lower one
    exif = Image.Exif()
    exif[pictures.ORIENTATION] = 8
    found = pictures.read(file(image, "PNG", exif=exif)).pixels.double().mean((1, 2))
    assert found[:200].max() < 5
    assert found[-200:].min() > 250


def test_images_are_decoded_one_at_a_time_and_in_little_memory():
    # Noisy in no pixel, so that the file is small: what an attacker would send.
    content = file(Image.new("RGBA", (8000, 4000)), optimize=False)
    assert len(content) < 400_000
    code = """
        import resource, sys, threading
        from pathlib import Path
        from affinear.lens.microscope import pictures
        content = Path(sys.argv[1]).read_bytes()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        threads = [threading.Thread(target=pictures.read, args=(content,)) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "image.png")
        path.write_bytes(content)
        command = [sys.executable, "-c", textwrap.dedent(code), str(path)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        kilobytes = int(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)
    assert kilobytes < 700_000  # one of them has 128 MB


def test_uploads_over_the_limit_get_a_sentence(server: Microscope):
    status, answer = upload(server, bytes(MOST_BYTES + 1))
    assert status == 413
    assert "16.0 MB, expected at most 16" in answer["error"]


def test_only_the_last_eight_uploads_are_kept():
    album = Album({})
    found = [Picture(str(number), torch.zeros(1), b"", 1, 1) for number in range(9)]
    for picture in found:
        album.add(picture)
    assert album.find("1") is found[1]
    with pytest.raises(Refusal, match="last 8 uploads"):
        album.find("0")


# ---- whatever is wrong


@pytest.mark.parametrize(
    ("what", "asked", "words"),
    [
        ("rows", {"patch": 196}, "patch: expected a number from 0 to 195"),
        ("rows", {"patch": -1}, "patch: expected a whole number"),
        ("rows", {"patch": "²"}, "patch: expected a whole number"),
        ("rows", {}, "patch: expected a whole number from 0, got 'nothing'"),
        ("rows", {"patch": 0, "layer": 3}, "layer: expected a number from 0 to 0"),
        ("rows", {"patch": 0, "head": 1}, "head: expected a number from 0 to 0"),
        ("rows", {"patch": 0, "window": 1}, "window: expected a number from 0 to 0"),
        ("rows", {"patch": 0, "factor": 17}, "factor: expected a number from 1/16 to 16, got 17"),
        ("rows", {"patch": 0, "factor": "nan"}, "factor: expected a number, got 'nan'"),
        ("rows", {"patch": 0, "factor": "loud"}, "factor: expected a number, got 'loud'"),
        ("rows", {"patch": 0, "image": "../flower"}, "image: expected one of"),
        ("curves", {"patch": 0, "source": "elsewhere"}, "source: expected raw or network, got 'elsewhere'"),
        ("layers", {"image": "gone"}, "choose the image again"),
    ],
)
def test_a_wrong_question_gets_a_sentence(server: Microscope, what: str, asked: dict[str, Any], words: str):
    status, _, content = ask(server, f"/api/{what}?{urlencode({'image': 'flower', **asked})}")
    assert status in (400, 404)
    assert words in json.loads(content)["error"]


def test_a_question_of_many_fields_is_refused(server: Microscope):
    status, _, content = ask(server, "/api/rows?" + "&".join(f"a{number}=1" for number in range(100)))
    assert status == 400
    assert "more than 20 fields" in json.loads(content)["error"]


def test_a_client_that_drips_its_question_is_cut_off(server: Microscope, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_module, "SECONDS", 0.5)
    for path in ("GET /", "POST /api/image HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n"):
        with socket.create_connection(server.server_address[:2], timeout=20) as client:  # pyright: ignore[reportArgumentType]
            client.sendall(path.encode())
            began = time.monotonic()
            with contextlib.suppress(ConnectionError):
                while time.monotonic() - began < 15:
                    client.sendall(b"a")
                    client.settimeout(0.1)
                    with contextlib.suppress(TimeoutError):
                        if not client.recv(1):
                            break
            assert time.monotonic() - began < 15
    assert get(server, "rows", patch=0)


def test_who_comes_when_too_many_are_there_is_turned_away(server: Microscope, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_module, "MOST_OPEN", 2)
    address: Any = server.server_address[:2]
    with contextlib.ExitStack() as held:
        clients = [held.enter_context(socket.create_connection(address, timeout=20)) for _ in range(3)]
        assert clients[2].recv(1) == b""


def test_an_empty_host_has_an_address_that_exists():
    with Microscope("", 0, Desk(Album({}))) as server:
        assert server.address.startswith("http://127.0.0.1:")


def test_layers_that_are_too_fine_are_not_drawn():
    tokens = torch.zeros(1, 57, 1, 4, dtype=torch.float64)
    assert not Layer("fine", tokens, tokens, (1, 57)).drawable


def test_a_model_is_needed_for_a_network():
    with running(make_server()) as server:
        status, _, content = ask(server, "/api/layers?image=flower&source=network")
    assert status == 400
    assert "start `affinear lens` with --model" in json.loads(content)["error"]


def test_a_mistake_of_its_own_is_told_and_survived(server: Microscope, monkeypatch, capsys):
    monkeypatch.setattr(Desk, "rows", lambda *_: 1 / 0)
    status, _, content = ask(server, "/api/rows?image=flower&patch=0")
    assert status == 500
    assert "mistake of its own" in json.loads(content)["error"]
    assert "ZeroDivisionError" in capsys.readouterr().err
    monkeypatch.undo()
    assert get(server, "rows", patch=0)


def test_it_serves_until_ctrl_c(monkeypatch, capsys):
    opened: SimpleQueue[str] = SimpleQueue()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(server_module.webbrowser, "open", opened.put)
    monkeypatch.setattr(Microscope, "serve_forever", interrupted)
    serve()
    serve("0.0.0.0", open_browser=False)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("The microscope is at http://127.0.0.1:")
    assert said[1] == "The microscope is closed."
    assert said[3] == "Everybody who reaches this machine can use it."
    assert opened.get(timeout=10) in said[0]
    assert opened.empty()


# ---- strangers


@pytest.mark.parametrize(
    "path",
    [
        "/../server.py",
        "/static/index.html",
        "/%2e%2e/server.py",
        "/..%2f..%2fserver.py",
        "//etc/passwd",
        "/microscope.js/../../server.py",
        "/samples/NOTICE.md",
        "/index.html%00",
        "/api/image?id=../samples/NOTICE.md",
        "/api/none",
    ],
)
def test_nothing_but_the_pages_own_files_is_served(server: Microscope, path: str):
    status, _, content = ask(server, path)
    assert status == 404
    assert set(json.loads(content)) == {"error"}


@pytest.mark.parametrize("path", FILES)
def test_the_pages_files_are_served_with_a_strict_policy(server: Microscope, path: str):
    status, headers, content = ask(server, path)
    assert status == 200
    assert content
    assert headers["Content-Security-Policy"].startswith("default-src 'self'")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert not any(name.lower().startswith("access-control") for name in headers)
    assert b"://" not in content.replace(b"http://www.w3.org/2000/svg", b"")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "192.168.0.9", "[", ""])
def test_a_strangers_host_name_is_refused(server: Microscope, host: str):
    status, _, content = ask(server, "/api/start", Host=host)
    assert status == 403
    assert "Host: expected localhost" in json.loads(content)["error"]


def test_host_names_of_this_machine_are_heard():
    for header in ("127.0.0.1:8000", "localhost:1", "LOCALHOST", "[::1]:80"):
        check_host(header, "127.0.0.1")
    check_host("192.168.0.9:8000", "0.0.0.0")
    check_host("Lab.local:8000", "lab.local")
    with pytest.raises(Refusal):
        check_host("evil.example", "0.0.0.0")


def test_other_sites_cannot_send_images(server: Microscope):
    content = file(noise(9, 9, 3))
    assert ask(server, "/api/image", "POST", content, Content_Type="text/plain")[0] == 415
    assert ask(server, "/api/image", "POST", content, Origin="http://evil.example", Content_Type=KIND)[0] == 403
    assert ask(server, "/api/rows", "POST", b"")[0] == 404
    assert ask(server, "/", "PUT", b"")[0] == 501


def test_an_upload_without_a_length_is_refused(server: Microscope):
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=20)
    connection.putrequest("POST", "/api/image")
    connection.putheader("Content-Type", KIND)
    connection.endheaders()
    assert connection.getresponse().status == 411
    connection.close()


def test_samples_are_small_and_have_a_notice(server: Microscope):
    folder = pictures.Path(pictures.__file__).parent / "samples"
    images = sorted(folder.glob("*.jpg"))
    notice = (folder / "NOTICE.md").read_text()
    assert sum(image.stat().st_size for image in images) < 300_000
    assert all(f"`{image.name}`" in notice for image in images)
    assert [sample["name"] for sample in json.loads(ask(server, "/api/start")[2])["samples"]] == [
        sample.name for sample in pictures.SAMPLES
    ]


def test_the_page_has_the_palette_of_the_figures(server: Microscope):
    figures = pytest.importorskip("affinear.lens.figures")
    script = ask(server, "/microscope.js")[2].decode()
    shown = json.loads(script.partition("const SIGNED = ")[2].partition(";")[0])
    expected = 255 * figures.SIGNED(np.linspace(0, 1, 5))[:, :3]
    np.testing.assert_allclose(shown, expected, atol=2)


def test_layers_that_another_mechanism_could_not_take_are_left_out():
    ravlt, mila = (timm.create_model(f"{family}_tiny", depths=(1, 1, 1, 1)).eval() for family in ("ravlt", "mila"))
    image = torch.randn(3, 64, 64)
    # The first two stages of RAVLT weigh their keys; all of MILA's heads turn differently.
    assert [layer.mechanism for layer in networks.tokens_of(ravlt, image)] == ["softmax", "softmax"]
    assert networks.tokens_of(mila, image) == []
