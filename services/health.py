"""Is it serving? Asked the way clients and gateways ask: over HTTP, and of one scheduler over its own socket."""

import http.client
import json
import os
import time
from pathlib import Path
from typing import Any

import zmq

from ipc.addresses import gateway_endpoint
from ipc.codec import TO_GATEWAY, DecodeError, encode
from ipc.control import PROBE_INDEX, Hello, Status
from ipc.sockets import PeerFull, PeerGone, Socket, dealer
from ipc.types import new_incarnation

_POLL_MS = 20


def replica_status(run_dir: Path, replica: str, timeout_s: float = 0.5) -> Status | None:
    """What the replica's scheduler says of itself; None when it does not answer in time."""
    incarnation = new_incarnation()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = None
    try:
        socket = dealer(context, gateway_endpoint(run_dir, replica), b"gw-" + incarnation.to_bytes(8, "big"))
        hello = encode(Hello(incarnation=incarnation, role="gateway", index=PROBE_INDEX, pid=os.getpid()))
        return _ask(socket, hello, time.monotonic() + timeout_s)
    finally:
        if socket is not None:
            socket.close()
        context.destroy(linger=0)


def _ask(socket: Socket, hello: bytes, deadline: float) -> Status | None:
    sent = False
    while time.monotonic() < deadline:
        if not sent:
            try:
                socket.send([hello])
                sent = True
            except (PeerFull, PeerGone):  # not connected yet
                time.sleep(_POLL_MS / 1000)
                continue
        socket.poll(_POLL_MS)
        frames = socket.receive()
        if frames is None:
            continue
        try:
            message = TO_GATEWAY.decode(frames[-1])
        except DecodeError:
            continue
        if isinstance(message, Status):
            return message
    return None


def is_ready(status: Status | None) -> bool:
    """Whether a replica has lately computed something and takes work."""
    return status is not None and status.state == "ready" and 0 <= status.forward_age_ms <= status.max_forward_age_ms


def http_ready(host: str, port: int, timeout_s: float = 1.0) -> tuple[bool, str]:
    """Whether /health/ready answers 200, and otherwise why not."""
    status, body = http_get(host, port, "/health/ready", timeout_s)
    if status == 200:
        return True, ""
    if status == 0:
        return False, str(body)
    error = body.get("error", body) if isinstance(body, dict) else body
    return False, str(error.get("message", error) if isinstance(error, dict) else error)


def http_get(host: str, port: int, path: str, timeout_s: float) -> tuple[int, Any]:
    """Status and JSON body; status 0 and the reason when nobody answers."""
    connection = http.client.HTTPConnection(reachable(host), port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"null")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return 0, f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def reachable(host: str) -> str:
    """An address to connect to, of one to listen on."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
