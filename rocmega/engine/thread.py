"""An engine that steps in a thread of its own, for callers that must not wait: servers and coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

from rocmega.engine.engine import Engine, busy
from rocmega.engine.request import Request
from rocmega.errors import RocmegaError
from rocmega.outputs import RequestOutput


class EngineThread:
    """Steps an engine while it has requests. Begins with the first of them; `close` ends it.

    Requests come and go through an inbox that is emptied between steps, so callers never wait for a step.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._work = threading.Condition()
        self._coming: list[Request] = []
        self._leaving: list[Request] = []
        self._closing = False
        self._thread: threading.Thread | None = None

    def submit(self, request: Request) -> None:
        """Hands a request over; `request.changed` hears of all that follows. Raises BusyError if too many wait."""
        with self._work:
            if self._closing:
                raise RocmegaError("The engine has been closed: it takes no more requests.")
            waiting = len(self._coming) + self.engine.waiting
            if waiting >= self.engine.max_waiting:
                raise busy(waiting)
            self._coming.append(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rocmega-engine", daemon=True)
                self._thread.start()
            self._work.notify()

    def abort(self, request: Request) -> None:
        """Ends a request before the next step, unless it has ended."""
        with self._work:
            if not request.finished:
                self._leaving.append(request)
                self._work.notify()

    async def stream(self, request: Request) -> AsyncIterator[RequestOutput]:
        """The request's answer as it grows, and as it ends.

        Who is slow misses states in between, but no tokens: each holds all of the answer so far, and only the last is
        kept. Who leaves early ends the request.
        """
        loop = asyncio.get_running_loop()
        latest: asyncio.Queue[RequestOutput | RocmegaError] = asyncio.Queue()

        def put(state: RequestOutput | RocmegaError) -> None:
            while not latest.empty():
                latest.get_nowait()
            latest.put_nowait(state)

        def changed(request: Request) -> None:
            try:
                loop.call_soon_threadsafe(put, request.error or request.output())
            except RuntimeError:  # the loop has been closed: nobody reads any more
                self.abort(request)

        request.changed = changed
        self.submit(request)
        try:
            while True:
                state = await latest.get()
                if isinstance(state, RocmegaError):
                    raise state
                yield state
                if state.finished:
                    return
        finally:
            self.abort(request)

    def close(self) -> None:
        """Ends the thread after the step it is in; requests that are left end with an error."""
        with self._work:
            self._closing = True
            self._work.notify()
        if self._thread is not None:
            self._thread.join()
        closed = RocmegaError("The engine was closed before the request had ended.")
        for request in self._coming:
            self._refuse(request, closed)
        self._fail(closed)

    def _run(self) -> None:
        going_on = True
        while going_on:
            try:
                going_on = self._wait_for_work()
                if going_on:
                    self.engine.step()
            except RocmegaError as error:
                self._fail(error)
            except Exception as error:  # a bug, or a device that is gone: callers must hear of it, not wait for ever
                failed = RocmegaError(f"The step could not be done: {type(error).__name__}: {error}")
                failed.__cause__ = error
                self._fail(failed)

    def _wait_for_work(self) -> bool:
        """Empties the inbox, and waits if then there is nothing to do. False: the end.

        What came is taken out first and handed on afterwards: a launch that has to end for it takes a token's time.
        """
        while True:
            with self._work:
                while not (self._closing or self._coming or self._leaving or self._busy):
                    self._work.wait()
                if self._closing:
                    return False
                coming, leaving = self._coming, self._leaving
                self._coming, self._leaving = [], []
            for request in coming:
                try:
                    self.engine.add(request)
                except RocmegaError as error:
                    self._refuse(request, error)
            self.engine.abort(leaving)
            if self._busy:
                return True

    @property
    def _busy(self) -> bool:
        return bool(self.engine.running or self.engine.waiting)

    def _fail(self, error: RocmegaError) -> None:
        for request in self.engine.fail(error):
            self._refuse(request, error)

    @staticmethod
    def _refuse(request: Request, error: RocmegaError) -> None:
        request.error = error
        if request.changed is not None:
            request.changed(request)
