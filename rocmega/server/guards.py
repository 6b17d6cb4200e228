"""What stands between the network and the model: who may ask, how much, and what he is told when something is wrong."""

from __future__ import annotations

import logging
import secrets
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rocmega.errors import BusyError, RequestError, RocmegaError

log = logging.getLogger("rocmega.server")
OPEN = frozenset({"/health"})  # paths that need no key


class BodyLimit:
    """Refuses bodies of more than `limit` bytes, announced or not, before they are in memory."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if not announced.isdigit() or int(announced) > self.limit:
            await self._refusal()(scope, receive, send)
            return
        got = 0

        async def bounded() -> Message:
            nonlocal got
            message = await receive()
            got += len(message.get("body", b""))
            if got > self.limit:
                raise HTTPException(413, self._text())
            return message

        await self.app(scope, bounded, send)

    def _text(self) -> str:
        return f"The body is larger than the {self.limit} bytes that this server takes."

    def _refusal(self) -> JSONResponse:
        return failure(413, self._text())


def failure(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error in OpenAI's shape."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": error}, status, headers)


def key_check(key: str | None) -> Any:
    """A dependency that lets pass only who has the key; everybody, if there is none."""

    async def check(request: Request) -> None:
        given, wanted = request.headers.get("authorization", ""), f"Bearer {key}"
        if (
            key is not None
            and request.url.path not in OPEN
            and not secrets.compare_digest(given.encode(), wanted.encode())
        ):
            raise HTTPException(401, "This server wants its API key, as 'Authorization: Bearer <key>'.")

    return check


def explain_errors(app: FastAPI) -> None:
    """Clients are told what is wrong with their request, never where our code was."""

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        faults = (f"{'.'.join(map(str, fault['loc'][1:]))}: {fault['msg']}" for fault in error.errors()[:8])
        return failure(400, "; ".join(faults))

    async def refused(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        headers = {"WWW-Authenticate": "Bearer"} if error.status_code == 401 else None
        return failure(error.status_code, str(error.detail), headers)

    async def ours(request: Request, error: Exception) -> JSONResponse:
        status = status_of(error)
        if status >= 500:
            log.error("%s %s: %s", request.method, request.url.path, error)
        return failure(status, str(error), {"Retry-After": "1"} if status == 429 else None)

    async def unknown(request: Request, error: Exception) -> JSONResponse:
        return failure(500, "Something went wrong in the server; its log says what.")

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(404, lambda request, error: failure(404, f"There is nothing at {request.url.path}."))
    app.add_exception_handler(RocmegaError, ours)
    app.add_exception_handler(Exception, unknown)


def status_of(error: Exception) -> int:
    """HTTP's number for what rocmega raises."""
    return 429 if isinstance(error, BusyError) else 400 if isinstance(error, RequestError) else 500
