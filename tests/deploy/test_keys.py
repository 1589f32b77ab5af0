"""Keys and certificates: new, whole, and for their owner only."""

import datetime
import socket
import ssl
import stat
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from farthing.cli.main import main
from farthing.deploy import keys as keyring
from farthing.deploy.keys import PublicKeys
from farthing.deploy.messages.signed import Signer
from farthing.errors import InvalidValue


@pytest.fixture
def folder(tmp_path):
    keyring.make(tmp_path / "keys", ["a", "b"], ["wards.example", "192.0.2.7"], coordinator=True)
    return tmp_path / "keys"


def test_everything_is_there_and_nobody_else_reads_it(folder):
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    party = {f"{name}/{file}" for name in "ab" for file in ("guard.key", "node.key", "public.toml")}
    own = {"ca.key", "ca.pem", "coordinator.key", "public.toml", "server.key", "server.pem"}
    assert found == party | {f"coordinator/{file}" for file in own}
    for path in folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_a_card_holds_the_public_halves(folder):
    card = PublicKeys.load(folder / "a" / "public.toml")
    assert card.key == Signer.load(folder / "a" / "guard.key").public
    private = load_ssh_private_key((folder / "a" / "node.key").read_bytes(), None)
    assert isinstance(private.curve, ec.SECP384R1)
    numbers = load_ssh_public_key(card.node.encode()).public_numbers()
    assert numbers == private.public_key().public_numbers()
    assert card != PublicKeys.load(folder / "b" / "public.toml")


