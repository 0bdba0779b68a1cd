"""Choice of a leading host's address: the best one that every other host reached. All functions are pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence

from ..errors import nearest
from .checks import Finding
from .facts import Address

Matrix = Mapping[str, Mapping[str, str | None]]  # host -> address -> None or why it was not reached

# Bridges and tunnels of containers and virtual machines: the same addresses may be on every host.
_HOST_ONLY = re.compile(r"(docker|br-|virbr|veth|cni|flannel|cali|lxc|lxd|podman|kube|tunl|vmnet|tailscale|wg|tun)")
_MAX_SHOWN = 4
_INTERFACE = "(interface: in accel.yaml, or --option interface=NAME)"
_REMEDY = (
    f"open the target's ports in the firewall (ports: in accel.yaml), or name the network to use {_INTERFACE}; "
    "gloo and NCCL take ports of net.ipv4.ip_local_port_range as well"
)


def candidates(
    addresses: Sequence[Address], hostname: str, interface: str | None
) -> tuple[list[str], tuple[str, str] | None]:
    """Return the addresses of node 0 to try, the best first; or a problem and its remedy.

    With an `interface`, only its addresses count. Else real interfaces come before those of containers, faster
    ones first, the address that SSH uses before its equals, IPv4 before IPv6. The last is the name that SSH
    connects to, which the host itself may not know.
    """
    names = sorted({address.interface for address in addresses})
    chosen = list(addresses)
    if interface is not None:
        exact = [address for address in addresses if address.interface == interface]
        chosen = exact or [address for address in addresses if address.interface.startswith(interface)]
        if not chosen:
            return [], (
                f"no interface {interface!r} with an address{nearest(interface, names)} (it has {', '.join(names)})",
                f"name another {_INTERFACE}",
            )

    def rank(address: Address) -> tuple[bool, int, bool, bool]:
        host_only = address.virtual and _HOST_ONLY.match(address.interface) is not None
        return host_only, -address.speed, address.address != hostname, ":" in address.address

    ranked = [address.address for address in sorted(chosen, key=rank)]
    if interface is None and hostname not in ranked and not _is_loopback(hostname):
        ranked.append(hostname)
    if not ranked:
        return [], ("has no network address but its own loopback", "look at its network")
    return list(dict.fromkeys(ranked)), None


def choose(first: str, addresses: Sequence[str], matrix: Matrix, port: int) -> tuple[str | None, list[Finding]]:
    """Return the first address that all others reached, else the one that most did.

    Each host that did not reach it has a finding. If none reached any, there is no address, and the finding is
    about node 0.
    """
    address, missed = _most_reached(addresses, matrix)
    if matrix and len(missed) == len(matrix):
        name, attempts = next(iter(matrix.items()))
        subject = "no other host reaches it" if len(matrix) > 1 else f"{name} does not reach it"
        problem = f"{subject} on port {port} (from {name}: {_reasons(attempts)})"
        return None, [Finding.fails(first, "reach", problem, _REMEDY)]
    findings = [
        Finding.fails(name, "reach", f"cannot reach {first} on port {port} ({_reasons(matrix[name])})", _REMEDY)
        for name in missed
    ]
    return address, findings


def choose_successor(name: str, addresses: Sequence[str], matrix: Matrix, port: int) -> tuple[str, list[Finding]]:
    """Choose the address of a host that may lead later; warn about hosts that do not reach it."""
    address, missed = _most_reached(addresses, matrix)
    if not missed:
        return address, []
    first, *others = missed
    subject = f"{first} and {len(others)} more do" if others else f"{first} does"
    reason = f"(from {first}: {_reasons(matrix[first])}), so it cannot lead when the first host is lost"
    return address, [Finding.warns(name, "reach", f"{subject} not reach it on port {port} {reason}", _REMEDY)]


def _most_reached(addresses: Sequence[str], matrix: Matrix) -> tuple[str, list[str]]:
    """Return the first of the addresses that most hosts reached, and the hosts that did not."""
    missed = {
        address: [name for name, attempts in matrix.items() if attempts[address] is not None] for address in addresses
    }
    return min(missed.items(), key=lambda item: len(item[1]))


def _reasons(attempts: Mapping[str, str | None]) -> str:
    lines = [f"{address}: {error or 'reached'}" for address, error in attempts.items()]
    suffix = f", and {len(lines) - _MAX_SHOWN} more" if len(lines) > _MAX_SHOWN else ""
    return ", ".join(lines[:_MAX_SHOWN]) + suffix


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return name == "localhost"
