"""The servers that this user has logged in to, each with its token: `servers.yaml`, next to `accel.yaml`.

current: team/lab
servers:
  team: {url: https://jobs.example.org, token: accel_…, user: ada}
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import ConfigError, nearest
from ..store import atomic_files, paths

URL_VARIABLE, TOKEN_VARIABLE = "ACCEL_SERVER", "ACCEL_TOKEN"
FROM_ENVIRONMENT = "server"  # the name of the server in ACCEL_SERVER

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server, and the token for it."""

    name: str
    url: str
    token: str = field(default="", repr=False)
    user: str = ""


@dataclass(frozen=True, kw_only=True)
class Servers:
    """All known servers, and the current one, perhaps with a target: `NAME` or `NAME/TARGET`."""

    by_name: Mapping[str, Server]
    current: str = ""

    @property
    def current_server(self) -> Server | None:
        """The current server, else the one in `ACCEL_SERVER`, if there is one."""
        name = self.current.partition("/")[0]
        return self.by_name.get(name) or self.by_name.get(FROM_ENVIRONMENT)

    @property
    def current_target(self) -> str | None:
        """The target of the current server, `NAME/TARGET`, if one was chosen."""
        return self.current if "/" in self.current else None

    def get(self, name: str) -> Server:
        """Return the server of that name. Raises ConfigError."""
        if not name:
            raise ConfigError("no current server: log in (accel login URL), or choose one (accel context use NAME)")
        if name not in self.by_name:
            raise ConfigError(
                f"no server {name!r}{nearest(name, self.by_name)} (servers: {', '.join(self.by_name) or 'none'}); "
                "log in to one: accel login URL"
            )
        return self.by_name[name]

    def of_url(self, url: str, name: str = "") -> Server:
        """Return the server at that URL; of several log-ins there, the one with that name. Raises ConfigError."""
        servers = [server for server in self.by_name.values() if server.url == url and server.token]
        if not servers:
            raise ConfigError(f"no token for {url}: accel login {url}")
        return next((server for server in servers if server.name == name), servers[0])


def read_servers() -> Servers:
    """Return the servers of the file, and the one in `ACCEL_SERVER`. Raises ConfigError."""
    by_name: dict[str, Server] = {}
    current = ""
    if os.path.isfile(paths.servers_file()):
        from .yaml_file import YamlFile  # not needed without a server

        file = YamlFile(paths.servers_file(), core=True)
        document = file.value if isinstance(file.value, dict) else {}
        current = str(document.get("current") or "")
        entries = document.get("servers") or {}
        for name, entry in entries.items() if isinstance(entries, dict) else ():
            if not isinstance(entry, dict) or not isinstance(entry.get("url"), str):
                raise ConfigError(f"{file.location('servers', str(name))}: server {name}: expects url, token and user")
            texts = {key: str(entry.get(key) or "") for key in ("token", "user")}
            by_name[str(name)] = Server(name=str(name), url=checked_url(entry["url"]), **texts)
    url = os.environ.get(URL_VARIABLE, "").strip()
    if url:
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        by_name[FROM_ENVIRONMENT] = Server(name=FROM_ENVIRONMENT, url=checked_url(url, URL_VARIABLE), token=token)
    return Servers(by_name=by_name, current=current)


def add_server(server: Server) -> None:
    """Keep the server in the file, and make it the current one. Raises ConfigError, StoreError."""
    if not _NAME.match(server.name) or server.name == FROM_ENVIRONMENT:
        raise ConfigError(f"{server.name!r} is not a name for a server: use letters, digits and . _ -")
    servers = _stored()
    _write(Servers(by_name={**servers.by_name, server.name: server}, current=server.name))


def remove_server(name: str) -> None:
    """Remove the server from the file. Raises ConfigError, StoreError."""
    servers = _stored()
    servers.get(name)
    rest = {other: servers.by_name[other] for other in servers.by_name if other != name}
    _write(Servers(by_name=rest, current="" if servers.current.partition("/")[0] == name else servers.current))


def use_server(current: str) -> None:
    """Make `NAME` or `NAME/TARGET` the current server. Raises ConfigError, StoreError."""
    servers = _stored()
    servers.get(current.partition("/")[0])
    _write(dataclasses.replace(servers, current=current))


def checked_url(url: str, place: str = "") -> str:
    """Return the URL without a trailing slash. Raises ConfigError for one to which no token may be sent."""
    from urllib.parse import urlsplit

    where = f"{place}: " if place else ""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.username:
        raise ConfigError(f"{where}{url!r} is not the URL of a server, such as https://jobs.example.org")
    if parts.scheme == "http" and not is_loopback(host):
        raise ConfigError(f"{where}{url}: a token is sent over https only: use https://{parts.netloc}")
    return url.rstrip("/")


def is_loopback(host: str) -> bool:
    """Return True for an address that only this computer can reach."""
    from ipaddress import ip_address

    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _stored() -> Servers:
    servers = read_servers()
    by_name = {name: server for name, server in servers.by_name.items() if name != FROM_ENVIRONMENT}
    return dataclasses.replace(servers, by_name=by_name)


def _write(servers: Servers) -> None:
    import yaml

    document = {
        "current": servers.current,
        "servers": {
            name: {"url": server.url, "token": server.token, "user": server.user}
            for name, server in sorted(servers.by_name.items())
        },
    }
    path = paths.servers_file()
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        atomic_files.replace_file(path, text.encode())  # which only this user can read
    except OSError as error:
        raise atomic_files.store_error(error, path, "write") from error
