"""Who may speak to a server, and whom a client believes."""

from __future__ import annotations

import datetime
import inspect
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric import ed448 as ed448_keys
from cryptography.x509.oid import NameOID
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.errors import BadFile, BadQuery, RemoteError
from microtome.remote import protocol
from microtome.remote.connection import Connection
from microtome.remote.security import Security, ServerSecurity, is_loopback, read_token
from microtome.remote.server import Server

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


@dataclass
class Signed:
    """A certificate and its key, as files."""

    cert: str
    key: str


class Authority:
    """Signs certificates."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._certificate(name, self._key, NOW + 365 * DAY, is_ca=True)
        self.file = self._written("ca.pem", certificate.public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str, until: datetime.datetime = NOW + 30 * DAY) -> Signed:
        key = ec.generate_private_key(ec.SECP256R1())
        plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        certificate = self._certificate(name, key, until, is_ca=False)
        return Signed(
            self._written(f"{name}.pem", certificate.public_bytes(serialization.Encoding.PEM)),
            self._written(f"{name}.key", key.private_bytes(serialization.Encoding.PEM, *plain)),
        )

    def _written(self, name: str, data: bytes) -> str:
        file = self._folder / f"{self._name}-{name}"
        file.write_bytes(data)
        return str(file)

    def _certificate(self, name: str, key: Any, until: datetime.datetime, *, is_ca: bool) -> x509.Certificate:
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName(name)]
        made = x509.CertificateBuilder().serial_number(x509.random_serial_number())
        made = made.subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        made = made.issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self._name)]))
        made = made.public_key(key.public_key()).not_valid_before(NOW - 60 * DAY).not_valid_after(until)
        made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        made = made.add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        return made.sign(self._key, hashes.SHA256())


@pytest.fixture(scope="module")
def resnet() -> tuple[nn.Module, Tensor]:
    model, x = zoo.build("tiny-resnet")
    assert isinstance(x, Tensor)
    return model, x


@pytest.fixture(scope="module")
def stage(resnet: tuple[nn.Module, Tensor]) -> Any:
    return mt.split(*resnet, at="layer1")[-1]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("theirs"), "theirs")


@torch.no_grad()
def answers(server: Server, resnet: tuple[nn.Module, Tensor], **options: Any) -> bool:
    model, x = resnet
    with mt.connect(model, x, server.address, at="layer1", codec="raw", fallback=None, **options) as remote:
        return bool(remote(x).equal(model(x)))


def refusal(server: Server, resnet: tuple[nn.Module, Tensor], **options: Any) -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        answers(server, resnet, **{"timeout": 5, **options})
    return caught.value


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_only_who_knows_the_token_is_served(resnet: tuple[nn.Module, Tensor], stage: Any) -> None:
    with mt.serve(stage, listen="127.0.0.1:0", token="a secret") as server:
        assert answers(server, resnet, token="a secret")
        for wrong in (None, "another", "", "a secret ", "a secre"):
            error = refusal(server, resnet, token=wrong)
            assert error.kind == "REFUSED"
            problem = "requires a token: pass it" if wrong is None else "rejects the token: pass that of the server"
            assert str(error) == f"{server.address} {problem} with token="
        assert answers(server, resnet, token="a secret")


def test_no_method_is_served_without_the_token_and_nothing_is_told(stage: Any) -> None:
    with mt.serve(stage, listen="127.0.0.1:0", token="a secret") as server:
        with grpc.insecure_channel(server.address) as channel:
            for name, method in protocol.METHODS.items():
                kind = channel.stream_stream if method.is_stream else channel.unary_unary
                call = kind(f"/{protocol.SERVICE}/{name}")
                with pytest.raises(grpc.RpcError) as caught:
                    list(call(iter([b""]), timeout=120)) if method.is_stream else call(b"", timeout=120)
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
                assert "secret" not in caught.value.details()
        shown = server.metrics.registry.get_sample_value(
            "microtome_refused_streams_total", {"reason": "unauthenticated"}
        )
        assert shown == len(protocol.METHODS)


@pytest.mark.parametrize("token", ["é", "two\nlines", "\0"])
def test_a_token_that_cannot_be_sent_is_refused_at_once(resnet: tuple[nn.Module, Tensor], token: str) -> None:
    with pytest.raises(BadQuery, match="expected a token of one line of ASCII"):
        mt.connect(*resnet, "127.0.0.1:1", at="layer1", token=token)


@pytest.mark.parametrize(("token", "got"), [(123, "int"), (b"hello", "bytes")])
def test_a_token_that_is_no_text_is_refused(resnet: tuple[nn.Module, Tensor], token: Any, got: str) -> None:
    with pytest.raises(BadQuery, match=f"^expected a token as a str, got {got}$"):
        mt.connect(*resnet, "127.0.0.1:1", at="layer1", token=token)
    with pytest.raises(BadQuery, match=f"^expected a token as a str, got {got}$"):
        mt.serve(*resnet, listen="127.0.0.1:0", token=token)


def test_a_token_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("  a secret\n")
    assert read_token(str(file)) == "a secret"
    for bad in ("", "\n", "é", "two\nlines"):
        file.write_text(bad)
        with pytest.raises(BadFile, match="expected a token of one line of ASCII in"):
            read_token(str(file))
    with pytest.raises(BadFile, match="cannot read .*: No such file"):
        read_token(str(tmp_path / "none"))


# -- certificates ------------------------------------------------------------------------------------------------------


def served(stage: Any, signed: Signed, **options: Any) -> Server:
    return mt.serve(stage, listen="127.0.0.1:0", tls_cert=signed.cert, tls_key=signed.key, **options)


def test_a_certificate_that_is_believed(resnet: tuple[nn.Module, Tensor], stage: Any, ours: Authority) -> None:
    with served(stage, ours.sign("good"), token="t") as server:
        assert answers(server, resnet, ca=ours.file, token="t")
        assert refusal(server, resnet, ca=ours.file).kind == "REFUSED"


def test_the_name_in_a_certificate_counts(resnet: tuple[nn.Module, Tensor], stage: Any, ours: Authority) -> None:
    with served(stage, ours.sign("tail.example")) as server:
        assert answers(server, resnet, ca=ours.file, server_name="tail.example")
        error = refusal(server, resnet, ca=ours.file, server_name="another.example", timeout=60)
    assert error.kind == "REFUSED"  # at once
    assert str(error).endswith("the certificate is of another host. Pass the name in it with server_name=")


@pytest.mark.parametrize(
    ("sign", "words"),
    [
        (lambda ours, theirs: ours.sign("old", NOW - DAY), "certificate has expired"),
        (lambda ours, theirs: theirs.sign("foreign"), "unable to get local issuer certificate"),
    ],
)
def test_a_certificate_that_is_not_believed_is_refused_at_once_with_the_reason(
    resnet: tuple[nn.Module, Tensor],
    stage: Any,
    ours: Authority,
    theirs: Authority,
    sign: Callable[[Authority, Authority], Signed],
    words: str,
) -> None:
    with served(stage, sign(ours, theirs)) as server:
        error = refusal(server, resnet, ca=ours.file, timeout=60)
    assert error.kind == "REFUSED"
    assert "TLS verification failed" in str(error)
    assert words in str(error)


def test_a_client_without_tls_is_not_served_by_a_server_with_it(
    resnet: tuple[nn.Module, Tensor], stage: Any, ours: Authority
) -> None:
    with served(stage, ours.sign("good")) as server:
        error = refusal(server, resnet, timeout=1)
    assert error.kind == "UNREACHABLE"
    assert str(error).endswith("closes the connection during the handshake. If it uses TLS, add ca= or tls=True")


def test_a_client_with_tls_does_not_speak_to_a_server_without(
    resnet: tuple[nn.Module, Tensor], stage: Any, ours: Authority
) -> None:
    with mt.serve(stage, listen="127.0.0.1:0") as server:
        error = refusal(server, resnet, ca=ours.file, timeout=60)
        assert error.kind == "REFUSED"  # at once
        options = "start the server with tls_cert=, or leave out tls=, ca= and cert="
        assert str(error) == f"{server.address} does not use TLS: {options}"


def test_clients_show_a_certificate_where_one_is_asked_for(
    resnet: tuple[nn.Module, Tensor], stage: Any, ours: Authority, theirs: Authority
) -> None:
    mine, foreign, old = ours.sign("client"), theirs.sign("client"), ours.sign("late", NOW - DAY)
    with served(stage, ours.sign("good"), client_ca=ours.file) as server:
        assert answers(server, resnet, ca=ours.file, cert=mine.cert, key=mine.key)
        for shown, words in (
            ({}, r"If it requires a client certificate, add cert= and key="),
            ({"cert": foreign.cert, "key": foreign.key}, "it may reject the client certificate"),
            ({"cert": old.cert, "key": old.key}, "it may reject the client certificate"),
        ):
            error = refusal(server, resnet, ca=ours.file, timeout=1, **shown)
            assert (error.kind, str(error).endswith(words)) == ("UNREACHABLE", True), error
        assert answers(server, resnet, ca=ours.file, cert=mine.cert, key=mine.key)


def test_files_that_make_no_sense_are_refused(
    resnet: tuple[nn.Module, Tensor], stage: Any, ours: Authority, tmp_path: Path
) -> None:
    good = ours.sign("good")
    for options, words in (
        ({"tls_cert": good.cert}, "TLS needs both"),
        ({"tls_key": good.key}, "TLS needs both"),
        ({"client_ca": ours.file}, "client certificates need TLS"),
        ({"tls_cert": str(tmp_path / "none"), "tls_key": good.key}, "cannot read"),
        ({"tls_cert": good.cert, "tls_key": good.cert}, "tls_key=: expected a private key"),
    ):
        with pytest.raises((BadQuery, BadFile), match=words):
            mt.serve(stage, listen="127.0.0.1:0", **options)  # type: ignore[arg-type]
    with pytest.raises(BadQuery, match="expected a client certificate with its key"):
        mt.connect(*resnet, "127.0.0.1:1", at="layer1", cert=good.cert)


# -- certificates and keys that are not what their option expects ----------------------------------------------------

SERVER, CLIENT = ("tls_cert", "tls_key", "client_ca"), ("cert", "key", "ca")


@pytest.fixture(scope="module")
def unusable(ours: Authority, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files that are neither a certificate nor a key that gRPC can use, by name."""
    folder, good = tmp_path_factory.mktemp("unusable"), ours.sign("good")
    cert, key = Path(good.cert).read_bytes(), Path(good.key).read_bytes()
    encoding, form = serialization.Encoding, serialization.PrivateFormat
    loaded = serialization.load_pem_private_key(key, None)
    encrypted = serialization.BestAvailableEncryption(b"secret")
    contents = {
        "token": b"0123456789abcdef\n",
        "empty": b"\n",
        "der": x509.load_pem_x509_certificate(cert).public_bytes(encoding.DER),
        "corrupt certificate": cert.replace(cert.splitlines()[2], b"A" * len(cert.splitlines()[2])),
        "corrupt key": key.replace(key.splitlines()[2], b"A" * len(key.splitlines()[2])),
        "truncated certificate": cert[:200],
        "request": b"-----BEGIN CERTIFICATE REQUEST-----\nMA==\n-----END CERTIFICATE REQUEST-----\n",
        "encrypted key": loaded.private_bytes(encoding.PEM, form.PKCS8, encrypted),
        "older encrypted key": loaded.private_bytes(encoding.PEM, form.TraditionalOpenSSL, encrypted),
        "OpenSSH key": loaded.private_bytes(encoding.PEM, form.OpenSSH, serialization.NoEncryption()),
    }
    files = {"key": good.key, "certificate": good.cert, "another key": ours.sign("other").key}
    for name, content in contents.items():
        files[name] = str(folder / name.replace(" ", "-"))
        Path(files[name]).write_bytes(content)
    rsa_key = rsa.generate_private_key(65537, 2048)
    files["RSA key"] = str(folder / "rsa.key")
    Path(files["RSA key"]).write_bytes(rsa_key.private_bytes(encoding.PEM, form.PKCS8, serialization.NoEncryption()))
    return files


