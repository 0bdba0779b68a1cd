"""The settings of `accel serve`: `serve.yaml` in the configuration directory, and the flags over it."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from schedulers.config.schema import as_written, make_options
from schedulers.config.servers import is_loopback
from schedulers.config.yaml_file import YamlFile
from schedulers.errors import ConfigError, OptionError
from schedulers.store import paths

FILE = "serve.yaml"

_SIZE = TypeAdapter(Annotated[ByteSize, Field(gt=0)])


@dataclass(frozen=True, kw_only=True)
class TargetRules:
    """The rights of users other than the owner on a target.

    run_as:        "service": jobs run as the user of this server, for every submitter.
    allow_options: options of the target that submitters may set.
    """

    run_as: Literal["service"] | None = None
    allow_options: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of `serve.yaml`. Sizes are bytes, or text such as `2 GiB`.

    url:          the public address; default: that of host and port.
    home:         directory of the jobs and the database; default: `service` in `$ACCEL_HOME`.
    database:     "sqlite", or env:NAME or file:PATH of a PostgreSQL URL.
    behind_proxy: networks (CIDR) of proxies that end TLS.
    poll_s:       seconds between two polls of a target.
    max_body:     of a request; max_code: of a job's code, with at most max_files files; max_log: of a job's log.
    streams:      log streams of one user at a time.
    keep:         days for which jobs that are over are kept; default: for ever.
    targets:      the targets to offer; default: those of `accel.yaml`, and `local`.
    """

    host: str = "127.0.0.1"
    port: int = 8765
    url: str = ""
    home: str = ""
    database: str = "sqlite"
    tls_cert: str = ""
    tls_key: str = ""
    behind_proxy: tuple[str, ...] = ()
    poll_s: float = 5.0
    max_body: int | str = 1 << 20
    max_code: int | str = 2 << 30
    max_files: int = 100_000
    max_log: int | str = 1 << 30
    streams: int = 20
    keep: float | None = None
    targets: Mapping[str, TargetRules] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("home", "tls_cert", "tls_key"):
            value = getattr(self, name)
            object.__setattr__(self, name, os.path.abspath(os.path.expanduser(value)) if value else value)
        if not self.home:
            object.__setattr__(self, "home", os.path.join(paths.data_home(), "service"))
        if os.path.realpath(self.home) == os.path.realpath(paths.data_home()):
            raise OptionError("home", f"home {self.home} is $ACCEL_HOME, which has your own jobs: give another one")
        for name in ("max_body", "max_code", "max_log"):
            object.__setattr__(self, name, _bytes_of(name, getattr(self, name)))
        for name in ("poll_s", "streams", "max_files"):
            if not 0 < getattr(self, name) < float("inf"):
                raise OptionError(name, f"{name} must be more than 0, not {getattr(self, name)}")
        if self.keep is not None and not 0 <= self.keep < float("inf"):
            raise OptionError("keep", f"keep must be 0 days or more, not {self.keep}")
        if not 0 <= self.port <= 65535:
            raise OptionError("port", f"port must be from 0 to 65535, not {self.port}")
        if self.database != "sqlite" and not self.database.startswith(("env:", "file:")):
            problem = f"database must be sqlite, env:NAME or file:PATH, not {self.database!r}"
            raise OptionError("database", problem)
        object.__setattr__(self, "url", self.url.rstrip("/"))
        self._check_addresses()

    @property
    def address(self) -> str:
        """The URL under which clients reach the server."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.url or f"{'https' if self.tls_cert else 'http'}://{host}:{self.port}"

    def _check_addresses(self) -> None:
        for network in self.behind_proxy:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise OptionError("behind_proxy", f"behind_proxy: {error}") from None
        if bool(self.tls_cert) != bool(self.tls_key):
            one, missing = ("tls_cert", "tls_key") if self.tls_cert else ("tls_key", "tls_cert")
            raise OptionError(one, f"{one} without {missing}: give both, or none")
        url = urlsplit(self.url)
        if self.url and (url.scheme not in ("http", "https") or not url.hostname or url.path or url.query):
            raise OptionError("url", f"url must be https://HOST, perhaps with a port, not {self.url!r}")
        if is_loopback(self.host):
            return
        if not self.url or not (self.tls_cert or self.behind_proxy):
            remedy = "give --url and --tls-cert with --tls-key, or --behind-proxy"
            raise OptionError("host", f"--host {self.host}: others could reach it: {remedy}")
        if url.scheme != "https":
            raise OptionError("url", f"url must begin with https:// where others reach the server, not {self.url!r}")


def read_settings(path: str | None, flags: Mapping[str, Any]) -> Settings:
    """Return the settings of the file, by default `serve.yaml` in the configuration directory, and `flags` over it.

    Raises ConfigError, with `file:line` for what the file says.
    """
    default = os.path.join(paths.config_home(), FILE)
    file = YamlFile(path or default, core=True) if path or os.path.isfile(default) else None
    values = {} if file is None or file.value is None else file.value
    if not isinstance(values, dict):
        raise ConfigError(f"{path or default}: expects a mapping, got {type(values).__name__}")

    def locate(keys: tuple[str | int, ...], of_key: bool) -> str:
        if file is None or not keys:
            return "the flags" if file is None else file.shown
        return file.key_location(*map(str, keys)) if of_key else file.location(*keys)

    spelling = (lambda keys: None) if file is None else (lambda keys: file.spelling(*keys))
    written = as_written(Settings, {str(key): value for key, value in values.items()}, spelling, locate)
    settings: Settings = make_options(Settings, written, flags, locate, kind="")[0]
    return settings


def size_text(size: int) -> str:
    """Return a number of bytes for people, such as 2.0 GiB."""
    return ByteSize(size).human_readable(separator=" ")


def _bytes_of(name: str, value: int | str) -> int:
    try:
        return int(_SIZE.validate_python(value))
    except ValidationError:
        raise OptionError(name, f"{name} must be a size such as 2 GiB or 500 MB, not {value!r}") from None
