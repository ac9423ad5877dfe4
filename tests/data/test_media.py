"""Images from wherever they lie."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from PIL import Image

from slime.data.media import load_image


@pytest.fixture
def picture_url() -> Iterator[tuple[str, list[str]]]:
    """A URL of a red picture, and the paths that were asked for."""
    asked: list[str] = []
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(buffer, "PNG")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(buffer.getvalue())

        def log_message(self, format: str, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/red.png", asked
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_image_url_is_fetched_once(picture_url: tuple[str, list[str]]) -> None:
    """All samples of a group and every request of each send the image, and the fetch holds up the
    event loop.
    """
    url, asked = picture_url
    pictures = [load_image(url) for _ in range(3)]
    assert {picture.size for picture in pictures} == {(3, 2)} and asked == ["/red.png"]