@pytest.mark.parametrize("arguments", [SERVER, CLIENT], ids=["server", "client"])
@pytest.mark.parametrize(
    ("which", "file", "message"),
    [
        (0, "token", "expected a certificate in PEM format in '.*token', got a file without PEM data. Pass the file"),
        (0, "empty", "got an empty file. Pass the file that begins with -----BEGIN CERTIFICATE-----"),
        (0, "der", "got binary data. If it is DER, convert it: openssl x509 -inform der -in .*der -out"),
        (0, "key", "expected a certificate in PEM .*, got a private key. Pass the file that begins with"),
        (0, "request", "got a certificate request. Pass the file that begins with -----BEGIN CERTIFICATE-----"),
        (0, "corrupt certificate", r"got a corrupt one \(.*\). Copy or create it again"),
        (0, "truncated certificate", r"got a corrupt one \(.*\). Copy or create it again"),
        (1, "token", "expected a private key in PEM format in '.*token', got a file without PEM data"),
        (1, "certificate", "got a certificate. Pass the file that begins with -----BEGIN PRIVATE KEY-----"),
        (1, "OpenSSH key", "got a block 'OPENSSH PRIVATE KEY'. Pass the file"),
        (1, "corrupt key", r"got a corrupt one \(.*\). Copy or create it again"),
        (1, "encrypted key", "got an encrypted one. Decrypt it: openssl pkey -in "),
        (1, "older encrypted key", "got an encrypted one. Decrypt it: openssl pkey -in "),
        (1, "another key", r"expected the private key of '.*' \({cert}=\) in '.*', got that of another certificate"),
        (1, "RSA key", r"expected the private key of '.*' \({cert}=\) in '.*', got that of another certificate"),
        (2, "token", "expected a certificate in PEM format in '.*token', got a file without PEM data"),
        (2, "key", "got a private key"),
        (2, "corrupt certificate", "got a corrupt one"),
    ],
)
def test_a_tls_file_that_is_not_what_its_option_expects_is_named(
    ours: Authority, unusable: dict[str, str], arguments: tuple[str, ...], which: int, file: str, message: str
) -> None:
    files = dict(zip(arguments, (unusable["certificate"], unusable["key"], ours.file), strict=True))
    security: Any = ServerSecurity if arguments == SERVER else Security
    assert security(**files).credentials() is not None
    files[arguments[which]] = unusable[file]
    with pytest.raises(BadFile, match=f"^{arguments[which]}=: .*{message.replace('{cert}', arguments[0])}"):
        security(**files).credentials()


