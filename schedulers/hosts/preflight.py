"""Preflight: checks, before anything starts, that hosts can run a job together. The checks themselves are pure.

`examine` probes every host over one session each, then tries which addresses of node 0, and of the hosts that
lead if it is lost, the others reach.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from . import replies
from .addresses import candidates, choose, could_lead
from .checks import OTHER_PYTHON, Finding, judge
from .errors import HostKeyRefused, HostUnreachable, LoginRefused, RemoteError, one_line
from .facts import GB, Facts, Seen, Wanted
from .host_list import Host
from .remote_files import ROOT, host_program, program_loader
from .session import Session
from .transport import Outcome, Pool, Remote

_ANSWER_S = 60.0
_TRY_S = 3.0

T = TypeVar("T")
Matrix = Mapping[str, Mapping[str, str | None]]

__all__ = ["Finding", "Report", "Wanted", "examine"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A host's row in the table: its facts, and the verdict."""

    host: Host
    seen: Seen | None
    verdict: Literal["ok", "warns", "fails"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a preflight, in the order of the hosts.

    usable: hosts without a failed check; the first of them is node 0 and has `master` and `port`.
    master: the address of node 0 that every other usable host reached; None if there is none, or none was needed.
    reach:  for each other host and each tried address of node 0, None or why it was not reached.
    leads:  for each host that may lead, node 0 first, the address that the others reached.
    """

    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    usable: tuple[Host, ...]
    master: str | None
    port: int | None
    reach: Mapping[str, Mapping[str, str | None]]
    leads: Mapping[Host, str]

    @property
    def ok(self) -> bool:
        return len(self.usable) == len(self.rows) and self.master is not None

    def table(self) -> list[list[str]]:
        """Return a header and a row per host, as text."""
        header = ["host", "python", "torch", "accel", "disk free", "clock", "GPUs", "verdict"]
        return [header, *(_line(row) for row in self.rows)]


def examine(
    pool: Pool,
    hosts: Sequence[Host],
    wanted: Wanted | None = None,
    *,
    python: str | Callable[[Remote], str] = "python3",
    root: str = ROOT,
    told: Callable[[Host], None] = lambda host: None,
) -> Report:
    """Check all hosts at once. A host that cannot be reached is a finding, and so is every other problem.

    `python`: the interpreter, or a function that returns a host's; its error becomes that host's finding.
    `told`: called, in any thread, for each host that has answered or cannot be reached.
    """
    wanted = wanted or Wanted()

    def probe(remote: Remote) -> _Probe:
        try:
            return _Probe(remote, python if isinstance(python, str) else python(remote), root, wanted)
        finally:
            told(remote.host)

    probes = pool.map(probe, hosts)
    try:
        return _judged(pool, hosts, probes, wanted)
    finally:
        for outcome in probes:
            if outcome.value is not None:
                outcome.value.close()


class _Probe:
    """A session with the probe on one host; it begins with the host's facts."""

    def __init__(self, remote: Remote, python: str, root: str, wanted: Wanted) -> None:
        self._remote = remote
        self._python = python
        program = host_program("probe")
        remote.connection()  # logging in takes time too, and is no part of the question
        asked_at = time.time()
        self._session: Session = remote.open([python, "-c", program_loader(program)])
        try:
            self._session.write(program)
            request = {"do": "facts", "root": root, "packages": dict(wanted.packages)}
            facts = self.ask(request, _ANSWER_S, Facts)
        except BaseException:
            self.close()
            raise
        self.seen = Seen(facts=facts, asked_at=asked_at, answered_at=time.time())

    def ask(self, request: Mapping[str, Any], timeout_s: float, kind: type[T]) -> T:
        self._session.write(json.dumps(request).encode() + b"\n")
        line = self._session.read_line(timeout_s)
        if not line.endswith(b"\n"):
            ended = self._session.finish(timeout_s)
            said = one_line(ended.stderr)
            python = f"~/{self._python[2:]}" if self._python.startswith("./") else self._python
            if ended.status == 127:
                raise RemoteError(self._remote.name, f"no {python} there; make it, or {OTHER_PYTHON}", 127)
            if ended.status == 126:
                raise RemoteError(self._remote.name, f"it may not run {python}; {OTHER_PYTHON}", 126)
            raise RemoteError(self._remote.name, f"{self._python} fails: {said}", ended.status)
        return replies.decode(line, kind, self._remote.name)

    def close(self) -> None:
        self._session.close()


def _judged(pool: Pool, hosts: Sequence[Host], probes: Sequence[Outcome[_Probe]], wanted: Wanted) -> Report:
    seen = {host: outcome.value.seen if outcome.value else None for host, outcome in zip(hosts, probes, strict=True)}
    findings = [_not_asked(outcome) for outcome in probes if outcome.error is not None]
    findings += judge({str(host): found for host, found in seen.items() if found is not None}, wanted)
    fit = [(outcome.host, outcome.get()) for outcome in probes if outcome.value and not _fails(outcome.host, findings)]
    tried = _try(pool, fit, wanted)
    findings += tried.findings
    while tried.address is None and len(fit) > 1 and _fails(fit[0][0], tried.findings):
        # It is the first one that is cut off: the next one may do for node 0.
        fit = fit[1:]
        tried = _try(pool, fit, wanted)
        findings += tried.findings
    usable = tuple(host for host, _ in fit if not _fails(host, findings))
    rows = tuple(Row(host=host, seen=found, verdict=_verdict(host, findings)) for host, found in seen.items())
    return Report(
        rows=rows,
        findings=tuple(findings),
        usable=usable,
        master=tried.address,
        port=tried.port,
        reach=tried.matrix,
        leads=tried.leads,
    )


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """The addresses that the others reached, of node 0 and of those that may lead after it."""

    address: str | None = None
    port: int | None = None
    matrix: Matrix = field(default_factory=dict)
    leads: Mapping[Host, str] = field(default_factory=dict)
    findings: Sequence[Finding] = ()


@dataclass(frozen=True, kw_only=True)
class _Listening:
    """A host that listens on a port for the others to connect."""

    host: Host
    addresses: list[str]
    port: int
    token: str

    def to_json(self) -> dict[str, Any]:
        return {"addresses": self.addresses, "port": self.port, "token": self.token}


def _try(pool: Pool, fit: Sequence[tuple[Host, _Probe]], wanted: Wanted) -> _Tried:
    """Have the hosts that may lead listen, and every other host connect to each of their addresses."""
    if not fit or not wanted.leads:
        return _Tried()
    first = fit[0][0]
    probes = dict(fit)
    heard = pool.map(
        lambda remote: _listen(pool, remote.host, probes[remote.host], wanted), list(probes)[: wanted.leads]
    )
    begun = [outcome.get() for outcome in heard]
    listening = [one for one in begun if isinstance(one, _Listening)]
    problems = [one for one in begun if isinstance(one, Finding)]
    if not isinstance(begun[0], _Listening):
        return _Tried(findings=[begun[0]])
    matrices = _called(pool, probes, listening)
    reach, findings = choose(str(first), begun[0].addresses, matrices[0], begun[0].port)
    cut_off = {finding.host for finding in findings}
    found = {}
    for one, matrix in zip(listening[1:], matrices[1:], strict=True):
        if str(one.host) not in cut_off:
            usable = {name: reached for name, reached in matrix.items() if name not in cut_off}
            found[one.host], more = could_lead(str(one.host), one.addresses, usable, one.port)
            problems += more
    if reach.address is None:
        return _Tried(matrix=reach.matrix, findings=findings)
    return _Tried(
        address=reach.address,
        port=begun[0].port,
        matrix=reach.matrix,
        leads={first: reach.address, **found},
        findings=[*findings, *(replace(problem, severity="warns") for problem in problems)],
    )


def _listen(pool: Pool, host: Host, probe: _Probe, wanted: Wanted) -> _Listening | Finding:
    found, problem = candidates(probe.seen.facts.addresses, pool.settings(host).hostname, wanted.interface)
    if problem is not None:
        return Finding.fails(str(host), "reach", *problem)
    token = os.urandom(16).hex()
    try:
        request = {"do": "listen", "ports": list(wanted.ports), "token": token}
        port = probe.ask(request, _ANSWER_S, replies.Port)["port"]
    except (RemoteError, HostUnreachable) as error:
        return _no_port(host, error, wanted)
    return _Listening(host=host, addresses=found, port=port, token=token)


def _called(pool: Pool, probes: Mapping[Host, _Probe], listening: Sequence[_Listening]) -> list[Matrix]:
    """Return, for each listening host, the results of every other host's connections to its addresses."""

    def call(remote: Remote) -> list[Mapping[str, str | None]]:
        request = {"do": "connect", "to": [one.to_json() for one in listening if one.host != remote.host]}
        found = probes[remote.host].ask({**request, "seconds": _TRY_S}, _ANSWER_S, replies.Reached)
        return list(found["reached"])

    callers = list(probes) if len(listening) > 1 else list(probes)[1:]
    matrices: list[dict[str, Mapping[str, str | None]]] = [{} for _ in listening]
    for outcome in pool.map(call, callers):
        reached = iter(outcome.value or ())
        for one, matrix in zip(listening, matrices, strict=True):
            if one.host != outcome.host:
                silence = dict.fromkeys(one.addresses, one_line(str(outcome.error)))
                matrix[str(outcome.host)] = next(reached, silence)
    return list(matrices)


def _no_port(host: Host, error: RemoteError | HostUnreachable, wanted: Wanted) -> Finding:
    ports = ", ".join(map(str, wanted.ports))
    remedy = "name other ports (ports: in accel.yaml)" if wanted.ports != (0,) else "look at its network"
    return Finding.fails(str(host), "port", f"cannot listen on port {ports}: {error.problem}", remedy)


def _not_asked(outcome: Outcome[_Probe]) -> Finding:
    error = outcome.error
    problem = error.problem if isinstance(error, (HostUnreachable, RemoteError)) else str(error)
    if isinstance(error, RemoteError):
        return Finding.fails(str(outcome.host), "python", problem)
    # Of keys that are refused, the problem says the remedy.
    own = isinstance(error, (HostKeyRefused, LoginRefused)) or not isinstance(error, HostUnreachable)
    return Finding.fails(str(outcome.host), "ssh", problem, "" if own else f"from here, see: {_ssh(outcome.host)}")


def _ssh(host: Host) -> str:
    """Return the command with which a person logs in there."""
    name = f"{host.user}@{host.name}" if host.user else host.name
    return f"ssh -p {host.port} {name}" if host.port else f"ssh {name}"


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
