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
from .addresses import Matrix, candidates, choose, choose_successor
from .checks import OTHER_PYTHON_HINT, Finding, run_checks
from .errors import HostKeyRefused, HostUnreachable, LoginRefused, RemoteError, one_line
from .facts import GB, Facts, HostRequirements, TimedFacts
from .host_list import Host
from .remote_files import ROOT, host_programs, program_loader
from .session import Session
from .transport import Outcome, Pool, Remote

_REPLY_TIMEOUT_S = 60.0
_TRY_S = 3.0

T = TypeVar("T")

__all__ = ["Finding", "HostRequirements", "Report", "examine"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A host's row in the table: its facts, and the verdict."""

    host: Host
    facts: TimedFacts | None
    verdict: Literal["ok", "warns", "fails"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a preflight, in the order of the hosts.

    usable: hosts without a failed check; the first of them is node 0 and has `master` and `port`.
    master: the address of node 0 that every other usable host reached; None if there is none, or none was needed.
    attempts: for each other host and each tried address of node 0, None or why it was not reached.
    leads:  for each host that may lead, node 0 first, the address that the others reached.
    """

    rows: tuple[Row, ...] = ()
    findings: tuple[Finding, ...] = ()
    usable: tuple[Host, ...] = ()
    master: str | None = None
    port: int | None = None
    attempts: Matrix = field(default_factory=dict)
    leads: Mapping[Host, str] = field(default_factory=dict)

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
    requirements: HostRequirements | None = None,
    *,
    python: str | Callable[[Remote], str] = "python3",
    root: str = ROOT,
    on_probed: Callable[[Host], None] = lambda host: None,
) -> Report:
    """Check all hosts at once. A host that cannot be reached is a finding, and so is every other problem.

    `python`: the interpreter, or a function that returns a host's; its error becomes that host's finding.
    `on_probed`: called, in any thread, for each host that has answered or cannot be reached.
    """
    requirements = requirements or HostRequirements()

    def probe(remote: Remote) -> _Probe:
        try:
            return _Probe(remote, python if isinstance(python, str) else python(remote), root, requirements)
        finally:
            on_probed(remote.host)

    probes = pool.map(probe, hosts)
    try:
        return _build_report(pool, hosts, probes, requirements)
    finally:
        for outcome in probes:
            if outcome.value is not None:
                outcome.value.close()


class _Probe:
    """A session with the probe on one host; it begins with the host's facts."""

    def __init__(self, remote: Remote, python: str, root: str, requirements: HostRequirements) -> None:
        self._remote = remote
        self._python = python
        program = host_programs("listen", "program", "probe")
        remote.connection()  # log in first: only the request counts for the clock skew
        sent_at = time.time()
        self._session: Session = remote.open([python, "-c", program_loader(program)])
        try:
            self._session.write(program)
            request = {"do": "facts", "root": root, "packages": dict(requirements.packages)}
            facts = self.request(request, _REPLY_TIMEOUT_S, Facts)
        except BaseException:
            self.close()
            raise
        self.facts = TimedFacts(facts=facts, requested_at=sent_at, replied_at=time.time())

    def request(self, request: Mapping[str, Any], timeout_s: float, kind: type[T]) -> T:
        self._session.write(json.dumps(request).encode() + b"\n")
        line = self._session.read_line(timeout_s)
        if not line.endswith(b"\n"):
            completed = self._session.finish(timeout_s)
            detail = one_line(completed.stderr)
            python = f"~/{self._python[2:]}" if self._python.startswith("./") else self._python
            if completed.status == 127:
                raise RemoteError(self._remote.name, f"{python} not found; create it, or {OTHER_PYTHON_HINT}", 127)
            if completed.status == 126:
                raise RemoteError(self._remote.name, f"{python} is not executable; {OTHER_PYTHON_HINT}", 126)
            raise RemoteError(self._remote.name, f"{self._python} fails: {detail}", completed.status)
        return replies.decode(line, kind, self._remote.name)

    def close(self) -> None:
        self._session.close()


def _build_report(
    pool: Pool, hosts: Sequence[Host], probes: Sequence[Outcome[_Probe]], requirements: HostRequirements
) -> Report:
    facts_by_host = {
        host: outcome.value.facts if outcome.value else None for host, outcome in zip(hosts, probes, strict=True)
    }
    findings = [_probe_error(outcome) for outcome in probes if outcome.error is not None]
    findings += run_checks(
        {str(host): timed_facts for host, timed_facts in facts_by_host.items() if timed_facts is not None}, requirements
    )
    fit = [(outcome.host, outcome.get()) for outcome in probes if outcome.value and not _fails(outcome.host, findings)]
    report = _check_reachability(pool, fit, requirements)
    findings += report.findings
    while report.master is None and len(fit) > 1 and _fails(fit[0][0], report.findings):
        # The first host is cut off: try the next one as node 0.
        fit = fit[1:]
        report = _check_reachability(pool, fit, requirements)
        findings += report.findings
    usable = tuple(host for host, _ in fit if not _fails(host, findings))
    rows = tuple(
        Row(host=host, facts=timed_facts, verdict=_verdict(host, findings))
        for host, timed_facts in facts_by_host.items()
    )
    return replace(report, rows=rows, findings=tuple(findings), usable=usable)


@dataclass(frozen=True, kw_only=True)
class _Listener:
    """A host that listens on a port for the others to connect."""

    host: Host
    addresses: list[str]
    port: int
    token: str


def _check_reachability(pool: Pool, fit: Sequence[tuple[Host, _Probe]], requirements: HostRequirements) -> Report:
    """Have the hosts that may lead listen, and every other host connect to each of their addresses.

    The report has no rows and names no usable hosts.
    """
    if not fit or not requirements.leads:
        return Report()
    first = fit[0][0]
    probes = dict(fit)
    outcomes = pool.map(
        lambda remote: _start_listener(pool, remote.host, probes[remote.host], requirements),
        list(probes)[: requirements.leads],
    )
    responses = [outcome.get() for outcome in outcomes]
    listening = [candidate for candidate in responses if isinstance(candidate, _Listener)]
    problems = [candidate for candidate in responses if isinstance(candidate, Finding)]
    if not isinstance(responses[0], _Listener):
        return Report(findings=(responses[0],))
    matrices = _call_listeners(pool, probes, listening)
    address, findings = choose(str(first), responses[0].addresses, matrices[0], responses[0].port)
    cut_off = {finding.host for finding in findings}
    leads = {}
    for candidate, matrix in zip(listening[1:], matrices[1:], strict=True):
        if str(candidate.host) not in cut_off:
            usable = {name: attempts for name, attempts in matrix.items() if name not in cut_off}
            leads[candidate.host], warnings = choose_successor(
                str(candidate.host), candidate.addresses, usable, candidate.port
            )
            problems += warnings
    if address is None:
        return Report(attempts=matrices[0], findings=tuple(findings))
    return Report(
        master=address,
        port=responses[0].port,
        attempts=matrices[0],
        leads={first: address, **leads},
        findings=(*findings, *(replace(problem, severity="warns") for problem in problems)),
    )


def _start_listener(pool: Pool, host: Host, probe: _Probe, requirements: HostRequirements) -> _Listener | Finding:
    addresses, problem = candidates(probe.facts.facts.addresses, pool.settings(host).hostname, requirements.interface)
    if problem is not None:
        return Finding.fails(str(host), "reach", *problem)
    token = os.urandom(16).hex()
    try:
        request = {"do": "listen", "ports": list(requirements.ports), "token": token}
        port = probe.request(request, _REPLY_TIMEOUT_S, replies.Port)["port"]
    except (RemoteError, HostUnreachable) as error:
        ports = ", ".join(map(str, requirements.ports))
        remedy = "name other ports (ports: in accel.yaml)" if requirements.ports != (0,) else "look at its network"
        return Finding.fails(str(host), "port", f"cannot listen on port {ports}: {error.problem}", remedy)
    return _Listener(host=host, addresses=addresses, port=port, token=token)


def _call_listeners(pool: Pool, probes: Mapping[Host, _Probe], listening: Sequence[_Listener]) -> list[Matrix]:
    """Return, for each listening host, the results of every other host's connections to its addresses."""

    def call(remote: Remote) -> list[Mapping[str, str | None]]:
        others = [
            {"addresses": listener.addresses, "port": listener.port, "token": listener.token}
            for listener in listening
            if listener.host != remote.host
        ]
        request = {"do": "connect", "to": others, "seconds": _TRY_S}
        reply = probes[remote.host].request(request, _REPLY_TIMEOUT_S, replies.ReachResult)
        return list(reply["reached"])

    callers = list(probes) if len(listening) > 1 else list(probes)[1:]
    matrices: list[dict[str, Mapping[str, str | None]]] = [{} for _ in listening]
    for outcome in pool.map(call, callers):
        attempts = iter(outcome.value or ())
        for listener, matrix in zip(listening, matrices, strict=True):
            if listener.host != outcome.host:
                no_answer = dict.fromkeys(listener.addresses, one_line(str(outcome.error)))
                matrix[str(outcome.host)] = next(attempts, no_answer)
    return list(matrices)


def _probe_error(outcome: Outcome[_Probe]) -> Finding:
    error = outcome.error
    problem = error.problem if isinstance(error, (HostUnreachable, RemoteError)) else str(error)
    if isinstance(error, RemoteError):
        return Finding.fails(str(outcome.host), "python", problem)
    # For refused keys, the problem includes the remedy.
    explained = isinstance(error, (HostKeyRefused, LoginRefused)) or not isinstance(error, HostUnreachable)
    remedy = "" if explained else f"from here, see: {_ssh(outcome.host)}"
    return Finding.fails(str(outcome.host), "ssh", problem, remedy)


def _ssh(host: Host) -> str:
    """Return the command for a person to log in there."""
    name = f"{host.user}@{host.name}" if host.user else host.name
    return f"ssh -p {host.port} {name}" if host.port else f"ssh {name}"


def _fails(host: Host, findings: Iterable[Finding]) -> bool:
    return any(finding.host == str(host) and finding.severity == "fails" for finding in findings)


def _verdict(host: Host, findings: Sequence[Finding]) -> Literal["ok", "warns", "fails"]:
    if _fails(host, findings):
        return "fails"
    return "warns" if any(finding.host == str(host) for finding in findings) else "ok"


def _line(row: Row) -> list[str]:
    if row.facts is None:
        return [str(row.host), *["-"] * 6, row.verdict]
    facts = row.facts.facts
    skew = row.facts.skew_s
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