def test_a_server_names_its_tls_files_before_it_analyzes_the_model(unusable: dict[str, str]) -> None:
    with pytest.raises(BadFile, match="^tls_key=: expected the private key of '.*', got that of another"):
        mt.serve(
            nn.Identity(), object(), tls_cert=unusable["certificate"], tls_key=unusable["another key"], client_ca=None
        )


def test_certificates_and_keys_may_share_a_file_with_comments(ours: Authority, tmp_path: Path) -> None:
    good, both = ours.sign("good"), tmp_path / "both.pem"
    both.write_bytes("# für den Server\n".encode() + b"".join(Path(one).read_bytes() for one in (good.key, good.cert)))
    assert ServerSecurity(str(both), str(both), str(both)).credentials() is not None


@pytest.fixture
def ed448(tmp_path: Path) -> Signed:
    """A certificate that OpenSSL accepts and gRPC does not."""
    key = ed448_keys.Ed448PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ed448")])
    made = x509.CertificateBuilder().serial_number(1).subject_name(name).issuer_name(name)
    made = made.public_key(key.public_key()).not_valid_before(NOW - DAY).not_valid_after(NOW + DAY)
    files = Signed(str(tmp_path / "ed448.pem"), str(tmp_path / "ed448.key"))
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    Path(files.cert).write_bytes(made.sign(key, None).public_bytes(pem))
    Path(files.key).write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return files


