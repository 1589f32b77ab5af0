"""Make keys and certificates for parties and a coordinator (``farthing keys``).

    FOLDER/coordinator/   coordinator.key       signs questions (Ed25519)
                          public.toml           its public half, for the policies of guards
                          ca.pem ca.key         who signed the certificate below; parties get ca.pem
                          server.pem server.key the certificate that the coordinator's machine shows
    FOLDER/NAME/          guard.key             signs answers (Ed25519)
                          node.key              Flower's own (ECDSA, P-384)
                          public.toml           both public halves, for the coordinator

A private key stays on the machine where it was made. Existing files are never overwritten; only their owner
can read the new ones.

`renew` replaces the keys of a party, or the coordinator's signing key and certificate (its authority stays,
so that parties need no other ca.pem). A certificate is valid for 825 days, the authority for 20 years. The
old folder is kept as ``NAME.retired-1``. To revoke a key, renew it and hand out the new public half: a
coordinator that is started again with it takes no answer under the old key, a guard whose policy no longer
lists a coordinator's key takes no question under it. Ledgers stay as they are.
"""

import contextlib
import datetime
import ipaddress
import itertools
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from farthing.deploy import toml_settings
from farthing.deploy.messages.signed import Signer, checked_name, public_key
from farthing.errors import InvalidValue
from farthing.ledger.journal_head import narrow

COORDINATOR = "coordinator"
_CERTIFICATE = datetime.timedelta(days=825)  # some clients reject certificates for longer
_AUTHORITY = datetime.timedelta(days=20 * 365)  # it signs all renewed certificates: parties keep their ca.pem


@dataclass(frozen=True, slots=True)
class PublicKeys:
    """A party's public keys: its guard's, and its node's in OpenSSH's format."""

    key: bytes
    node: str

    @classmethod
    def load(cls, path: Path) -> "PublicKeys":
        """Return the keys in a public.toml."""
        found = toml_settings.read(path, f"a party's public.toml ({os.fspath(path)!r})")
        node = found.get("node")
        if set(found) != {"key", "node"} or not isinstance(node, str):
            raise InvalidValue(f"a party's public.toml holds key and node, {str(path)!r} does not")
        try:
            loaded = serialization.load_ssh_public_key(node.encode())
        except (ValueError, UnicodeEncodeError):
            loaded = None
        if not isinstance(loaded, ec.EllipticCurvePublicKey):
            raise InvalidValue(f"node in {str(path)!r} must be an ECDSA key as OpenSSH writes it")
        return cls(public_key(found["key"]), _written(loaded))


def check_authority(path: Path) -> None:
    """Refuse a file that holds no certificate."""
    content = _content(path)
    try:
        x509.load_pem_x509_certificate(content)
    except ValueError:
        raise InvalidValue(f"authority must be the coordinator's ca.pem, {str(path)!r} is not") from None


