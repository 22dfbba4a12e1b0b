"""The doctor: every fault of a set-up in one sentence with its remedy, and nothing said of one that is right."""

from __future__ import annotations

import http.server
import os
import shutil
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from support.silos import Sites, enrolling

from polyeps.deploy import certificate_checks, doctor, keys
from polyeps.deploy.certificate_checks import look_at_superlink
from polyeps.deploy.doctor import Finding, check_server, check_silo
from polyeps.deploy.kits import server_kit
from polyeps.deploy.processes import free_ports
from polyeps.errors import InputError


@pytest.fixture
def sites(tmp_path: Path) -> Sites:
    sites = Sites(tmp_path, records=40)
    for path in tmp_path.rglob("records.csv"):
        path.chmod(0o600)
    for path in tmp_path.rglob("supernode.secret"):
        path.write_bytes(b"x" * 32)
    return sites


def faults(findings: Iterator[Finding]) -> dict[str, str]:
    """Return what is wrong, by check; each must be one sentence without line breaks that offers a remedy."""
    found = {one.check: one.said for one in findings if not one.right}
    for said in found.values():
        assert "\n" not in said
        assert "; " in said or ": " in said
        assert len(said) < 400
    return found


def of_silo(sites: Sites, **terms: Any) -> dict[str, str]:
    """What is wrong with the silo aspen, beside the SuperNode that nobody has started."""
    contract = sites.folder / "contract.signed"
    if not contract.exists():
        contract.write_bytes(sites.signed(**terms).encode())
    found = faults(check_silo(sites.folder / "aspen" / "policy.toml", contract))
    assert "cannot be reached" in found.pop("supernode")
    return found


def begun(sites: Sites) -> Path:
    """A silo that has agreed to a contract; return its folder."""
    silo = sites.silo()
    assert not silo.answer(enrolling(sites.signed().encode()), 100).has_error()
    return sites.folder / "aspen"


def test_a_silo_without_a_fault(sites: Sites) -> None:
    assert of_silo(sites) == {}
    folder = begun(sites)
    before = (folder / "ledger.db").read_bytes()
    assert of_silo(sites) == {}
    assert (folder / "ledger.db").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["ledger.db", "ledger.db.head", "policy.toml", "records.csv", "schema.toml", "silo.key", "state"]
        + ["supernode.secret"]
    )


def _schema(folder: Path) -> None:
    (folder / "schema.toml").write_text((folder / "schema.toml").read_text().replace("30", "40"))


def _other_column(folder: Path) -> None:
    (folder / "records.csv").write_text((folder / "records.csv").read_text().replace("age", "years", 1))


def _tampered(folder: Path) -> None:
    content = (folder / "ledger.db").read_bytes()
    assert b'"epsilon"' in content
    (folder / "ledger.db").write_bytes(content.replace(b'"epsilon":6.0', b'"epsilon":9.0').replace(b"6.0", b"9.0"))


@pytest.mark.parametrize(
    ("spoil", "check", "said"),
    [
        (lambda it: (it / "silo.key").chmod(0o644), "key", "can be read by other accounts; run `chmod 600"),
        (lambda it: (it / "silo.key").unlink(), "key", "cannot be read: No such file"),
        (lambda it: (it / "records.csv").unlink(), "records", "records.csv"),
        (lambda it: (it / "records.csv").chmod(0o644), "records", "can be read by every account; run `chmod 600"),
        (_other_column, "records", "age"),
        (_schema, "contract", "data.columns: 'stay' is not the same"),
        (lambda it: (it / "schema.toml").unlink(), "records", "schema.toml"),
        (_tampered, "ledger", "ledger.db"),
        (lambda it: (it / "ledger.db.head").unlink(), "ledger", "head"),
        (lambda it: [(it / f"ledger.db{end}").unlink() for end in ("", ".head")], "ledger", "put back its last copy"),
        (lambda it: os.utime(it / "ledger.db", (time.time() + 9e5,) * 2), "clock", "let it follow a time server"),
    ],
)
def test_a_fault_of_a_silo(spoil: Callable[[Path], Any], check: str, said: str, sites: Sites) -> None:
    folder = begun(sites)
    assert of_silo(sites) == {}
    spoil(folder)
    found = of_silo(sites)
    assert said in found[check], found
    assert check in ("key", "ledger", "records", "contract", "clock")


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({"ends": date(2020, 1, 1)}, "the contract ended on 2020-01-01"),
        ({"rounds": 1000}, "more than the policy's limits.rounds = 20"),
        ({"silos": {"aspen": "0" * 64}}, "with another key than this silo's"),
        ({"rehearsal": 3}, "the contract is a rehearsal"),
    ],
)
def test_a_contract_that_the_policy_does_not_allow(terms: dict[str, Any], said: str, sites: Sites) -> None:
    assert said in of_silo(sites, **terms)["contract"]


