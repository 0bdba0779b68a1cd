"""How an API server is asked: what is asked again, what is said of what goes wrong, over TLS and through proxies."""

from __future__ import annotations

import contextlib
import gc
import socket
import ssl
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from schedulers.errors import ConfigError, SchedulerError, Unreachable
from schedulers.kubernetes.client import api, errors
from schedulers.kubernetes.client.errors import (
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    ResourceExpired,
    Unauthorized,
)

from ..conftest import MakeApi
from ..servers import Answer, Server, authority, cut, hung_up, proxying, refused, said, serving


def line(call: Callable[[], object], kind: type[SchedulerError]) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_asked(make: MakeApi) -> None:
    with serving(said(200, {"items": [1]})) as server:
        api = make(server.url)
        assert api.call("GET", api.path("v1", "pods"), query={"labelSelector": "a in (b,c)"}) == {"items": [1]}
        api.call("POST", api.path("kubeflow.org/v1", "pytorchjobs"), body={"ä": 1})
        api.call("GET", api.path("v1", "nodes", "n1", namespace=""))
        api.call("GET", api.path("v1", "pods", "p", "log", namespace="other"))
    assert server.asked == [
        "GET /api/v1/namespaces/team/pods?labelSelector=a+in+%28b%2Cc%29",
        "POST /apis/kubeflow.org/v1/namespaces/team/pytorchjobs",
        "GET /api/v1/nodes/n1",
        "GET /api/v1/namespaces/other/pods/p/log",
    ]
    _, _, headers, body = server.questions[1]
    assert (headers["authorization"], headers["content-type"], body) == (
        "Bearer t",
        "application/json",
        b'{"\\u00e4": 1}',
    )


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        (said(200, {"major": "1", "minor": "27+"}), (1, 27)),
        (said(200, {"major": "1", "minor": "34"}), (1, 34)),
        (said(200, {"major": "one"}), None),
        (said(404, {}), None),
        (said(403, {}), None),
    ],
)
def test_the_version_of_kubernetes(make: MakeApi, answer: Answer, version: tuple[int, int] | None) -> None:
    with serving(answer) as server:
        assert make(server.url).version() == version


def test_the_versions_are_asked_for_once(make: MakeApi) -> None:
    groups = [{"versions": [{"groupVersion": "batch/v1"}, {"groupVersion": "batch/v1beta1"}]}]
    with serving(said(200, {"groups": groups})) as server:
        api = make(server.url)
        assert api.versions() == api.versions() == {"v1", "batch/v1", "batch/v1beta1"}
    assert server.asked == ["GET /apis"]


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (
            refused(404, "NotFound", 'pods "p" not found', name="p", kind="pods"),
            NotFound,
            'target k: pods "p" not found',
        ),
        (
            refused(409, "AlreadyExists", 'jobs "j" already exists'),
            Conflict,
            'target k: jobs "j" already exists',
        ),
        (refused(410, "Expired", "too old resource version"), ResourceExpired, "target k: too old resource version"),
        (
            refused(401, "Unauthorized", "Unauthorized"),
            Unauthorized,
            "target k: the credentials of context lab are not accepted: expired, or not of this cluster (Unauthorized)",
        ),
        (
            refused(
                403,
                "Forbidden",
                'pytorchjobs.kubeflow.org is forbidden: User "system:serviceaccount:team:bot" cannot create resource '
                '"pytorchjobs" in API group "kubeflow.org" in the namespace "team"',
            ),
            Forbidden,
            "target k: service account team/bot may not create pytorchjobs.kubeflow.org in namespace team: no Role "
            "grants this",
        ),
        (
            refused(403, "Forbidden", 'User "ann" cannot list resource "nodes" in API group "" at the cluster scope'),
            Forbidden,
            "target k: user ann may not list nodes: no Role grants this",
        ),
        (
            refused(403, "Forbidden", 'pods "p" is forbidden: exceeded quota: small, requested: pods=1'),
            Forbidden,
            'target k: the namespace\'s quota does not allow it: pods "p" is forbidden: exceeded quota: small, '
            "requested: pods=1",
        ),
        (
            refused(403, "Forbidden", 'admission webhook "gate" denied the request: no image of yours'),
            Forbidden,
            'target k: an admission webhook refuses it: admission webhook "gate" denied the request: no image of yours',
        ),
        (
            refused(400, "", 'admission webhook "gate" denied the request: no'),
            Invalid,
            'target k: an admission webhook refuses it: admission webhook "gate" denied the request: no',
        ),
        (refused(403, "", "no more of that"), Forbidden, "denies this to context lab: no more of that"),
        (
            refused(
                422,
                "Invalid",
                'PyTorchJob "j" is invalid: …',
                kind="PyTorchJob",
                name="j",
                causes=[
                    {"field": "spec.a", "message": "Required value"},
                    {"field": "spec.b", "message": "Unsupported\nvalue"},
                ],
            ),
            Invalid,
            "target k: the API server rejects PyTorchJob j: spec.a: Required value; spec.b: Unsupported value",
        ),
        (
            refused(400, "BadRequest", 'strict decoding error: unknown field "spec.typo"'),
            Invalid,
            'target k: the API server rejects it: strict decoding error: unknown field "spec.typo"',
        ),
        (said(418, b"<html>\n a proxy's page"), ApiError, "target k: <html> a proxy's page"),
    ],
)
def test_a_refusal_is_one_line(make: MakeApi, answer: Answer, kind: type[ApiError], text: str) -> None:
    with serving(answer) as server:
        told = line(lambda: make(server.url).call("POST", "/api/v1/x", body={}), kind)
    assert told.endswith(text)
    assert len(server.questions) == 1


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_server_that_has_too_much_to_do_is_asked_again(make: MakeApi, status: int) -> None:
    with serving(said(status), said(status), said(200, {"ok": 1})) as server:
        assert make(server.url).call("GET", "/x") == {"ok": 1}
    assert len(server.questions) == 3


