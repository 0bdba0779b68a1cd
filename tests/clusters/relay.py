"""Delays every frame between a bridge and a machine: a tap on the one side, a packet socket on the other.

relay.py TAP VETH MILLISECONDS      runs until it is killed
relay.py offload-off INTERFACE      checksums are filled in by software, as frames that pass through here must have them
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import os
import select
import socket
import struct
import sys
import time

_TUNSETIFF = 0x400454CA
_IFF_TAP_NO_PI = 0x0002 | 0x1000
_SIOCETHTOOL = 0x8946
_ETHTOOL_STXCSUM, _ETHTOOL_STSO, _ETHTOOL_SGSO = 0x17, 0x1F, 0x24
_SOL_PACKET, _PACKET_IGNORE_OUTGOING = 263, 23
_EVERY_PROTOCOL = 3
_FRAME = 65536


def relay(tap_name: str, veth: str, delay_s: float) -> None:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", tap_name.encode(), _IFF_TAP_NO_PI))
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL))
    wire.bind((veth, 0))
    wire.setblocking(False)
    wire.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    other = {tap: wire.fileno(), wire.fileno(): tap}
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        due = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select(list(other), [], [], due)
        now = time.monotonic()
        for source in ready:
            for frame in _frames(source):
                waiting.append((now + delay_s, other[source], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, destination, frame = waiting.popleft()
            _put(destination, frame)


def _frames(source: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < 256:
        try:
            found.append(os.read(source, _FRAME))
        except OSError:
            break
    return found


def _put(destination: int, frame: bytes) -> None:
    try:
        os.write(destination, frame)
    except OSError:
        return  # a full queue drops frames on a real wire too


def offload_off(interface: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in (_ETHTOOL_STXCSUM, _ETHTOOL_STSO, _ETHTOOL_SGSO):
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP16x", interface.encode(), ctypes.addressof(value))
            fcntl.ioctl(control, _SIOCETHTOOL, request)


if __name__ == "__main__":
    if sys.argv[1] == "offload-off":
        offload_off(sys.argv[2])
    else:
        relay(sys.argv[1], sys.argv[2], float(sys.argv[3]) / 1000)
