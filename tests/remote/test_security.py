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
from cryptography.hazmat.primitives.asymmetric import ec
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
        ({"tls_cert": good.cert, "tls_key": good.cert}, "cannot listen|no certificate"),
    ):
        with pytest.raises((BadQuery, BadFile), match=words):
            mt.serve(stage, listen="127.0.0.1:0", **options)  # type: ignore[arg-type]
    with pytest.raises(BadQuery, match="expected a client certificate with its key"):
        mt.connect(*resnet, "127.0.0.1:1", at="layer1", cert=good.cert)


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


def test_tokens_are_not_shown() -> None:
    assert "hidden" not in repr(ServerSecurity(token="hidden")) + repr(Security(token="hidden"))