def test_a_certificate_that_only_grpc_rejects_is_not_blamed_on_the_address(
    resnet: tuple[nn.Module, Tensor], stage: Any, ours: Authority, ed448: Signed
) -> None:
    with pytest.raises(
        BadFile, match="ed448.pem': gRPC cannot use a certificate of this type: expected one with a key"
    ):
        served(stage, ed448)
    with served(stage, ours.sign("good")) as server:
        error = refusal(server, resnet, ca=ours.file, cert=ed448.cert, key=ed448.key, timeout=60)
        assert error.kind == "REFUSED"  # at once
        assert "TLS failed: ca= or cert=: gRPC cannot use a certificate of this type" in str(error)
        good = ours.sign("good")
        with pytest.raises(BadQuery, match="cannot listen on .*: the port is in use"):
            mt.serve(stage, listen=server.address, tls_cert=good.cert, tls_key=good.key)


# -- where it listens --------------------------------------------------------------------------------------------------


def test_it_listens_on_loopback_by_default() -> None:
    assert inspect.signature(mt.serve).parameters["listen"].default == "127.0.0.1:7070"


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        ("127.0.0.1:7070", True),
        ("127.8.8.8:0", True),
        ("localhost:7070", True),
        ("[::1]:7070", True),
        ("unix:/tmp/microtome", True),
        ("unix-abstract:microtome", True),
        ("0.0.0.0:7070", False),
        ("[::]:7070", False),
        (":7070", False),
        ("192.168.1.1:7070", False),
        ("unix.example.org:7070", False),
        ("localhost.example.org:7070", False),
    ],
)
def test_what_loopback_is(listen: str, expected: bool) -> None:
    assert is_loopback(listen) is expected


