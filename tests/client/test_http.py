"""Answers are read exactly, whatever pieces they come in."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.client.http import HEAD_BYTES_MAX, AnswerInvalid, AnswerParser, Reply, request_head

PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"4;note=x\r\nhell\r\n1\r\no\r\n0\r\nlast: field\r\n\r\n"
)
EMPTY = b"HTTP/1.1 204 No Content\r\nserver: x\r\n\r\n"
PATIENT = b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN


def parse(pieces: list[bytes], bytes_max: int = 1000) -> tuple[Reply | None, AnswerParser]:
    parser = AnswerParser(bytes_max)
    reply = None
    for piece in pieces:
        assert reply is None
        reply = parser.feed(piece)
    return reply, parser


@pytest.mark.parametrize("answer", [PLAIN, CHUNKED, PATIENT])
@given(cuts=st.lists(st.integers(0, 150)))
def test_an_answer_is_the_same_in_any_pieces(answer: bytes, cuts: list[int]) -> None:
    ends = sorted({min(cut, len(answer)) for cut in cuts} | {0, len(answer)})
    pieces = [answer[start:end] for start, end in pairwise(ends)]
    reply, parser = parse(pieces)
    assert reply is not None
    assert (reply.status, reply.body) == (200, b"hello")
    assert not parser.is_last
    assert not parser.has_more


def test_an_answer_without_content_has_no_body() -> None:
    reply, _ = parse([EMPTY])
    assert reply == Reply(204, {b"server": b"x"}, b"")


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    reply, parser = parse([b"HTTP/1.1 200 OK\r\n\r\nhel", b"lo"])
    assert reply is None
    assert parser.finish() == Reply(200, {}, b"hello")
    assert parser.is_last


def test_an_answer_that_is_cut_off_is_none() -> None:
    _, parser = parse([PLAIN[:-1]])
    assert parser.finish() is None
    _, parser = parse([CHUNKED[:-5]])
    assert parser.finish() is None


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\nConnection: Close\r\n", b"HTTP/1.0 200 OK\r\n"]
)
def test_the_last_answer_of_a_connection_says_so(head: bytes) -> None:
    _, parser = parse([head + b"content-length: 0\r\n\r\n"])
    assert parser.is_last


def test_bytes_that_nobody_asked_for_are_noticed() -> None:
    reply, parser = parse([PLAIN + b"HTTP"])
    assert reply is not None
    assert parser.has_more


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1001\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3e9\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"0" * 2000,
        b"HTTP/1.1 200 OK\r\n" + b"x" * HEAD_BYTES_MAX,
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1001,
    ],
)
def test_what_is_no_answer_or_too_large_is_refused(answer: bytes) -> None:
    with pytest.raises(AnswerInvalid):
        parse([answer])


def test_a_body_of_the_largest_size_is_read() -> None:
    reply, _ = parse([b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" + b"x" * 1000])
    assert reply is not None
    assert len(reply.body) == 1000


def test_a_path_cannot_smuggle_a_second_request() -> None:
    with pytest.raises(AssertionError):
        request_head("GET", "/x HTTP/1.1\r\n\r\nGET /y", b"", 0, None)