def test_a_server_that_goes_on_having_too_much_to_do(make: MakeApi) -> None:
    with serving(refused(503, "ServiceUnavailable", "etcd leader changed")) as server:
        told = line(lambda: make(server.url).call("GET", "/x"), Unreachable)
    assert told == f"target k: the API server {server.url} answers 503: etcd leader changed"
    assert len(server.questions) == 4


def test_what_may_have_been_done_is_not_asked_twice(make: MakeApi) -> None:
    with serving(refused(500, "InternalError", "etcd timed out"), said(201)) as server:
        assert "answers 500: etcd timed out" in line(lambda: make(server.url).call("POST", "/x", body={}), Unreachable)
    assert len(server.questions) == 1
    with serving(hung_up, said(201)) as server:
        line(lambda: make(server.url).call("POST", "/x", body={}), Unreachable)
    assert len(server.questions) == 1
    with serving(refused(429, "TooManyRequests", "slow down"), said(201, {"made": 1})) as server:
        assert make(server.url).call("POST", "/x", body={}) == {"made": 1}


@pytest.mark.parametrize("broken", [cut, hung_up])
def test_an_answer_that_breaks_off_is_asked_for_again(make: MakeApi, broken: Answer) -> None:
    with serving(broken, said(200, {"whole": 1})) as server:
        assert make(server.url).call("GET", "/x") == {"whole": 1}
    with serving(broken) as server:
        assert "cannot be reached" in line(lambda: make(server.url).call("GET", "/x"), Unreachable)


def test_no_json(make: MakeApi) -> None:
    with serving(said(200, b"<html>sign in to the network")) as server:
        told = line(lambda: make(server.url).call("GET", "/x"), Unreachable)
    assert "answers GET /x with no JSON: b'<html>sign in" in told


def test_a_server_that_is_not_there(make: MakeApi) -> None:
    with serving(said(200)) as server:
        pass
    told = line(lambda: make(server.url).call("POST", "/x", body={}), Unreachable)
    assert told == f"target k: the API server {server.url} cannot be reached: connection refused"


def test_a_name_that_is_not_known(make: MakeApi) -> None:
    told = line(lambda: make("https://no-such-host.invalid:6443").call("GET", "/x"), Unreachable)
    assert "cannot be reached: its name cannot be resolved" in told


def test_a_server_that_never_answers(make: MakeApi) -> None:
    over = threading.Event()

    def silent(handler: Any) -> None:
        over.wait(60)

    with serving(silent) as server:
        told = line(lambda: make(server.url).call("GET", "/x", timeout_s=0.2), Unreachable)
        over.set()
    assert told.endswith("cannot be reached: no answer in time")


