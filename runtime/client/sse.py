"""A small HTTP/1.1 client for streamed answers: one connection per exchange, standard library."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

MAX_ERROR_BYTES = 2000  # of the answer of a refusal
MAX_HEAD_BYTES = 64 * 1024  # of the lines before the body
LONG_HEAD = f"its head has more than {MAX_HEAD_BYTES} bytes"
PIECE_BYTES = 64 * 1024  # read at once, at most
STATUS = re.compile(r"HTTP/1\.\d ([1-9]\d\d)\b")
LINE_END = re.compile(rb"\r\n|\n|\r")
CHUNK_SIZE = re.compile(rb"\s*([0-9a-fA-F]{1,16})\s*(;.*)?")


class Refused(Exception):
    """An answer other than 200: its status, and the beginning of its text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status


class Broken(Exception):
    """An answer that is no HTTP, breaks off, or exceeds the limits."""


@dataclass(frozen=True)
class StreamLimits:
    """Limits of one answer: bytes of a line, bytes of the body, levels of nested JSON."""

    line_bytes: int = 2**20
    answer_bytes: int = 2**26
    depth: int = 64

    def __post_init__(self) -> None:
        for name in ("line_bytes", "answer_bytes", "depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"limits.{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True)
class Address:
    """The address of a server, from its URL: https://host:port/prefix."""

    host: str
    port: int
    prefix: str
    is_secure: bool

    @classmethod
    def of(cls, url: str) -> Address:
        """ValueError where the URL is not http(s)://host[:port][/prefix]."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{url} is no URL ({error})") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url} is no URL; write http://host:port")
        is_secure = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_secure else 80), prefix, is_secure)


@dataclass
class HttpExchange:
    """One connection: open it, ask once, read the answer line by line, close it.

    `status` and `content_type` are the answer's, None before they are known.
    """

    address: Address
    headers: Mapping[str, str] = field(default_factory=dict)
    limits: StreamLimits = field(default_factory=StreamLimits)
    status: int | None = None
    content_type: str | None = None
    _reader: asyncio.StreamReader | None = None
    _writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Connects; OSError where no server listens."""
        context = ssl.create_default_context() if self.address.is_secure else None
        self._reader, self._writer = await asyncio.open_connection(
            self.address.host, self.address.port, ssl=context
        )

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """Sends a GET, or a POST of JSON, whole."""
        assert self._writer is not None, "open the exchange first"
        content = b"" if body is None else json.dumps(body).encode()
        lines = [
            f"{'GET' if body is None else 'POST'} {self.address.prefix}{path} HTTP/1.1",
            f"Host: {self.address.host}:{self.address.port}",
            "Connection: close",
            "Accept-Encoding: identity",
            *([] if body is None else ["Content-Type: application/json"]),
            f"Content-Length: {len(content)}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        self._writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
        await self._writer.drain()

    async def lines(self) -> AsyncGenerator[str, None]:
        """The lines of the answer as they come. Refused unless its status is 200."""
        self.status, headers = await self._head()
        self.content_type = headers.get("content-type")
        pieces = self._pieces(headers)
        if self.status != 200:
            raise Refused(self.status, _told(headers, await _text(pieces)))
        if (coding := headers.get("content-encoding", "identity").lower()) != "identity":
            raise Broken(f"the answer is compressed ({coding}), although identity was asked for")
        line, most = bytearray(), self.limits.line_bytes
        async for piece in pieces:
            *ended, rest = LINE_END.split(piece)
            for end in ended:
                line += end
                if len(line) <= most:
                    yield line.decode("utf-8", "replace")
                    line.clear()
            line += rest
            if len(line) > most:
                raise Broken(f"a line of more than {most} bytes (limits.line_bytes)")
        if line:
            yield line.decode("utf-8", "replace")

    async def close(self) -> None:
        """Drops the connection in any state; does not wait for the server."""
        if self._writer is not None:
            self._writer.transport.abort()
            with suppress(OSError):
                await self._writer.wait_closed()

    async def _head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the answer; heads of status 1xx are passed over."""
        left = MAX_HEAD_BYTES
        while True:
            status, headers = 0, dict[str, str]()
            while (line := await self._line()).strip():
                left -= len(line)
                text = line.decode("latin-1")
                if status:
                    name, _, value = text.partition(":")
                    headers[name.strip().lower()] = value.strip()
                elif found := STATUS.match(text):
                    status = int(found[1])
                else:
                    break
                if left < 0:
                    raise Broken(LONG_HEAD)
            if not status:
                raise Broken("the answer is not HTTP/1.1")
            if status >= 200:
                return status, headers

    async def _line(self) -> bytes:
        """A line of the head, or of a chunk's frame. Broken where the answer ends within it."""
        assert self._reader is not None, "open the exchange first"
        try:
            line = await self._reader.readline()
        except ValueError as error:  # asyncio's, of a line beyond its buffer
            raise Broken(LONG_HEAD) from error
        if not line.endswith(b"\n"):
            raise Broken("the answer broke off")
        return line

    async def _pieces(self, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        """The body, within its limit. Broken where it exceeds the limit or ends too early."""
        left = self.limits.answer_bytes
        async for piece in self._body(headers):
            left -= len(piece)
            if left < 0:
                most = self.limits.answer_bytes
                raise Broken(f"an answer of more than {most} bytes (limits.answer_bytes)")
            yield piece

    async def _body(self, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        """The body in chunks, of a known length, or until the connection ends."""
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while size := await self._chunk_size():
                async for piece in self._exactly(size):
                    yield piece
                await self._line()
        elif (length := headers.get("content-length")) is not None:
            if not re.fullmatch(r"\d{1,18}", length):
                raise Broken(f"a content-length of {length[:50]}")
            async for piece in self._exactly(int(length)):
                yield piece
        else:
            assert self._reader is not None
            while piece := await self._reader.read(PIECE_BYTES):
                yield piece

    async def _chunk_size(self) -> int:
        found = CHUNK_SIZE.fullmatch((await self._line()).strip())
        if found is None:
            raise Broken("a chunk of the answer has no size")
        return int(found[1], 16)

    async def _exactly(self, size: int) -> AsyncIterator[bytes]:
        """The next `size` bytes, with at most PIECE_BYTES of them in memory."""
        assert self._reader is not None
        while size:
            piece = await self._reader.read(min(size, PIECE_BYTES))
            if not piece:
                raise Broken("the answer broke off")
            size -= len(piece)
            yield piece


async def fetch(address: Address, path: str, headers: Mapping[str, str], timeout_s: float) -> str:
    """The whole answer to a GET; raises OSError, TimeoutError, Broken or Refused."""
    exchange = HttpExchange(address, headers)
    try:
        async with asyncio.timeout(timeout_s):
            await exchange.open()
            await exchange.ask(path)
            return "\n".join([line async for line in exchange.lines()])
    finally:
        await exchange.close()


async def _text(pieces: AsyncIterator[bytes]) -> str:
    """The beginning of a body, also of a body that breaks off."""
    held = b""
    with suppress(Broken, OSError):
        async for piece in pieces:
            held += piece
            if len(held) >= MAX_ERROR_BYTES:
                break
    return held[:MAX_ERROR_BYTES].decode("utf-8", "replace")


def _told(headers: Mapping[str, str], text: str) -> str:
    where = headers.get("location")
    return f"to {where} {text}".strip() if where else text