def test_a_budget_that_does_not_suffice(sites: Sites) -> None:
    sites.write_policy("aspen", budget={"epsilon": 1.4})
    begun(sites)
    (sites.folder / "contract.signed").write_bytes(sites.signed(name="second").encode())
    assert "the silo would decline: client 'aspen' has spent" in of_silo(sites)["contract"]
    sites.write_policy("aspen", budget={"epsilon": 2.0})
    assert "holds ε = 1.4, and the policy says 2" in of_silo(sites)["ledger"]


def test_a_contract_that_is_none(sites: Sites) -> None:
    place = sites.folder / "contract.signed"
    for content, said in [(b"", "not a signed contract"), (sites.signed().encode()[:-9], "not a signed contract")]:
        place.write_bytes(content)
        assert said in of_silo(sites)["contract"]
    place.write_bytes(sites.signed().encode().replace(b'"rounds":3', b'"rounds":4'))
    assert "the signature of the contract does not hold" in of_silo(sites)["contract"]


def test_folders_that_cannot_be_written(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("tempfile.NamedTemporaryFile", full)
        found = of_silo(sites)
    assert "No space left on device; make room" in found["folder"]
    assert "No space left on device; make room" in found["ledger"]
    with monkeypatch.context() as patched:
        patched.setattr(doctor, "_ROOM", 1 << 62)
        assert "MiB left; make room" in of_silo(sites)["folder"]
    begun(sites)
    with monkeypatch.context() as patched:
        patched.setattr("os.access", lambda path, _: not str(path).endswith(".head"))
        assert "cannot be written by this account" in of_silo(sites)["ledger"]


# The server


class _Answer(http.server.BaseHTTPRequestHandler):
    clock = 0.0  # seconds by which it is ahead
    status = 200

    def do_GET(self) -> None:
        self.send_response_only(self.status)
        self.send_header("Date", format_datetime(datetime.now(UTC) + timedelta(seconds=self.clock), usegmt=True))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def listening(kit: Path | None, clock: float = 0.0, status: int = 200) -> Iterator[str]:
    """Something that listens, with the certificate of a kit or without TLS; return its address."""
    answer = type("Answer", (_Answer,), {"clock": clock, "status": status})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), answer) as server:
        if kit is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(kit / "server.crt", kit / "server.key")
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    server_kit(tmp_path / "server", "study", ["127.0.0.1"], {})
    return tmp_path / "server"


