"""Contracts: one meaning for one sequence of bytes, and no byte of it can be changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.silos import SCHEMA, Sites

from polyeps.deploy.contract import (
    LARGEST_CONTRACT,
    SignedContract,
    contract_of,
    read_signed,
    signed_path,
)
from polyeps.deploy.keys import new_key, public_of
from polyeps.errors import InputError


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Sites:
    return Sites(tmp_path_factory.mktemp("sites"))


@pytest.fixture(scope="module")
def signed(sites: Sites) -> SignedContract:
    return sites.signed()


def test_a_signed_contract_is_read_as_it_was_written(signed: SignedContract, tmp_path: Path) -> None:
    assert SignedContract.decode(signed.encode()) == signed
    draft = tmp_path / "contract.toml"
    signed_path(draft).write_bytes(signed.encode())
    assert read_signed(draft) == read_signed(signed_path(draft)) == signed
    assert signed.contract.run == f"readmission/{signed.contract.digest}"


def test_the_order_of_a_draft_does_not_matter(sites: Sites) -> None:
    columns = SCHEMA["columns"]
    other = sites.contract(data={"columns": dict(reversed(columns.items()))})
    assert other.canonical == sites.contract().canonical
    # The order of the features is the same for whoever reads the contract, drafted or signed.
    read = contract_of(json.loads(other.canonical))
    for one in (other, read):
        assert one.data.declaration.schema is not None
        assert one.data.declaration.schema.outputs == ("age", "stay")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_changed_byte_is_accepted(signed: SignedContract, data: st.DataObject) -> None:
    content = bytearray(signed.encode())
    place = data.draw(st.integers(0, len(content) - 1))
    value = data.draw(st.integers(0, 255))
    if content[place] == value or chr(content[place]).lower() == chr(value).lower():
        return  # the signature's digits may be capitals
    content[place] = value
    if bytes(content).removesuffix(b"\n") == signed.encode().removesuffix(b"\n"):
        return
    with pytest.raises(InputError):
        SignedContract.decode(bytes(content))


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=300))
def test_no_other_bytes_are_a_contract(content: bytes) -> None:
    with pytest.raises(InputError):
        SignedContract.decode(content)


@pytest.mark.parametrize("content", [b"00\n" + b"[" * 100_000, b"00\n{}", b"00\n[]", b"\xff\n{}", b"00\n1e999", b""])
def test_malformed_contracts_are_refused_in_a_sentence(content: bytes) -> None:
    with pytest.raises(InputError):
        SignedContract.decode(content)
    with pytest.raises(InputError, match="more than"):
        SignedContract.decode(b"0" * (LARGEST_CONTRACT + 1))


def test_another_key_does_not_sign(sites: Sites, signed: SignedContract, tmp_path: Path) -> None:
    stranger = new_key(tmp_path / "stranger.key")
    with pytest.raises(InputError, match="names another signer"):
        SignedContract.sign(signed.contract, stranger)
    claimed = signed.contract.model_copy(update={"signer": public_of(stranger)})
    forged = SignedContract(claimed, sites.signer.sign(claimed.canonical))
    with pytest.raises(InputError, match="signature of the contract does not hold"):
        SignedContract.decode(forged.encode())
    # The right key over the bare bytes, without what says that this is a contract.
    bare = SignedContract(signed.contract, sites.signer.sign(signed.contract.canonical))
    with pytest.raises(InputError, match="signature of the contract does not hold"):
        SignedContract.decode(bare.encode())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"round": 3}, "there is no setting 'round'; did you mean 'rounds'"),
        ({"rounds": 0}, "rounds"),
        ({"delta": 0.0}, "delta"),
        ({"delta": float("nan")}, "delta"),
        ({"silos": {"aspen": "no key"}}, "silos.aspen is not a public key"),
        ({"least_silos": 4}, "least_silos is 4, but there are 3 silos"),
        ({"algorithm": {"name": "fedavg", "budgets": "none"}}, "a deployed silo spends its own budget"),
        ({"algorithm": {"name": "fedavg", "form": "published"}}, "a deployed silo spends its own budget"),
        ({"algorithm": {"name": "fedavg", "training": {"clip": 9.0}}}, "put its settings into"),
        ({"participation": {"with_public": True}}, "needs every silo's budget"),
        ({"data": {"classes": ["no"]}}, "at least two different labels"),
        ({"data": {"columns": {"age": {"rnge": [0, 1]}}}}, "rnge"),
        ({"training": {"clip": -1.0}}, "training.clip"),
        ({"training": {"noise_multiplier": 0.0}}, "training.noise_multiplier"),
        ({"model": {"name": "clinic:net"}}, "names code"),
        ({"signer": "0" * 64}, "filled in when the contract is signed"),
        ({"patience": {"reply": 1e9}}, "patience.reply"),
    ],
)
def test_terms_that_cannot_be_are_refused_by_their_key(sites: Sites, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        sites.contract(**changes)


def test_a_copied_key_of_two_silos_is_refused(sites: Sites) -> None:
    key = public_of(sites.keys["aspen"])
    with pytest.raises(InputError, match="two silos have the same key"):
        sites.contract(silos={"aspen": key, "birch": key})


def test_a_setting_of_the_model_that_nobody_would_use_is_refused(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    sites.contract(model={"name": "mlp", "hidden": [4]})
    monkeypatch.setattr("polyeps.deploy.contract._MODEL_KEYS", {"name"})
    with pytest.raises(InputError, match=r"model\.hidden is not for contracts yet"):
        sites.contract(model={"name": "mlp", "hidden": [4]})
