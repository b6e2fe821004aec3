"""Waits until its owner is gone, then removes the owner's container. Run with a bare Python: arguments are the path of the
daemon's socket and the container's id; the owner holds the other end of stdin."""

import http.client
import socket
import sys


def main() -> None:
    path, container = sys.argv[1:]
    while sys.stdin.buffer.read(1):
        pass
    connection = http.client.HTTPConnection("localhost", timeout=60)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(60)
    connection.sock.connect(path)
    connection.request("DELETE", f"/containers/{container}?force=1&v=1")
    connection.getresponse().read()


if __name__ == "__main__":
    main()
