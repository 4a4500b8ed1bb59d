"""An HTTP server that gives the answers it was told, for programs that only ask."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar


class _Server(BaseHTTPRequestHandler):
    answers: ClassVar[dict[str, Any]] = {}

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        found = self.answers.get(f"{self.command} {self.path}", (None, 404, "<html>not found</html>"))
        wanted, status, text, *more = found() if callable(found) else found
        if status == 0:
            return
        if wanted and self.headers.get(wanted[0]) != wanted[1]:
            status, text = 401, ""
        self.send_response(status)
        for header in more:
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def answering(answers: dict[str, Any], port: int = 0) -> Iterator[str]:
    """The server's host and port.

    answers: {METHOD path: (header that the request must have, status, body, headers of the answer)}, or what returns
    one for each request. Status 0: it hangs up.
    """
    handler = type("Handler", (_Server,), {"answers": answers})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