@pytest.mark.parametrize(
    ("has_tls", "token", "missing"),
    [
        (False, None, "no TLS and no token: anybody can use the model, read .* Add tls_cert= and tls_key=, and token="),
        (False, "t", "no TLS: anybody on the way can read what is sent, with the token, .* Add tls_cert= and tls_key="),
        (True, None, "no token: anybody can use the model. Add token="),
        (True, "t", None),
    ],
)
def test_it_warns_when_it_can_be_reached_from_elsewhere_unprotected(
    stage: Any, ours: Authority, recwarn: pytest.WarningsRecorder, has_tls: bool, token: str | None, missing: str | None
) -> None:
    signed = ours.sign("good")
    files = {"tls_cert": signed.cert, "tls_key": signed.key} if has_tls else {}
    if missing is None:
        mt.serve(stage, listen="0.0.0.0:0", token=token, **files).stop()  # type: ignore[arg-type]
        assert [one for one in recwarn if issubclass(one.category, RuntimeWarning)] == []
        return
    with pytest.warns(RuntimeWarning, match=f"can be reached from other machines, and there is {missing}") as seen:
        mt.serve(stage, listen="0.0.0.0:0", token=token, **files).stop()  # type: ignore[arg-type]
    assert seen[0].filename == __file__


def test_a_client_certificate_is_as_good_as_a_token() -> None:
    assert ServerSecurity("cert", "key", client_ca="ca").risks() == ""


def test_what_can_be_no_token_is_refused_on_both_sides() -> None:
    with pytest.raises(BadQuery, match="expected a token of one line of ASCII, got an empty one"):
        ServerSecurity(token="")
    for token in ("two\nlines", "schlüssel"):
        with pytest.raises(BadQuery, match="expected a token of one line of ASCII, got other characters"):
            ServerSecurity(token=token)
        with pytest.raises(BadQuery, match="expected a token of one line of ASCII, got other characters"):
            Connection("127.0.0.1:1", Security(token=token))
    with pytest.raises(BadQuery, match=r"without a line break at its end: pass token.strip\(\)"):
        ServerSecurity(token="a secret\n")


def test_tokens_are_not_shown() -> None:
    assert "hidden" not in repr(ServerSecurity(token="hidden")) + repr(Security(token="hidden"))
