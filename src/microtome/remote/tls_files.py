"""Read the PEM files of TLS, and check them: gRPC reports an unusable one as an address that cannot be used."""

from __future__ import annotations

import re
import ssl
from typing import Literal, NamedTuple

from microtome.errors import BadFile
from microtome.files.reading import read_bytes
from microtome.results.metrics import advise

Kind = Literal["certificate", "private key"]

_MAX_BYTES = 1 << 20
_BEGIN = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----")
_BLOCK = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----.*?-----END \1-----", re.DOTALL)
_CERTIFICATES = ("CERTIFICATE", "X509 CERTIFICATE", "TRUSTED CERTIFICATE")
_ENCRYPTED = (b"BEGIN ENCRYPTED PRIVATE KEY", b"Proc-Type: 4,ENCRYPTED")
#: The reasons of OpenSSL for a key of another certificate, of the same type or of another one.
_MISMATCH = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
#: How to convert each kind from DER, the first byte of which is that of an ASN.1 sequence.
_FROM_DER = {"certificate": "openssl x509", "private key": "openssl pkey"}
_DER = b"\x30"
#: Why gRPC rejects a certificate that OpenSSL accepts.
UNUSABLE_KEY = (
    "gRPC cannot use a certificate of this type: expected one with a key of RSA, P-256, P-384, P-521 or Ed25519. "
    "Create another one"
)


class TlsFile(NamedTuple):
    """A PEM file, and the option that names it.

    Attributes:
        argument: The name of the argument in Python; that of the option follows from it.
        file: The name of the file.
    """

    argument: str
    file: str

    @property
    def option(self) -> str:
        """The argument, or on the command line the option."""
        return advise(f"{self.argument}=", f"--{self.argument.replace('_', '-')}")

    def read(self, kind: Kind) -> bytes:
        """Return the content.

        Raises:
            BadFile: It cannot be read, or is not a PEM file of this kind.
        """
        try:
            data = read_bytes(self.file, _MAX_BYTES)
        except BadFile as error:
            raise BadFile(f"{self.option}: {error}") from error
        if problem := _wrong_content(data, kind, self.file):
            raise BadFile(f"{self.option}: expected a {kind} in PEM format in {self.file!r}, got {problem}")
        if kind == "certificate":
            self._check_certificates(data)
        return data

    def _check_certificates(self, data: bytes) -> None:
        """Parse each certificate of the file."""
        blocks = [block[0] for block in _BLOCK.finditer(data) if block[1].decode() in _CERTIFICATES]
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=b"\n".join(blocks).decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise BadFile(f"{self.option}: {_corrupt('certificate', self.file, error)}") from error


def read_pair(certificate: TlsFile, key: TlsFile) -> tuple[bytes, bytes]:
    """Return the content of a certificate and that of its private key.

    Raises:
        BadFile: One of them is not what it should be, or the key is that of another certificate.
    """
    pair = certificate.read("certificate"), key.read("private key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("ALL:@SECLEVEL=0")  # whether a key is long enough is up to the two sides of a connection
    try:
        context.load_cert_chain(certificate.file, key.file, password="")
    except ssl.SSLError as error:
        if error.reason in _MISMATCH:
            raise BadFile(
                f"{key.option}: expected the private key of {certificate.file!r} ({certificate.option}) in "
                f"{key.file!r}, got that of another certificate. Pass the key that the certificate was requested with"
            ) from error
        raise BadFile(f"{key.option}: {_corrupt('private key', key.file, error)}") from error
    return pair


def _wrong_content(data: bytes, kind: Kind, file: str) -> str:
    """Return what a file has in place of a certificate or a key, and what to do; empty: it has one."""
    labels = [label.decode() for label in _BEGIN.findall(data)]
    if kind == "private key" and any(mark in data for mark in _ENCRYPTED):
        return f"an encrypted one. Decrypt it: openssl pkey -in {file} -out decrypted.key"
    if any(_is_kind(label, kind) for label in labels):
        return ""
    begins = f"Pass the file that begins with -----BEGIN {kind.upper()}-----"
    if labels:
        return f"{_describe_label(labels[0])}. {begins}"
    if data.startswith(_DER) and not data.isascii():
        return f"binary data. If it is DER, convert it: {_FROM_DER[kind]} -inform der -in {file} -out converted.pem"
    return f"{'a file without PEM data' if data.strip() else 'an empty file'}. {begins}"


def _describe_label(label: str) -> str:
    """Return the words for the label of a PEM block.

    >>> _describe_label("EC PRIVATE KEY")
    "a block 'EC PRIVATE KEY'"
    """
    simple = {"PRIVATE KEY", "PUBLIC KEY", "CERTIFICATE", "CERTIFICATE REQUEST"}
    return f"a {label.lower()}" if label in simple else f"a block {label!r}"


def _is_kind(label: str, kind: Kind) -> bool:
    if kind == "certificate":
        return label in _CERTIFICATES
    return label.endswith("PRIVATE KEY") and not label.startswith("OPENSSH")


def _corrupt(kind: Kind, file: str, error: Exception) -> str:
    reason = getattr(error, "reason", None) or str(error)
    return f"expected a {kind} in PEM format in {file!r}, got a corrupt one ({reason}). Copy or create it again"