@pytest.mark.parametrize(
    ("date", "sent", "received", "ahead"),
    [
        (10.0, 10.98, 11.02, 0.0),  # within the second that it says
        (12.0, 10.0, 15.0, 0.0),  # after long
        (3610.0, 10.2, 10.5, 3599.5),
        (10.0, 3610.5, 3611.0, -3599.5),
    ],
)
def test_a_clock_is_ahead_only_as_far_as_its_seconds_show(
    date: float, sent: float, received: float, ahead: float
) -> None:
    assert api._ahead(date, sent, received) == ahead


def test_a_token_that_ended_is_renewed(make: MakeApi, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old")

    def renewed(handler: Any) -> None:
        token.write_text("new")
        body = b'{"message": "Unauthorized"}'
        handler.send_response(401)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    with serving(renewed, said(200, {"ok": 1})) as server:
        assert make(server.url, user={"tokenFile": str(token)}).call("POST", "/x", body={}) == {"ok": 1}
    assert [headers["authorization"] for _, _, headers, _ in server.questions] == ["Bearer old", "Bearer new"]


def test_a_token_that_stays_refused(make: MakeApi, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("old")
    with serving(refused(401, "Unauthorized", "token has expired")) as server:
        api = make(server.url, user={"tokenFile": str(tmp_path / "token")})
        assert "are not accepted: expired" in line(lambda: api.call("GET", "/x"), Unauthorized)
    assert len(server.questions) == 2


def test_a_stream_comes_as_it_is_sent(make: MakeApi) -> None:
    go = threading.Event()

    def events(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"6\r\nfirst\n\r\n")
        handler.wfile.flush()
        go.wait(60)
        handler.wfile.write(b"7\r\nsecond\n\r\n0\r\n\r\n")

    with serving(events) as server:
        pieces = iter(make(server.url).stream("/x", query={"watch": "1"}))
        assert next(pieces) == b"first\n"
        go.set()
        assert list(pieces) == [b"second\n"]


@contextlib.contextmanager
def endless() -> Iterator[Server]:
    """Says one thing, and then nothing for ever."""
    over = threading.Event()

    def events(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"6\r\nfirst\n\r\n")
        handler.wfile.flush()
        over.wait(60)

    with serving(events) as server:
        try:
            yield server
        finally:
            over.set()


def test_a_stream_is_closed_from_another_thread(make: MakeApi) -> None:
    with endless() as server:
        stream = make(server.url).stream("/x")
        close, closed_by = stream._response.close, []

        def record_close() -> None:
            closed_by.append(threading.current_thread())
            close()

        stream._response.close = record_close  # type: ignore[method-assign]
        begun, found = threading.Event(), []

        def read() -> None:
            for piece in stream:
                found.append(piece)
                begun.set()
            found.append(b"over")

        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(60)
        stream.close()
        thread.join(60)
    assert found == [b"first\n", b"over"]
    assert set(closed_by) == {thread}  # http.client raises ValueError where two threads close at once
    assert not list(stream)


def test_only_the_connection_of_a_complete_stream_is_used_again(make: MakeApi) -> None:
    with serving(said(200, {})) as server:
        api = make(server.url)
        complete, unread = api.stream("/x"), api.stream("/x")
        pool: Any = complete._response._pool  # type: ignore[attr-defined]
        assert list(complete) == [b"{}"]
        complete.close()
        returned = pool.pool.queue[-1]
        assert returned is not None
        assert api.call("GET", "/x") == {}
        assert pool.pool.queue[-1] is returned
        unread.close()
        unread._response.release_conn()  # as its reader at the body's end does, at the same moment
        assert pool.pool.queue[-1] is returned
        assert not list(unread)
        assert pool.num_connections == 2


def test_a_stream_on_which_nothing_comes(make: MakeApi) -> None:
    with endless() as server:
        pieces = iter(make(server.url).stream("/x", idle_s=5))
        assert next(pieces) == b"first\n"
        assert "no answer in time" in line(lambda: next(pieces), Unreachable)


def cut_between_chunks(handler: Any) -> None:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"6\r\nfirst\n\r\n")
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)


