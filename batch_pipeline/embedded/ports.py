"""Ports on loopback: which are free, and free ones to take.

Free ports are drawn from below the range that the kernel gives to outgoing connections (32768 and up on Linux), so that
no connection takes one between its choice and its use, and low enough that port + 10000 lies there too. A port that was
chosen, and is not listened on yet, is not chosen again by this process.
"""

from __future__ import annotations

import secrets
import socket

import psutil

from batch_pipeline.errors import OperatorError

LOOPBACK = "127.0.0.1"
TWIN_OFFSET = 10_000
"""SeaweedFS serves gRPC at each of its ports + 10000, without a way to choose another."""
_LOWEST, _HIGHEST, _TRIES = 15_000, 22_000, 1_000
_reserved: set[int] = set()


def is_free(port: int) -> bool:
    """Return whether a server could listen on this port of the loopback interface now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def reserve(*ports: int) -> None:
    """Let `free_ports` choose none of these, nor of these + 10000: somebody is to listen on them."""
    _reserved.update(ports, (port + TWIN_OFFSET for port in ports))


def free_ports(count: int) -> list[int]:
    """Return `count` different ports which are free now, and so is each of them + 10000; they are reserved.

    Raises OperatorError where there are not so many.
    """
    found: set[int] = set()
    for _ in range(_TRIES):
        if len(found) == count:
            break
        port = _LOWEST + secrets.randbelow(_HIGHEST - _LOWEST)
        both = {port, port + TWIN_OFFSET}
        if not both & _reserved and all(map(is_free, both)):
            found.add(port)
    if len(found) < count:
        raise OperatorError(f"no {count} free ports between {_LOWEST} and {_HIGHEST} on {LOOPBACK}")
    reserve(*found)
    return sorted(found)


def holder(port: int) -> str | None:
    """Return the name and pid of the program that listens on the port, None where we may not know."""
    try:
        pids = [
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
        ]
        return f"{psutil.Process(pids[0]).name()} (pid {pids[0]})" if pids and pids[0] else None
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        return None
