"""A small HTTP/1.1 client for streamed answers: one connection per exchange, standard library."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

MAX_ERROR_BYTES = 2000  # of an answer that says what went wrong


class Refused(Exception):
    """An answer other than 200: its status, and the beginning of what it says."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status


@dataclass(frozen=True)
class Address:
    """Where a server listens, out of its URL: https://host:port/prefix."""

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
class Exchange:
    """One connection: open it, ask once, read the answer line by line, close it."""

    address: Address
    headers: Mapping[str, str] = field(default_factory=dict)
    _reader: asyncio.StreamReader | None = None
    _writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Connects; OSError where nobody listens."""
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
            *([] if body is None else ["Content-Type: application/json"]),
            f"Content-Length: {len(content)}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        self._writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
        await self._writer.drain()

    async def lines(self) -> AsyncIterator[str]:
        """The lines of the answer as they come. Refused unless its status is 200."""
        status, headers = await self._head()
        pieces = self._pieces(headers)
        if status != 200:
            raise Refused(status, await _text(pieces))
        rest = b""
        async for piece in pieces:
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                yield line.decode("utf-8", "replace").rstrip("\r")
        if rest:
            yield rest.decode("utf-8", "replace")

    async def close(self) -> None:
        """Drops the connection, whatever state it is in; waits for nobody."""
        if self._writer is not None:
            self._writer.transport.abort()
            with suppress(OSError):
                await self._writer.wait_closed()

    async def _head(self) -> tuple[int, dict[str, str]]:
        assert self._reader is not None, "open the exchange first"
        first = (await self._reader.readline()).decode("latin-1").split(maxsplit=2)
        if len(first) < 2 or not first[0].startswith("HTTP/1.") or not first[1].isdigit():
            raise ConnectionError("the answer is not HTTP/1.1")
        headers: dict[str, str] = {}
        while (line := await self._reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        return int(first[1]), headers

    async def _pieces(self, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        """The body: in chunks, of a known length, or until the connection ends."""
        assert self._reader is not None
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self._reader.readline()).split(b";")[0] or b"0", 16):
                yield await self._reader.readexactly(size)
                await self._reader.readline()
            return
        left = int(headers.get("content-length", -1))
        while left != 0 and (piece := await self._reader.read(65536 if left < 0 else left)):
            left -= len(piece) if left > 0 else 0
            yield piece


async def fetch(address: Address, path: str, headers: Mapping[str, str], timeout_s: float) -> str:
    """The whole answer to a GET. OSError, TimeoutError or Refused."""
    exchange = Exchange(address, headers)
    try:
        async with asyncio.timeout(timeout_s):
            await exchange.open()
            await exchange.ask(path)
            return "\n".join([line async for line in exchange.lines()])
    finally:
        await exchange.close()


async def _text(pieces: AsyncIterator[bytes]) -> str:
    held = b""
    async for piece in pieces:
        held += piece
        if len(held) >= MAX_ERROR_BYTES:
            break
    return " ".join(held[:MAX_ERROR_BYTES].decode("utf-8", "replace").split())