def check_node_key(path: Path) -> None:
    """Refuse a file that holds no key of a node; one that others can open is restricted to its owner."""
    content = _content(path)
    narrow(os.fspath(path))
    try:
        loaded: object = serialization.load_ssh_private_key(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # or it is encrypted
        loaded = None
    if not isinstance(loaded, ec.EllipticCurvePrivateKey):
        raise InvalidValue(f"node must be a node.key that farthing keys made, {str(path)!r} is not")


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidValue(f"{str(path)!r} cannot be read: {error.strerror}") from None


def make(folder: Path, parties: Sequence[str], hosts: Sequence[str], coordinator: bool) -> list[Path]:
    """Make keys for parties, and for a coordinator reached under ``hosts``; returns the new folders."""
    names = [checked_name(party=name) for name in parties]
    if len(set(names)) != len(names) or COORDINATOR in names:
        raise InvalidValue(f"parties must have a name each, and none is called {COORDINATOR}: got {names}")
    wanted = [folder / name for name in ([COORDINATOR] if coordinator else []) + names]
    if not wanted:
        raise InvalidValue("give --parties NAMES, --host NAMES, or both; got neither")
    alternatives = [_alternative(host) for host in (*hosts, "localhost", "127.0.0.1", "::1")]
    existing = [place for place in wanted if place.exists()]
    if existing:
        raise InvalidValue(f"keys are never overwritten: {str(existing[0])!r} exists")
    made: list[Path] = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for place in wanted:
            place.mkdir(mode=0o700)
            made.append(place)
            if place.name == COORDINATOR and coordinator:
                _coordinator(place, alternatives)
            else:
                _party(place)
    except BaseException as error:
        for place in made:
            shutil.rmtree(place, ignore_errors=True)
        if isinstance(error, OSError):
            raise InvalidValue(f"keys cannot be written to {str(folder)!r}: {error.strerror}") from None
        raise
    return made


def renew(folder: Path, names: Sequence[str]) -> list[Path]:
    """Give parties, or the coordinator, new keys; returns their folders. The old ones are kept."""
    places = [folder / checked_name(party=name) for name in names]
    if not places:
        raise InvalidValue("give the names of those whose keys are renewed")
    for place in places:
        with contextlib.suppress(OSError):  # a crash left the old keys aside, and the new ones not yet there
            _fresh(place, whole=True).rename(place)
        if not (place / "public.toml").is_file():
            raise InvalidValue(f"there are no keys to renew in {str(place)!r}")
    for place in places:
        fresh = _fresh(place)
        try:
            for left in (fresh, _fresh(place, whole=True)):  # by a crash
                shutil.rmtree(left, ignore_errors=True)
            fresh.mkdir(mode=0o700)
            if (place / "coordinator.key").exists():
                _renewed_coordinator(place, fresh)
            else:
                _party(fresh)
            fresh.rename(_fresh(place, whole=True))
            place.rename(_retired(place))
            _fresh(place, whole=True).rename(place)
        except OSError as error:
            raise InvalidValue(f"keys cannot be written to {str(folder)!r}: {error.strerror}") from None
    return places


def _fresh(place: Path, whole: bool = False) -> Path:
    """Return where new keys are made, and where they lie once all are; no party has such a name."""
    return place.with_name(f"{place.name}~{'whole' if whole else 'new'}")


def _retired(place: Path) -> Path:
    """Return a name for the old keys."""
    numbers = itertools.count(1)
    return next(path for n in numbers if not (path := place.with_name(f"{place.name}.retired-{n}")).exists())


def _renewed_coordinator(place: Path, fresh: Path) -> None:
    """Make a new signing key, and a new certificate by the same authority for the same names."""
    for name in ("ca.pem", "ca.key"):
        _write(fresh / name, (place / name).read_bytes())
    loaded = serialization.load_pem_private_key((place / "ca.key").read_bytes(), None)
    assert isinstance(loaded, ec.EllipticCurvePrivateKey)
    old = x509.load_pem_x509_certificate((place / "server.pem").read_bytes())
    names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    _signing(fresh)
    _certificate(fresh, loaded, old.issuer, list(names))


def _party(place: Path) -> None:
    guard, node = Signer.new(), ec.generate_private_key(ec.SECP384R1())
    guard.save(place / "guard.key")
    _write(place / "node.key", _pem(node, serialization.PrivateFormat.OpenSSH))
    public = _written(node.public_key())
    _write(place / "public.toml", f'key = "{guard.public.hex()}"\nnode = "{public}"\n'.encode())


def _written(key: ec.EllipticCurvePublicKey) -> str:
    """Return a node's key in OpenSSH's format, without a comment: equal keys are equal texts."""
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def _coordinator(place: Path, alternatives: list[x509.GeneralName]) -> None:
    _signing(place)
    authority = ec.generate_private_key(ec.SECP384R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "farthing's own authority")])
    root = (
        _begun(issuer, issuer, authority.public_key(), authority.public_key(), _AUTHORITY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(authority, hashes.SHA384())
    )
    _write(place / "ca.pem", root.public_bytes(serialization.Encoding.PEM))
    _write(place / "ca.key", _pem(authority, serialization.PrivateFormat.PKCS8))
    _certificate(place, authority, issuer, alternatives)


def _signing(place: Path) -> None:
    """Make the key that signs questions."""
    signer = Signer.new()
    signer.save(place / "coordinator.key")
    _write(place / "public.toml", f'key = "{signer.public.hex()}"\n'.encode())


def _certificate(
    place: Path,
    authority: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    alternatives: list[x509.GeneralName],
) -> None:
    """Make the certificate that the coordinator's machine shows."""
    server = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "farthing coordinator")])
    leaf = (
        _begun(subject, issuer, server.public_key(), authority.public_key(), _CERTIFICATE)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .sign(authority, hashes.SHA384())
    )
    _write(place / "server.pem", leaf.public_bytes(serialization.Encoding.PEM))
    _write(place / "server.key", _pem(server, serialization.PrivateFormat.PKCS8))


def _begun(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    authority: ec.EllipticCurvePublicKey,
    lasting: datetime.timedelta,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + lasting)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority), critical=False)
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(host: str) -> x509.GeneralName:
    """Return a host as a certificate lists it: an address or a DNS name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.fullmatch(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?", host):
        raise InvalidValue(f"a host must be an address or a DNS name in ASCII, got {host!r}")
    return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
