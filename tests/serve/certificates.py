"""Certificates for tests: an authority, and what it vouches for."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """Signs certificates."""

    def __init__(self, name: str) -> None:
        self.name, self.key = _named(name), ec.generate_private_key(ec.SECP256R1())
        builder = _begun(self.name, self.name, self.key)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.certificate = builder.sign(self.key, hashes.SHA256())

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, name: str) -> tuple[bytes, bytes]:
        """A certificate for localhost and 127.0.0.1, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = _begun(_named(name), self.name, key).add_extension(x509.SubjectAlternativeName(names), critical=False)
        made = builder.sign(self.key, hashes.SHA256())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return made.public_bytes(serialization.Encoding.PEM), private

    def write(self, name: str, folder: Path) -> tuple[str, str]:
        """The same in files NAME.pem and NAME.key, which are replaced at once."""
        paths = []
        for suffix, data in zip(("pem", "key"), self.issue(name), strict=True):
            path = folder / f"{name}.{suffix}"
            new = folder / f"{name}.{suffix}.new"
            new.write_bytes(data)
            new.replace(path)
            paths.append(str(path))
        return paths[0], paths[1]


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _begun(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + datetime.timedelta(days=1))
