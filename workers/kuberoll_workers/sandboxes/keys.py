"""Keys by which sandboxes know whom to obey: a sandbox has the certificate, which is public, and a handle the key."""

from __future__ import annotations

import datetime
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from kuberoll_workers.sandboxes.guest.frames import HOST_NAME

# Clocks of machines differ: what is trusted is one certificate, and no authority.
_BEGIN, _END = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC), datetime.datetime(9999, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class Key:
    """A key and its certificate, both PEM."""

    certificate: str
    private: str = field(repr=False)


def make_key() -> Key:
    """Make a key, and a certificate that it signs itself."""
    # Only who makes sandboxes needs the library.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, HOST_NAME)])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), _BEGIN, _END)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Key(certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode())


def context_of(key: Key) -> ssl.SSLContext:
    """The TLS context in which a handle shows a key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Sessions are not resumed.
    context.num_tickets = 0
    with tempfile.TemporaryDirectory(prefix="kuberoll-key-") as directory:
        # OpenSSL reads files only.
        place = Path(directory) / "key.pem"
        place.touch(mode=0o600)
        place.write_text(key.private + key.certificate)
        context.load_cert_chain(place)
    return context