def test_a_stream_that_breaks_off(make: MakeApi) -> None:
    with serving(cut) as server:
        pieces = iter(make(server.url).stream("/x"))
        assert line(lambda: list(pieces), Unreachable).endswith("cannot be reached: the connection was cut off")
    with serving(cut_between_chunks) as server:
        pieces = iter(make(server.url).stream("/x"))
        assert next(pieces) == b"first\n"
        assert line(lambda: list(pieces), Unreachable).endswith("cannot be reached: the connection was cut off")


def test_a_stream_that_is_refused(make: MakeApi) -> None:
    with serving(refused(410, "Expired", "too old resource version")) as server:
        line(lambda: make(server.url).stream("/x"), ResourceExpired)


def test_tls(make: MakeApi, tmp_path: Path) -> None:
    ours, other = authority(tmp_path / "ours"), authority(tmp_path / "other")
    files = ours.issue("server", (), ["127.0.0.1"])
    known = {"certificate-authority": str(ours.certificate)}
    with serving(said(200, {"ok": 1}), tls=files) as server:
        assert make(server.url, known).call("GET", "/x") == {"ok": 1}
        told = line(
            lambda: make(server.url, {"certificate-authority": str(other.certificate)}).call("GET", "/"), Unreachable
        )
        assert "its certificate is not trusted: " in told
        assert "(certificate-authority in the kubeconfig did not sign it, or is missing)" in told
        assert "its certificate is not trusted" in line(lambda: make(server.url).call("GET", "/"), Unreachable)
        assert make(server.url, {"insecure-skip-tls-verify": True}).call("GET", "/x") == {"ok": 1}
        (tmp_path / "bad").write_text("no certificate")
        told = line(
            lambda: make(server.url, {"certificate-authority": str(tmp_path / "bad")}).call("GET", "/"), ConfigError
        )
        assert told == "target k: certificate-authority is not a certificate (PEM)"


def test_a_server_whose_certificate_has_expired(make: MakeApi, tmp_path: Path) -> None:
    ours = authority(tmp_path / "ours")
    files = ours.issue("server", (), ["127.0.0.1"], expired=True)
    with serving(said(200), tls=files) as server:
        api = make(server.url, {"certificate-authority": str(ours.certificate)})
        told = line(lambda: api.call("GET", "/x"), Unreachable)
    assert told.endswith("its certificate is not trusted: certificate has expired (renew it on the server)")


def test_a_server_of_another_name(make: MakeApi, tmp_path: Path) -> None:
    ours = authority(tmp_path / "ours")
    files = ours.issue("server", (), ["10.9.8.7"])
    known = {"certificate-authority": str(ours.certificate)}
    with serving(said(200, {"ok": 1}), tls=files) as server:
        told = line(lambda: make(server.url, known).call("GET", "/x"), Unreachable)
        assert "tls-server-name in the kubeconfig is another name" in told
        assert make(server.url, {**known, "tls-server-name": "10.9.8.7"}).call("GET", "/x") == {"ok": 1}


def test_a_client_with_a_certificate(make: MakeApi, tmp_path: Path) -> None:
    ours, other = authority(tmp_path / "ours"), authority(tmp_path / "other")
    files = ours.issue("server", (), ["127.0.0.1"])
    certificate, key = ours.issue("ann", ("staff",))
    _, others_key = other.issue("bob")
    known = {"certificate-authority": str(ours.certificate)}
    with serving(said(200, {"ok": 1}), tls=files, authority=ours.certificate) as server:
        user = {"client-certificate": str(certificate), "client-key": str(key)}
        assert make(server.url, known, user).call("GET", "/x") == {"ok": 1}
        assert "ann" in server.certificates[-1]
        assert "authorization" not in server.questions[-1][2]
        wrong = {**user, "client-key": str(others_key)}
        told = line(lambda: make(server.url, known, wrong).call("GET", "/x"), ConfigError)
        assert "client-certificate and client-key do not match" in told


