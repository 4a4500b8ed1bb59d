"""A program for the tests of a cut network: it does as the lines in a pipe say, and writes what happens to a file.

    python peer.py <folder>     lines into <folder>/in, words out to <folder>/out

listen HOST PORT · dial NAME HOST PORT · send NAME TEXT · sync WORD (first takes in all that has arrived)
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
from contextlib import suppress
from pathlib import Path


class Peer:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.out = (folder / "out").open("a", buffering=1)
        os.mkfifo(folder / "in")
        self.lines = os.fdopen(os.open(folder / "in", os.O_RDWR), "rb", 0)
        self.look = selectors.DefaultSelector()
        self.look.register(self.lines, selectors.EVENT_READ)
        self.socks: dict[str, socket.socket] = {}

    def run(self) -> None:
        while True:
            self.take(None)

    def take(self, timeout: float | None) -> bool:
        """Handle what is there; lines only when there is time to wait.

        Lines come last: a `sync` takes in what has arrived, and a second `accept` of the same connection never ends.
        """
        found = self.look.select(timeout)
        lines = [(key, mask) for key, mask in found if key.fileobj is self.lines]
        events = [each for each in found if each not in lines]
        for key, mask in events:
            if key.data == "listener":
                sock, _ = key.fileobj.accept()  # type: ignore[union-attr]
                self.add(f"in{len(self.socks)}", sock, selectors.EVENT_READ)
            else:
                self.on_socket(key.fileobj, key.data, mask)  # type: ignore[arg-type]
        if lines and timeout is None:
            for line in os.read(self.lines.fileno(), 4096).decode().splitlines():
                self.obey(*line.split())
        return bool(events)

    def add(self, name: str, sock: socket.socket, mask: int) -> None:
        sock.setblocking(False)
        self.socks[name] = sock
        self.look.register(sock, mask, name)

    def on_socket(self, sock: socket.socket, name: str, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self.say("connected", name)
            self.look.modify(sock, selectors.EVENT_READ, name)
            return
        try:
            data = sock.recv(4096)
        except OSError as error:
            data = b""
            self.say("error", name, type(error).__name__)
        if data:
            self.say(*data.decode().split())
        else:
            self.look.unregister(sock)
            self.say("closed", name)

    def obey(self, verb: str, *words: str) -> None:
        if verb == "listen":
            sock = socket.create_server((words[0], int(words[1])))
            self.look.register(sock, selectors.EVENT_READ, "listener")
            self.say("listening")
        elif verb == "dial":
            sock = socket.socket()
            sock.setblocking(False)
            with suppress(BlockingIOError):
                sock.connect((words[1], int(words[2])))
            self.add(words[0], sock, selectors.EVENT_WRITE)
        elif verb == "send":
            self.socks[words[0]].send(f"{words[1]}\n".encode())
        elif verb == "sync":
            while self.take(0.0):
                pass
            self.say(words[0])

    def say(self, *words: str) -> None:
        self.out.write(" ".join(words) + "\n")


if __name__ == "__main__":
    Peer(Path(sys.argv[1])).run()