def greeted(folder, name):
    """What a client that knows the authority makes of the server's certificate under this name."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "coordinator/server.pem", folder / "coordinator/server.key")
    client = ssl.create_default_context(cafile=str(folder / "coordinator/ca.pem"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    here, there = socket.socketpair()

    def serve():
        try:
            server.wrap_socket(there, server_side=True).close()
        except OSError:
            there.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        client.wrap_socket(here, server_hostname=name).close()
        return True
    except ssl.SSLCertVerificationError:
        here.close()
        return False
    finally:
        thread.join(300)


def test_the_certificate_is_for_its_hosts_only(folder):
    assert all(greeted(folder, name) for name in ("wards.example", "192.0.2.7", "localhost", "127.0.0.1"))
    assert not greeted(folder, "other.example")


def test_keys_are_never_overwritten(folder):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(InvalidValue, match="never overwritten"):
        keyring.make(folder, ["c", "b"], [], coordinator=False)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("parties", "hosts", "coordinator", "what"),
    [
        (["a/b"], [], False, "letters"),
        (["a", "a"], [], False, "a name each"),
        (["coordinator"], [], False, "none is called"),
        ([], [], False, "--parties NAMES"),
        (["a"], ["wärd.example"], True, "ASCII"),
        (["a"], ["two words"], True, "a DNS name"),
        (["a"], ["https://wards.example"], True, "a DNS name"),
        (["a"], [""], True, "address"),
    ],
)
def test_what_is_refused(tmp_path, parties, hosts, coordinator, what):
    with pytest.raises(InvalidValue, match=what):
        keyring.make(tmp_path / "keys", parties, hosts, coordinator)
    assert not (tmp_path / "keys").exists()


def test_nothing_is_left_where_writing_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(keyring, "_pem", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(InvalidValue, match="cannot be written"):
        keyring.make(tmp_path / "keys", ["a"], [], coordinator=True)
    assert list((tmp_path / "keys").iterdir()) == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (None, "No such file"),
        ("key = ", "TOML"),
        ('key = "00"', "key and node"),
        ('key = "' + "0" * 64 + '"\nnode = "ssh-ed25519 AAAA"', "ECDSA"),
    ],
)
def test_a_card_must_be_one(tmp_path, text, what):
    path = tmp_path / "public.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidValue, match=what):
        PublicKeys.load(path)


def test_the_command(tmp_path, capsys):
    folder = str(tmp_path / "k")
    assert main(["keys", folder, "--parties", "a, b"]) == 0
    assert main(["keys", folder, "--host", "wards.example"]) == 0
    assert capsys.readouterr().out.split() == [f"{folder}/{name}" for name in ("a", "b", "coordinator")]
    assert main(["keys", folder, "--parties", "a"]) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert main(["keys", folder]) == 2


def test_a_party_gets_new_keys_and_the_old_ones_are_kept(folder, capsys):
    before = PublicKeys.load(folder / "a" / "public.toml")
    assert main(["keys", str(folder), "--renew", "a"]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "a")
    after = PublicKeys.load(folder / "a" / "public.toml")
    assert after.key == Signer.load(folder / "a" / "guard.key").public
    assert {before.key, before.node}.isdisjoint({after.key, after.node})
    assert PublicKeys.load(folder / "a.retired-1" / "public.toml") == before
    keyring.renew(folder, ["a"])
    assert PublicKeys.load(folder / "a.retired-2" / "public.toml") == after
    for path in folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_a_coordinator_keeps_its_authority_and_its_names(folder):
    authority = (folder / "coordinator/ca.pem").read_bytes()
    old, certificate = (folder / "coordinator" / name for name in ("coordinator.key", "server.pem"))
    before = Signer.load(old).public, certificate.read_bytes()
    keyring.renew(folder, ["coordinator"])
    assert (folder / "coordinator/ca.pem").read_bytes() == authority
    assert Signer.load(old).public != before[0]
    assert certificate.read_bytes() != before[1]
    assert all(greeted(folder, name) for name in ("wards.example", "192.0.2.7", "localhost"))
    assert not greeted(folder, "other.example")


def made_years_ago(monkeypatch, folder, years):
    """Keys of a coordinator from some years ago."""
    days = datetime.timedelta(days=365 * years)

    class Then(datetime.datetime):
        @classmethod
        def now(cls, zone=None):
            return datetime.datetime.now(zone) - days

    then = SimpleNamespace(datetime=Then, timedelta=datetime.timedelta, UTC=datetime.UTC)
    with monkeypatch.context() as patched:
        patched.setattr(keyring, "datetime", then)
        keyring.make(folder, [], ["wards.example"], coordinator=True)


@pytest.mark.parametrize("years", [3, 15])
def test_the_authority_outlives_the_certificates_that_it_signs(years, tmp_path, monkeypatch):
    """Parties keep their ca.pem: a certificate that has expired is renewed at the coordinator alone."""
    made_years_ago(monkeypatch, tmp_path / "keys", years)
    assert not greeted(tmp_path / "keys", "wards.example")
    keyring.renew(tmp_path / "keys", ["coordinator"])
    assert greeted(tmp_path / "keys", "wards.example")


def test_renewing_touches_no_keys_of_others_whatever_their_names(folder):
    keyring.make(folder, ["a.renewing", "a.retired-1"], [], coordinator=False)
    before = {name: (folder / name / "guard.key").read_bytes() for name in ("a.renewing", "a.retired-1", "b")}
    keyring.renew(folder, ["a"])
    assert {name: (folder / name / "guard.key").read_bytes() for name in before} == before
    assert (folder / "a.retired-2" / "guard.key").exists()


@pytest.mark.parametrize("crash", range(1, 4))
def test_a_crash_while_keys_are_renewed_leaves_a_party_that_has_keys(crash, folder, monkeypatch):
    """Killed before the nth renaming: renewing again ends with new keys, and the old ones are kept."""
    before, rename = PublicKeys.load(folder / "a" / "public.toml"), Path.rename
    count = iter(range(1, 100))

    def dying(self, target):
        if next(count) == crash + 1:  # the first looks for what an earlier crash left
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", dying)
    with pytest.raises(KeyboardInterrupt):
        keyring.renew(folder, ["a"])
    monkeypatch.undo()
    keyring.renew(folder, ["a"])
    assert PublicKeys.load(folder / "a" / "public.toml") != before
    assert PublicKeys.load(folder / "a.retired-1" / "public.toml") == before
    assert not [path for path in folder.iterdir() if "~" in path.name]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--renew", ".."], "must not consist of dots"),
        (["--renew", "nobody"], "no keys to renew"),
        (["--renew", "../x"], "party must be"),
        (["--renew", "a", "--parties", "c"], "leave out --parties"),
    ],
)
def test_what_cannot_be_renewed(arguments, what, folder, capsys):
    before = sorted(path.name for path in folder.iterdir())
    assert main(["keys", str(folder), *arguments]) == 2
    assert what in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == before
