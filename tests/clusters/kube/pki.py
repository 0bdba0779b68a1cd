"""The certificates and keys of a Kubernetes cluster of the tests."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)
_PEM = serialization.Encoding.PEM


class Authority:
    """Signs for one cluster; its files stand in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def certificate(self) -> Path:
        return self.directory / "ca.crt"

    @property
    def token_key(self) -> Path:
        """With which the tokens of service accounts are signed."""
        return self.directory / "sa.key"

    @property
    def token_public_key(self) -> Path:
        return self.directory / "sa.pub"

    def create(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True)
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("accel-test-ca", ())
        built = _builder(name, name, key.public_key())
        built = built.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        _write_key(self.directory / "ca.key", key)
        self.certificate.write_bytes(built.sign(key, hashes.SHA256()).public_bytes(_PEM))
        signing = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        _write_key(self.token_key, signing)
        public = signing.public_key()
        self.token_public_key.write_bytes(public.public_bytes(_PEM, serialization.PublicFormat.SubjectPublicKeyInfo))

    def issue(
        self, name: str, groups: Sequence[str] = (), addresses: Sequence[str] = (), names: Sequence[str] = (),
        *, expired: bool = False,
    ) -> tuple[Path, Path]:  # fmt: skip
        """The files of a certificate and its key: for a user of this name, or for a server at these addresses."""
        file = self.directory / (name.replace(":", "_").replace("/", "_") + ".crt")
        ca_key = serialization.load_pem_private_key((self.directory / "ca.key").read_bytes(), None)
        assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
        ca = x509.load_pem_x509_certificate(self.certificate.read_bytes())
        key = ec.generate_private_key(ec.SECP256R1())
        built = _builder(_name(name, groups), ca.subject, key.public_key(), days=-1 if expired else 30)
        if addresses or names:
            alternatives: list[x509.GeneralName] = [x509.DNSName(each) for each in names]
            alternatives += [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
            built = built.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        _write_key(file.with_suffix(".key"), key)
        file.write_bytes(built.sign(ca_key, hashes.SHA256()).public_bytes(_PEM))
        return file, file.with_suffix(".key")

    def aged(self, token: str, seconds: int) -> str:
        """The token of a service account as if it had ended so many seconds ago."""
        head, claims, _ = token.split(".")
        told: dict[str, Any] = json.loads(base64.urlsafe_b64decode(claims + "=="))
        ended = int(datetime.datetime.now(datetime.timezone.utc).timestamp()) - seconds
        told |= {"exp": ended, "iat": ended - 600, "nbf": ended - 600}
        signed = f"{head}.{_encoded(json.dumps(told).encode())}"
        key = serialization.load_pem_private_key(self.token_key.read_bytes(), None)
        assert isinstance(key, rsa.RSAPrivateKey)
        return f"{signed}.{_encoded(key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256()))}"


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _name(common: str, groups: Sequence[str]) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int = 30
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    built = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
    return built.not_valid_before(now - 2 * _DAY).not_valid_after(now + days * _DAY)


def _write_key(file: Path, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> None:
    form, secret = serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    file.touch(mode=0o600)
    file.write_bytes(key.private_bytes(_PEM, form, secret))
