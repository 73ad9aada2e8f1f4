"""Connections that do not wait for ever for a host that is cut off: a cut link is silent, and TCP is patient.

The kernels ask each other, so that a process that is slow, or stopped for a while, breaks no connection, unless it
leaves so much unread that its kernel takes no more: that, too, ends after this time.
"""

import socket


def mind_silence(sock: socket.socket, seconds: float) -> None:
    """Breaks this connection when the other host has answered nothing for so long."""
    idle = max(1, int(seconds / 4))  # seconds of silence before the other kernel is asked, and asked again
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, idle)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
