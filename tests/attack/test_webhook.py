"""A webhook that leads elsewhere, hangs, drips or answers without an end: it costs its few seconds and no memory."""

import asyncio
from http.server import BaseHTTPRequestHandler

import pytest

from rollouts.jobs import alarm_delivery
from tests.attack import hostile_provider as hostile

GIGABYTE = 1 << 30


def endless_continue(request: BaseHTTPRequestHandler) -> None:
    while True:
        request.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def no_answer(request: BaseHTTPRequestHandler) -> None:
    while True:
        request.wfile.write(b"\0" * 65536)


def wrong_pieces(request: BaseHTTPRequestHandler) -> None:
    request.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffff\r\n")
    while True:
        request.wfile.write(b"a" * 65536)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarm_delivery, "ANSWER_SECONDS", 0.3)


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (hostile.hang, "did not answer within"), (hostile.drip_head, "did not answer within"),
        (endless_continue, "did not answer within"), (hostile.endless_head, "could not be reached"),
        (no_answer, "could not be reached"), (hostile.reset, "could not be reached"),
        (hostile.drip_body, ""), (hostile.endless, ""), (wrong_pieces, ""),
    ],
)  # fmt: skip
def test_an_answer_without_an_end_is_given_up(answer: hostile.Answer, sentence: str) -> None:
    """Where the head says that the alarm was taken, the body is left alone."""
    with hostile.serving(hostile.Provider) as server:
        server.answers["/hook"] = answer
        said = asyncio.run(alarm_delivery._post(f"{server.issuer}/hook", b"{}", {}))
    assert sentence in said and bool(sentence) == bool(said)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_into_the_network_is_not_followed(status: int) -> None:
    """What is asked is the host that the server's operator named, whatever that one answers."""
    with hostile.serving(hostile.Provider) as inside, hostile.serving(hostile.Provider) as server:
        server.answers["/hook"] = hostile.redirect_to(f"{inside.issuer}/inside", status)
        said = asyncio.run(alarm_delivery._post(f"{server.issuer}/hook", b"{}", {}))
        assert f"answered {status}, a redirect" in said and inside.asked == []


def test_a_gigabyte_is_not_read() -> None:
    n_sent = 0

    def gigabyte(request: BaseHTTPRequestHandler) -> None:
        nonlocal n_sent
        request.send_response(200)
        request.send_header("Content-Length", str(GIGABYTE))
        request.end_headers()
        while n_sent < GIGABYTE:
            n_sent += request.wfile.write(b"x" * (1 << 20))

    with hostile.serving(hostile.Provider) as server:
        server.answers["/hook"] = gigabyte
        assert asyncio.run(alarm_delivery._post(f"{server.issuer}/hook", b"{}", {})) == ""
    assert n_sent < 64 << 20
