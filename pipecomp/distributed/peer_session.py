"""Session with the program of `peer_agent` on another machine, over ssh."""

from __future__ import annotations

import json
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from pipecomp.distributed import peer_agent
from pipecomp.distributed.peer_question import MOST_BYTES
from pipecomp.distributed.ssh_launcher import SSH
from pipecomp.errors import ConfigError, foreign_text


def agent_source() -> str:
    """Return the program that runs on another machine."""
    return Path(peer_agent.__file__).read_text(encoding="utf-8")


class PeerSession:
    """The program of `peer_agent` on another machine.

    Args:
        host: As for ssh.
        python: Words of the shell that start its Python.
        request: The request.

    Attributes:
        sent_bytes: Bytes that were sent.
    """

    def __init__(self, host: str, python: str, request: Mapping[str, Any]) -> None:
        self.host, self.sent_bytes = host, 0
        source = agent_source().encode()
        start = shlex.quote(f"import sys; exec(compile(sys.stdin.buffer.read({len(source)}), 'agent', 'exec'))")
        line = f"exec sh -c {shlex.quote(f'{python} -c {start}')}"
        self._process = subprocess.Popen(
            [*SSH, host, line], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._errors: list[str] = []
        threading.Thread(target=self._read_errors, daemon=True).start()
        self.write(source + json.dumps(request).encode() + b"\n")
        for line in self._lines():
            if line == peer_agent.READY:
                return
        raise self.error("it ends")

    @property
    def _stdout(self) -> IO[bytes]:
        assert self._process.stdout is not None, "a pipe"
        return self._process.stdout

    def _read_errors(self) -> None:
        assert self._process.stderr is not None, "a pipe"
        for line in self._process.stderr:
            self._errors = [*self._errors[-4:], line.decode(errors="replace").strip()]

    def _lines(self) -> Iterator[str]:
        while line := self._stdout.readline(MOST_BYTES):
            yield line.decode(errors="replace").rstrip("\n")

    def write(self, data: bytes) -> None:
        """Send bytes. Raises ConfigError if the program has ended."""
        assert self._process.stdin is not None, "a pipe"
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except OSError:
            for message in self.messages():
                if "error" in message:
                    raise self.error(str(message["error"])) from None
            raise self.error("the connection ended") from None
        self.sent_bytes += len(data)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the answers until the end."""
        for line in self._lines():
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict):
                yield message

    def error(self, why: str) -> ConfigError:
        """Return the error that names the machine."""
        said = next((line for line in reversed(self._errors) if line), "")
        reason = foreign_text(why if not said or why != "it ends" else said)
        return ConfigError("--peers", self.host, f"a machine that can be set up ({reason})")

    def result(self, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
        """Wait for the end and return the result. Raises ConfigError for the machine's error."""
        for message in self.messages():
            if "say" in message:
                say(f"{self.host}: {foreign_text(message['say'])}")
            elif "error" in message:
                raise self.error(str(message["error"]))
            elif isinstance(message.get("done"), dict):
                return dict(message["done"])
        raise self.error("it ends" if self._errors else "the connection ended; the same command goes on from there")

    def close(self) -> None:
        """Close the connection."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def open_session(host: str, python: str, request: Mapping[str, Any]) -> Iterator[PeerSession]:
    """Yield a session, and close it."""
    session = PeerSession(host, python, request)
    try:
        yield session
    finally:
        session.close()


def request_of(host: str, root: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out a request without files on a machine: "measure" or "remove". Raises ConfigError."""
    fallback = shlex.quote(f"{root}/{peer_agent.ENVIRONMENTS}")
    python = (
        f"for python in {fallback}/*/bin/python python3 python3.11 python3.12 python3.13; do "
        'command -v "$python" >/dev/null && break; done; exec "$python"'
    )
    with open_session(host, python, {**request, "root": root}) as session:
        return session.result()
