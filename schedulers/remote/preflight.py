"""Whether hosts can run a job together: judged, all at once, before anything starts. Judges are pure.

`examine` asks every host in one conversation each, then tries which address of node 0 the others reach.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from .errors import HostUnreachable, RemoteError, one_line
from .facts import GB, Facts, Seen, Wanted
from .files import ROOT, host_program, program_loader
from .hosts import Host
from .judging import Finding, judge
from .reaching import Reach, candidates, choose
from .session import Session
from .transport import Outcome, Pool, Remote

_ANSWER_S = 60.0
_TRY_S = 3.0

__all__ = ["Finding", "Report", "Wanted", "examine"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A host's line in the table: what it has, and whether it can take part."""

    host: Host
    seen: Seen | None
    verdict: Literal["ok", "warns", "fails"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found, in the order in which the hosts were given.

    usable: the hosts that nothing speaks against; the first of them is node 0 and has `master` and `port`.
    master: the address of node 0 that every other usable host reached, None where there is none.
    reach:  for each other host and each address of node 0 that was tried, None or why it was not reached.
    """

    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    usable: tuple[Host, ...]
    master: str | None
    port: int | None
    reach: Mapping[str, Mapping[str, str | None]]

    @property
    def ok(self) -> bool:
        return len(self.usable) == len(self.rows) and self.master is not None

    def table(self) -> list[list[str]]:
        """A header and a line a host, as text."""
        header = ["host", "python", "torch", "accel", "disk free", "clock", "GPUs", "verdict"]
        return [header, *(_line(row) for row in self.rows)]


def examine(
    pool: Pool,
    hosts: Sequence[Host],
    wanted: Wanted | None = None,
    *,
    python: str = "python3",
    root: str = ROOT,
) -> Report:
    """Asks all hosts at once. A host that cannot be asked is a finding, and so is everything else that is wrong."""
    wanted = wanted or Wanted()
    probes = pool.map(lambda remote: _Probe(remote, python, root, wanted), hosts)
    try:
        return _judged(pool, hosts, probes, wanted)
    finally:
        for outcome in probes:
            if outcome.value is not None:
                outcome.value.close()


class _Probe:
    """The conversation with one host, begun with its facts."""

    def __init__(self, remote: Remote, python: str, root: str, wanted: Wanted) -> None:
        self._remote = remote
        self._python = python
        program = host_program("probe")
        remote.connection()  # logging in takes time too, and is no part of the question
        asked_at = time.time()
        self._session: Session = remote.open([python, "-c", program_loader(program)])
        try:
            self._session.write(program)
            said = self.ask({"do": "facts", "root": root, "packages": dict(wanted.packages)}, _ANSWER_S)
            facts = msgspec.convert(said, Facts)
        except msgspec.ValidationError as error:
            self.close()
            raise RemoteError(remote.name, f"its probe answers nonsense: {one_line(str(error))}") from None
        except BaseException:
            self.close()
            raise
        self.seen = Seen(facts=facts, asked_at=asked_at, answered_at=time.time())

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        self._session.write(json.dumps(request).encode() + b"\n")
        line = self._session.read_line(timeout_s)
        if not line.endswith(b"\n"):
            ended = self._session.finish(timeout_s)
            said = one_line(ended.stderr)
            if ended.status == 127:
                raise RemoteError(
                    self._remote.name, f"no {self._python} there ({said}); install it, or name another", 127
                )
            raise RemoteError(self._remote.name, f"{self._python} fails: {said}", ended.status)
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise RemoteError(self._remote.name, one_line(str(found["error"])))
        return found

    def close(self) -> None:
        self._session.close()


def _judged(pool: Pool, hosts: Sequence[Host], probes: Sequence[Outcome[_Probe]], wanted: Wanted) -> Report:
    seen = {host: outcome.value.seen if outcome.value else None for host, outcome in zip(hosts, probes, strict=True)}
    findings = [_not_asked(outcome) for outcome in probes if outcome.error is not None]
    findings += judge({str(host): found for host, found in seen.items() if found is not None}, wanted)
    fit = [(outcome.host, outcome.get()) for outcome in probes if outcome.value and not _fails(outcome.host, findings)]
    reach, port, more = _try(pool, fit, wanted)
    findings += more
    while reach.address is None and len(fit) > 2 and _fails(fit[0][0], more):
        # It is the first one that is cut off: the next one may do for node 0.
        fit = fit[1:]
        reach, port, more = _try(pool, fit, wanted)
        findings += more
    usable = tuple(host for host, _ in fit if not _fails(host, findings))
    rows = tuple(Row(host=host, seen=found, verdict=_verdict(host, findings)) for host, found in seen.items())
    return Report(
        rows=rows, findings=tuple(findings), usable=usable, master=reach.address, port=port, reach=reach.matrix
    )


def _try(pool: Pool, fit: Sequence[tuple[Host, _Probe]], wanted: Wanted) -> tuple[Reach, int | None, list[Finding]]:
    """Node 0 listens, every other host connects to each of its addresses."""
    if not fit:
        return Reach(address=None, matrix={}), None, []
    first, probe = fit[0]
    found, problem = candidates(probe.seen.facts.addresses, pool.settings(first).hostname, wanted.interface)
    if problem is not None:
        return Reach(address=None, matrix={}), None, [Finding.fails(str(first), "reach", *problem)]
    token = os.urandom(16).hex()
    try:
        port = int(probe.ask({"do": "listen", "ports": list(wanted.ports), "token": token}, _ANSWER_S)["port"])
    except (RemoteError, HostUnreachable) as error:
        return Reach(address=None, matrix={}), None, [_no_port(first, error, wanted)]
    request = {"do": "connect", "addresses": found, "port": port, "token": token, "seconds": _TRY_S}
    others = {str(host): other for host, other in fit[1:]}
    tried = pool.map(
        lambda remote: others[str(remote.host)].ask(request, _ANSWER_S)["reached"], [h for h, _ in fit[1:]]
    )
    matrix: dict[str, Mapping[str, str | None]] = {
        str(outcome.host): outcome.value
        if outcome.error is None and outcome.value is not None
        else dict.fromkeys(found, one_line(str(outcome.error)))
        for outcome in tried
    }
    reach, findings = choose(str(first), found, matrix, port)
    return reach, port, findings


def _no_port(host: Host, error: RemoteError | HostUnreachable, wanted: Wanted) -> Finding:
    ports = ", ".join(map(str, wanted.ports))
    remedy = "name other ports" if wanted.ports != (0,) else "look at its network"
    return Finding.fails(str(host), "port", f"cannot listen on port {ports}: {error.problem}", remedy)


def _not_asked(outcome: Outcome[_Probe]) -> Finding:
    error = outcome.error
    problem = error.problem if isinstance(error, (HostUnreachable, RemoteError)) else str(error)
    check = "python" if isinstance(error, RemoteError) else "ssh"
    return Finding.fails(str(outcome.host), check, problem)


def _fails(host: Host, findings: Iterable[Finding]) -> bool:
    return any(finding.host == str(host) and finding.severity == "fails" for finding in findings)


def _verdict(host: Host, findings: Sequence[Finding]) -> Literal["ok", "warns", "fails"]:
    if _fails(host, findings):
        return "fails"
    return "warns" if any(finding.host == str(host) for finding in findings) else "ok"


def _line(row: Row) -> list[str]:
    if row.seen is None:
        return [str(row.host), *["-"] * 6, row.verdict]
    facts = row.seen.facts
    skew = row.seen.skew_s
    return [
        str(row.host),
        facts.python,
        facts.packages.get("torch") or "-",
        facts.packages.get("accel-launch") or "-",
        f"{facts.disk_free / GB:.1f} GB",
        f"{skew:+.1f} s" if abs(skew) >= 0.05 else "0 s",
        str(facts.gpus.count),
        row.verdict,
    ]
