"""Addresses of listeners: as URLs, and why one cannot be listened at."""

import errno
import socket


def joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def origin(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://{joined(host, port)}"


def is_host(name: str) -> bool:
    """Whether this can be the name of a host: the resolver takes no other."""
    try:
        return bool(name.encode("idna"))
    except UnicodeError:
        return False


def why_not(address: str, error: OSError) -> str:
    """Why the server cannot listen at an address, and what to do."""
    host, _, port = address.rpartition(":")
    if isinstance(error, socket.gaierror):
        advice = f"the host {host} is unknown: write one of this machine's names or addresses"
    elif error.errno == errno.EADDRINUSE:
        advice = (
            f"a process listens there (`lsof -i :{port}` shows it): stop that one, or serve "
            f"at another port; {host}:0 takes a free one, which the log names"
        )
    elif error.errno == errno.EADDRNOTAVAIL:
        advice = "this machine has no such address: use 127.0.0.1, or 0.0.0.0 for all that it has"
    elif error.errno in (errno.EACCES, errno.EPERM):
        advice = "this user may not take that port: use one above 1023"
    else:
        advice = "listen at another address"
    return f"{address}: cannot listen there: {error.strerror or error}: {advice}."
