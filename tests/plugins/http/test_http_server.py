"""Fields of bodies, and errors as answers."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from slime.plugins.http.server import (
    MISTAKES,
    BadRequest,
    Check,
    Refused,
    body_of,
    errors_as_json,
    json_answer,
    json_object,
    list_of,
    need,
    number,
    one_of,
    one_or_list,
    string,
    take,
    truth,
    whole,
)

COUNT = whole(0, 10)
HALF = number(-10, 0.5, above=True)
NAMES = list_of(string(3), most=2, least=1)
READ: list[tuple[Check[Any], Any, Any]] = [
    (COUNT, 10, 10),
    (COUNT, 3.0, 3),
    (HALF, -7, -7.0),
    (truth, False, False),
    (NAMES, ["a", "b"], ["a", "b"]),
    (one_or_list(COUNT), 3, [3]),
    (one_or_list(COUNT), [], []),
    (one_of("a", "b"), "b", "b"),
    (json_object, {}, {}),
]
REFUSED: list[tuple[Check[Any], Any, str]] = [
    (COUNT, 11, "^x must be a whole number from 0 to 10, got 11$"),
    (COUNT, True, "^x must"),
    (COUNT, 0.5, "^x must"),
    (HALF, 0.6, "^x must be a number above -10 to 0.5, got 0.6$"),
    (HALF, -10, "^x must"),
    (HALF, -(10**400), "^x must"),
    (HALF, float("nan"), "^x must"),
    (HALF, False, "^x must"),
    (truth, 1, "^x must be true or false"),
    (NAMES, [], "^x must be a list of 1 to 2"),
    (NAMES, ["a", "b", "c"], "^x must be a list"),
    (NAMES, ["a", "long"], r"^x\[1\] must be a string of at most 3 characters, got 'long'$"),
    (one_or_list(COUNT), "y", "^x must"),
    (one_of("a", "b"), ["a"], "^x must be one of a, b"),
    (json_object, "y" * 1000, f"^x must be an object, got '{'y' * 79}$"),
]


@pytest.mark.parametrize(("check", "value", "read"), READ)
def test_values_that_are_read(check: Check[Any], value: Any, read: Any) -> None:
    found = need({"x": value}, "x", check)
    assert found == read and type(found) is type(read)


@pytest.mark.parametrize(("check", "value", "says"), REFUSED)
def test_values_that_are_refused(check: Check[Any], value: Any, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        take({"x": value}, "x", check, None)


def test_fields_that_are_not_there() -> None:
    assert take({"x": None}, "x", COUNT, 5) == take({}, "x", COUNT, 5) == 5
    with pytest.raises(BadRequest, match=r"'buffer\.x' is missing"):
        need({"x": None}, "x", COUNT, "buffer.")


async def test_errors_are_answers() -> None:
    async def read(request: web.Request) -> web.Response:
        body = await body_of(request)
        if "status" in body:
            error = Refused("come back", body["status"])
            error.headers = {"Retry-After": "3"}
            raise error
        return json_answer(body["count"] + 1)

    app = web.Application(
        middlewares=[errors_as_json(lambda message: {"told": message}, MISTAKES)],
        client_max_size=1000,
    )
    app.router.add_post("/", read)
    async with TestClient(TestServer(app)) as client:

        async def ask(data: bytes, path: str = "/") -> tuple[int, Any]:
            async with client.post(path, data=data) as answer:
                assert answer.headers.get("Retry-After") == ("3" if answer.status == 429 else None)
                return answer.status, await answer.json()

        assert await ask(b'{"count": 1}') == (200, 2)
        assert await ask(b'{"status": 429}') == (429, {"told": "come back"})
        for wrong in (b"[1]", b"{", b'{"count": "a"}', b"", b'{"x": "\\ud800"}'):
            status, answer = await ask(wrong)
            assert status == 400 and answer["told"], wrong
        assert (await ask(b" " * 2000))[0] == 413
        assert await ask(b"", "/other") == (404, {"told": "POST /other: Not Found"})


async def test_a_fault_of_the_server_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(request: web.Request) -> web.Response:
        raise ZeroDivisionError("a mistake")

    app = web.Application(middlewares=[errors_as_json()])
    app.router.add_get("/", fail)
    async with TestClient(TestServer(app)) as client, client.get("/") as answer:
        body = await answer.json()
    assert answer.status == 500 and body["error"]["message"] == "ZeroDivisionError: a mistake"
    assert "GET / failed" in caplog.text
