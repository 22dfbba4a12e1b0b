"""What is wrong with certificates: as files of a server, and as a SuperLink shows them to others."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from polyeps.errors import InputError

_SOON = timedelta(days=30)  # before a certificate expires
_CLOCKS = 5.0  # seconds by which a SuperNode may be ahead of its SuperLink; Flower turns it away beyond
_TIMEOUT = 5.0
_REASONS = {
    9: "its certificate is not valid yet: check the clocks of both machines",
    10: "its certificate has expired: make a new one on the server",
    18: "its certificate is not signed by this ca.crt: take the server's present one",
    19: "its certificate is not signed by this ca.crt: take the server's present one",
    20: "its certificate is not signed by this ca.crt: take the server's present one",
    62: "its certificate is for other names: add this one with `polyeps deploy init --host`",
    64: "its certificate is for other addresses: add this one with `polyeps deploy init --host`",
}


def read_certificate(path: Path) -> x509.Certificate:
    """Return the certificate of a file, if it is valid today and for a while."""
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as problem:
        raise InputError(f"{path} cannot be read: {problem.strerror}; make it with polyeps deploy init") from None
    except ValueError:
        raise InputError(f"{path} is not a certificate; make it with polyeps deploy init") from None
    now, end = datetime.now(UTC), found.not_valid_after_utc
    if found.not_valid_before_utc > now:
        raise InputError(f"{path} is valid from {found.not_valid_before_utc:%Y-%m-%d}; check this machine's clock")
    if end < now + _SOON:
        raise InputError(f"{path} {'has expired' if end < now else 'expires'} on {end:%Y-%m-%d}; make a new one")
    return found


def check_pair(kit: Path, host: str) -> str:
    """Check that a kit's certificates belong together, to the keys, and to the server's address."""
    authority, server = read_certificate(kit / "ca.crt"), read_certificate(kit / "server.crt")
    try:
        server.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        raise InputError(f"{kit / 'server.crt'} is not signed by ca.crt; put the two of one kit there") from None
    try:
        key = load_pem_private_key((kit / "server.key").read_bytes(), None)
    except OSError as problem:
        raise InputError(f"{kit / 'server.key'} cannot be read: {problem.strerror}; put back a copy of it") from None
    except (ValueError, TypeError):
        raise InputError(f"{kit / 'server.key'} is not a private key; put back a copy of it") from None
    if key.public_key() != server.public_key():
        raise InputError(f"{kit / 'server.key'} is not the key of server.crt; put the two of one kit there")
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    known = [str(name.value) for name in names]
    if host not in known:
        raise InputError(f"{kit / 'server.crt'} is for {', '.join(known)}, not for {host}; name it with --host")
    return f"ca.crt and server.crt belong together and are valid until {server.not_valid_after_utc:%Y-%m-%d} or longer"


def check_private(paths: Sequence[Path]) -> str:
    """Refuse files that other accounts can read."""
    for path in paths:
        try:
            mode = path.stat().st_mode
        except OSError as problem:
            raise InputError(f"{path} cannot be read: {problem.strerror}; check its folder and this account") from None
        if mode & 0o077:
            raise InputError(f"{path} can be read by other accounts; run `chmod 600 {path}`")
    return f"{', '.join(path.name for path in paths)}: for this account alone"


def look_at_superlink(address: str, authority: Path) -> str:
    """Connect to a SuperLink as a SuperNode would; return a sentence on its certificate and its clock."""
    read_certificate(authority)
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority)
    connection = http.client.HTTPSConnection(host, int(port), timeout=_TIMEOUT, context=context)
    try:
        before = datetime.now(UTC)
        connection.request("GET", "/")
        shown = connection.getresponse().getheader("date")
        after = datetime.now(UTC)
    except ssl.SSLCertVerificationError as problem:
        reason = _REASONS.get(problem.verify_code, f"its certificate is not accepted ({problem.verify_message})")
        raise InputError(f"the SuperLink at {address} is not trusted; {reason}") from None
    except (ssl.SSLError, http.client.HTTPException, ConnectionResetError):
        raise InputError(f"what listens on {address} is no SuperLink with TLS; stop it, or take another port") from None
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else "no answer"
        raise InputError(
            f"nothing answers on {address} ({reason}); start the SuperLink there, and open the port in firewalls"
        ) from None
    finally:
        connection.close()
    if shown is not None:
        theirs = parsedate_to_datetime(shown)  # in whole seconds
        ahead = max((before - theirs).total_seconds() - 1, (theirs - after).total_seconds())
        if ahead > _CLOCKS:
            raise InputError(
                f"this machine's clock and that of {address} differ by {ahead:.0f} s; let both follow a time server"
            )
    return f"the SuperLink at {address} shows a certificate of ca.crt, and the clocks agree"