def test_what_a_superlink_shows(kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = kit / "ca.crt"
    with listening(kit) as address:
        assert "shows a certificate of ca.crt, and the clocks agree" in look_at_superlink(address, authority)
        server_kit(tmp_path / "other", "other", ["127.0.0.1"], {})
        with pytest.raises(InputError, match=r"not signed by this ca.crt: take the server's present one"):
            look_at_superlink(address, tmp_path / "other" / "ca.crt")
        with pytest.raises(InputError, match="is for other"):
            look_at_superlink(address.replace("127.0.0.1", "localhost"), authority)
    for clock in (-60.0, 60.0):
        with listening(kit, clock) as address, pytest.raises(InputError, match=r"clock .* differ by [56]\d s"):
            look_at_superlink(address, authority)
    with listening(None) as address, pytest.raises(InputError, match="no SuperLink with TLS; stop it, or take another"):
        look_at_superlink(address, authority)
    with pytest.raises(InputError, match=r"nothing answers on .*; start the SuperLink"):
        look_at_superlink(f"127.0.0.1:{free_ports(1)[0]}", authority)
    for name, start, said in [("old", -4 * 365, "has expired"), ("early", 40, "is not valid yet")]:
        with monkeypatch.context() as patched:
            patched.setattr(keys, "datetime", _shifted(start))
            (tmp_path / name).mkdir()
            shutil.copy(authority, tmp_path / name)
            shutil.copy(kit / "ca.key", tmp_path / name)
            keys.new_certificate(tmp_path / name, "study", ["127.0.0.1"])
        with listening(tmp_path / name) as address, pytest.raises(InputError, match=said):
            look_at_superlink(address, authority)


def _shifted(days: int) -> Any:
    return type("Shifted", (), {"now": staticmethod(lambda zone: datetime.now(zone) + timedelta(days=days))})


def of_server(kit: Path, address: str = "127.0.0.1:9", **more: Any) -> dict[str, str]:
    found = faults(check_server(kit, address, **more))
    found.pop("superlink")  # nobody has started it
    return found


def test_faults_of_a_kit(kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_server(kit) == {}
    assert "is for 127.0.0.1, not for fl.example.org" in of_server(kit, "fl.example.org:1")["certificates"]
    for name in ("server.key", "ca.key", "signer.key", "superlink.secret"):
        (kit / name).chmod(0o644)
        assert f"{name}" in of_server(kit)["private files"]
        (kit / name).chmod(0o600)
    server_kit(tmp_path / "other", "other", ["127.0.0.1"], {})
    for name, said in [("ca.crt", "not signed by ca.crt"), ("server.key", "is not the key of server.crt")]:
        own, mode = (kit / name).read_bytes(), (kit / name).stat().st_mode
        (kit / name).write_bytes((tmp_path / "other" / name).read_bytes())
        assert said in of_server(kit)["certificates"]
        (kit / name).write_bytes(b"nonsense")
        assert name in of_server(kit)["certificates"]
        (kit / name).unlink()
        assert f"{name} cannot be read" in of_server(kit)["certificates"]
        (kit / name).write_bytes(own)
        (kit / name).chmod(mode)
    assert of_server(kit) == {}
    for days, said in [(3 * 365 - 10, "expires on"), (3 * 365 + 10, "has expired on"), (-10, "is valid from")]:
        with monkeypatch.context() as patched:
            patched.setattr(certificate_checks, "datetime", _shifted(days))
            assert said in of_server(kit)["certificates"]


def test_what_listens_in_place_of_flower(kit: Path, sites: Sites) -> None:
    with listening(kit, status=401) as address:
        assert "give it the same secret file, and the same clock" in faults(check_server(kit, address))["superlink"]
    with listening(kit, status=404) as address:
        assert "is no SuperLink (it answers 404)" in faults(check_server(kit, address))["superlink"]
    with listening(kit) as address:  # Flower's own SuperLink takes every order
        assert "start it with `polyeps superlink`" in faults(check_server(kit, address))["superlink"]
    for status, said in [(403, "give it the same secret"), (404, "is no SuperNode (it answers 404); stop it")]:
        with listening(None, status=status) as address:
            sites.write_policy("aspen", supernode={"address": address})
            assert said in faults(check_silo(sites.folder / "aspen" / "policy.toml"))["supernode"]
    (sites.folder / "aspen" / "supernode.secret").chmod(0o644)
    assert "can be read by everybody" in faults(check_silo(sites.folder / "aspen" / "policy.toml"))["supernode"]


def test_test_records_and_contracts_of_a_server(kit: Path, sites: Sites) -> None:
    contract = sites.folder / "contract.signed"
    contract.write_bytes(sites.signed().encode())
    test = sites.folder / "birch" / "records.csv"
    assert of_server(kit, contract=contract, test=test) == {}
    _other_column(test.parent)
    assert "age" in of_server(kit, contract=contract, test=test)["contract"]
    contract.write_bytes(sites.signed(ends=date(2020, 1, 1)).encode())
    assert "ended on 2020-01-01" in of_server(kit, contract=contract)["contract"]