@pytest.mark.parametrize("user", [None, "ann:pa ss"])
def test_through_a_proxy(make: MakeApi, tmp_path: Path, user: str | None) -> None:
    ours = authority(tmp_path / "ours")
    known = {"certificate-authority": str(ours.certificate)}
    with serving(said(200, {"ok": 1}), tls=ours.issue("s", (), ["127.0.0.1"])) as server, proxying(user) as proxy:
        named = proxy.url if user is None else proxy.url.replace("//", "//ann:pa%20ss@")
        assert make(server.url, {**known, "proxy-url": named}).call("GET", "/x") == {"ok": 1}
        assert proxy.connected == [server.url.removeprefix("https://")]
        if user is not None:
            told = line(lambda: make(server.url, {**known, "proxy-url": proxy.url}).call("GET", "/x"), Unreachable)
            assert "407" in told


def test_the_proxy_of_the_environment(make: MakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = authority(tmp_path / "ours")
    known = {"certificate-authority": str(ours.certificate)}
    with serving(said(200, {"ok": 1}), tls=ours.issue("s", (), ["127.0.0.1"])) as server, proxying() as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        assert make(server.url, known).call("GET", "/x") == {"ok": 1}
        assert len(proxy.connected) == 1
        monkeypatch.setenv("NO_PROXY", "example.com,127.0.0.0/8")
        assert make(server.url, known).call("GET", "/x") == {"ok": 1}
        assert len(proxy.connected) == 1


def test_a_proxy_that_is_not_there(make: MakeApi) -> None:
    with proxying() as proxy:
        pass
    secret = proxy.url.replace("//", "//ann:secret@")
    told = line(lambda: make("https://127.0.0.1:1", {"proxy-url": secret}).call("GET", "/x"), Unreachable)
    assert told == (
        f"target k: the API server https://127.0.0.1:1 cannot be reached through proxy {proxy.url}: connection refused"
    )


def test_a_proxy_that_is_none(make: MakeApi) -> None:
    told = line(lambda: make("https://127.0.0.1:1", {"proxy-url": "ftp://x"}).call("GET", "/x"), ConfigError)
    assert told == "target k: proxy-url must be like http://host:port, not 'ftp://x'"


def test_the_official_client_is_imported_by_the_first_question(make: MakeApi) -> None:
    with serving(said(200, {"groups": []})) as server:
        code = (
            "import sys\n"
            "from schedulers.kubernetes.client.api import Api\n"
            "from schedulers.kubernetes.options import KubernetesOptions\n"
            f"api = Api(KubernetesOptions(kubeconfig={make(server.url).access.files!r}), 'k')\n"
            "print([m for m in ('urllib3', 'yaml', 'kubernetes') if m in sys.modules])\n"
            "api.versions()\n"
            "print([m for m in ('kubernetes', 'kubernetes.client.models') if m in sys.modules])\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[0] == "[]"


def test_a_dry_run_imports_no_client(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    words = [
        "submit",
        "--target",
        "kubernetes",
        "--image",
        "i",
        "--cpus",
        "1",
        "--memory",
        "1G",
        "--dry-run",
        "train.py",
    ]
    code = (
        "import sys\nfrom accel.cli import main\n"
        f"assert main({words!r}) == 0\n"
        "print([m for m in ('urllib3', 'kubernetes') if m in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1:] == ["[]"], done.stderr


def test_a_long_refusal_is_cut() -> None:
    error = errors.error_of(409, b'{"message": "' + b"x" * 5000 + b'"}', subject="target k", user="me")
    assert len(str(error)) == 600


def test_a_connection_that_is_reset_before_its_handshake_fails_no_other_test() -> None:
    """Python itself forgets the socket: see filterwarnings in pyproject.toml."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets it
        theirs.close()
        with pytest.raises(ConnectionResetError):
            ssl.create_default_context().wrap_socket(mine, server_hostname="any")
    gc.collect()


def test_warnings_are_given_with_the_answer(make: MakeApi) -> None:
    """Each is a header, or several are one; the text is UTF-8."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(201)
        handler.send_header("Warning", '299 - "would violate \\"restricted:latest\\": é"'.encode().decode("latin-1"))
        handler.send_header("Warning", '299 - "b, c", 299 server "d"')
        handler.send_header("Connection", "close")
        handler.send_header("Content-Length", "2")
        handler.end_headers()
        handler.wfile.write(b"{}")

    seen: list[str] = []
    with serving(answer) as server:
        api = make(server.url)
        assert api.call("POST", "/a", body={}, on_warning=seen.append) == {}
        assert api.call("POST", "/a", body={}) == {}
    assert seen == ['would violate "restricted:latest": é', "b, c", "d"]
