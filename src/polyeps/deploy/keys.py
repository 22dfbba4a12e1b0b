"""Keys and certificates of a federation: Ed25519 to sign contracts and for silos' identities, P-384 for SuperNodes.

A private key is a PEM file that only its owner may read. A public key of ours is 64 hexadecimal digits.
"""

from __future__ import annotations

import ipaddress
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP384R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import NameOID

from polyeps.errors import InputError
from polyeps.ledger.head_file import replace_file

_HEX_KEY = re.compile(r"[0-9a-f]{64}")
_YEARS = timedelta(days=3 * 365)  # that a certificate is valid
_Key = TypeVar("_Key", Ed25519PrivateKey, EllipticCurvePrivateKey)


def check_public_key(place: str, key: str) -> str:
    """Return a public key as it is written; refuse anything but 64 hexadecimal digits."""
    if not isinstance(key, str) or not _HEX_KEY.fullmatch(key):
        raise InputError(f"{place} is not a public key; it must be 64 hexadecimal digits, as `polyeps deploy` prints")
    return key


def public_of(key: Ed25519PrivateKey) -> str:
    """Return the public key of a private one, as it is written."""
    return key.public_key().public_bytes_raw().hex()


def verifies(public: str, signature: bytes, content: bytes) -> bool:
    """Return whether a signature of some bytes is that of a public key."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True


def read_key(path: Path) -> Ed25519PrivateKey:
    """Return the Ed25519 key of a file; refuse one that others can read."""
    mode, content = _read(path, "key")
    if mode & 0o077:
        raise InputError(f"the key {path} can be read by other accounts; run `chmod 600 {path}`")
    try:
        key = load_pem_private_key(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"{path} holds no Ed25519 key; make one with `polyeps deploy init`")
    return key


def read_secret(path: Path) -> bytes:
    """Return the secret of a file; refuse one that other accounts can read."""
    mode, content = _read(path, "secret")
    if mode & 0o007 or not content:
        raise InputError(f"the secret {path} is empty or can be read by everybody; run `chmod 640 {path}`")
    return content


def _read(path: Path, what: str) -> tuple[int, bytes]:
    """Return the mode and the content of a file."""
    try:
        return path.stat().st_mode, path.read_bytes()
    except OSError as problem:
        reason = f"{problem.strerror}; make one with `polyeps deploy init`"
        raise InputError(f"the {what} {path} cannot be read: {reason}") from None


def new_key(path: Path) -> Ed25519PrivateKey:
    """Write a new Ed25519 key to a file that must not exist."""
    return _written(path, Ed25519PrivateKey.generate(), PrivateFormat.PKCS8)


def new_node_key(path: Path) -> None:
    """Write a new P-384 key for a SuperNode, and its public half beside it, as `ssh-keygen` would."""
    key = _written(path, generate_private_key(SECP384R1()), PrivateFormat.OpenSSH)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public + b"\n")


def read_node_key(path: Path) -> EllipticCurvePublicKey:
    """Return the public key of a SuperNode."""
    try:
        key = load_ssh_public_key(path.read_bytes())
    except OSError as problem:
        raise InputError(f"{path} cannot be read: {problem.strerror}; give the node.pub of a silo") from None
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, EllipticCurvePublicKey):
        raise InputError(f"{path} is not the public key of a SuperNode; give the node.pub of a silo")
    return key


def _written(path: Path, key: _Key, form: PrivateFormat) -> _Key:
    _refuse_existing(path)
    replace_file(path, key.private_bytes(Encoding.PEM, form, NoEncryption()))
    return key


def _refuse_existing(path: Path) -> None:
    """Refuse to replace a key."""
    if path.exists() or path.is_symlink():
        raise InputError(f"{path} exists already; a key is never replaced: remove it first, if you mean to")


def new_authority(folder: Path, name: str) -> None:
    """Write a new certificate authority: ca.crt, and ca.key to sign certificates with."""
    key = generate_private_key(SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} CA")])
    certificate = (
        _builder(subject, subject, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
        .sign(key, hashes.SHA384())
    )
    _write_pair(folder, "ca", key, certificate)


def new_certificate(folder: Path, name: str, hosts: list[str]) -> None:
    """Write server.crt and server.key for some host names and addresses, signed by the authority of the folder."""
    _refuse_existing(folder / "server.key")
    try:
        issuer = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        authority = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except (OSError, ValueError) as problem:
        raise InputError(f"{folder} holds no certificate authority ({problem}); make one first") from None
    assert isinstance(authority, EllipticCurvePrivateKey)
    key = generate_private_key(SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        _builder(subject, issuer.subject, key)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(authority, hashes.SHA384())
    )
    _write_pair(folder, "server", key, certificate)


def _builder(subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + _YEARS)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(authority: bool) -> x509.KeyUsage:
    others = "content_commitment key_encipherment data_encipherment key_agreement encipher_only decipher_only"
    unused = dict.fromkeys(others.split(), False)
    return x509.KeyUsage(digital_signature=True, key_cert_sign=authority, crl_sign=authority, **unused)


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_pair(folder: Path, name: str, key: EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    _written(folder / f"{name}.key", key, PrivateFormat.PKCS8)
    (folder / f"{name}.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
