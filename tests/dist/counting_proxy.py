"""ProxyCommand of ssh that writes how many bytes went there and back: python counting_proxy.py FILE HOST PORT"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading


def main() -> None:
    connection, counts = socket.create_connection((sys.argv[2], int(sys.argv[3]))), [0, 0]

    def finish(*_: object) -> None:
        with open(sys.argv[1], "a") as file:
            file.write(f"{counts[0]} {counts[1]}\n")
        os._exit(0)

    def send() -> None:
        while data := os.read(0, 1 << 16):
            connection.sendall(data)
            counts[0] += len(data)
        connection.shutdown(socket.SHUT_WR)

    for number in (signal.SIGHUP, signal.SIGTERM):  # ssh ends it so
        signal.signal(number, finish)
    threading.Thread(target=send, daemon=True).start()
    while data := connection.recv(1 << 16):
        counts[1] += len(data)
        while data:
            data = data[os.write(1, data) :]
    finish()


if __name__ == "__main__":
    main()
