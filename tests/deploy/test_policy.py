"""Policies: what they do not know is refused, and paths are those of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.silos import Sites

from polyeps.errors import InputError


@pytest.fixture
def sites(tmp_path: Path) -> Sites:
    return Sites(tmp_path, records=20)


def test_paths_are_relative_to_the_policy(sites: Sites) -> None:
    policy, folder = sites.policy(), sites.folder / "aspen"
    assert (policy.key, policy.ledger, policy.folder) == (folder / "silo.key", folder / "ledger.db", folder / "state")
    assert (policy.data.file, policy.data.schema_file) == (folder / "records.csv", folder / "schema.toml")
    assert policy.supernode.secret == folder / "supernode.secret"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"allow_everything": True}, "there is no setting 'allow_everything'"),
        ({"limits": {"round": 3}}, "there is no setting 'limits.round'; did you mean 'rounds'"),
        ({"limits": {"training": {"clp": [0.1, 1.0]}}}, "did you mean 'clip'"),
        ({"limits": {"training": {"clip": [2.0, 1.0]}}}, "put the smaller number first"),
        ({"budget": {"epsilon_per_run": 7.0}}, "more than budget.epsilon = 6"),
        ({"budget": {"epsilon": float("inf")}}, "budget.epsilon"),
        ({"budget": {"delta": 0.0}}, "budget.delta"),
        ({"budget": {"schedule": "never"}}, "budget.schedule"),
        ({"algorithms": []}, "algorithms"),
        ({"signers": {"lab": {"key": "no key", "epsilon": 1.0}}}, "is not a public key"),
        ({"discloses": ["records"]}, "discloses"),
        ({"name": "as\npen"}, "control|printable|Illegal"),
        ({"rehearsal": "yes please"}, "rehearsal"),
    ],
)
def test_what_a_policy_cannot_say(sites: Sites, changes: dict[str, Any], said: str) -> None:
    sites.write_policy("aspen", **changes)
    with pytest.raises(InputError, match=said) as refused:
        sites.policy()
    assert "policy.toml" in str(refused.value)


def test_a_policy_needs_every_rule(sites: Sites) -> None:
    for key in ("budget", "signers", "limits", "algorithms", "ledger", "data"):
        sites.write_policy("aspen", **{key: None})
        with pytest.raises(InputError, match=key):
            sites.policy()
    (sites.folder / "aspen" / "policy.toml").write_text("name = ")
    with pytest.raises(InputError, match="is not TOML"):
        sites.policy()
    (sites.folder / "aspen" / "policy.toml").unlink()
    with pytest.raises(InputError, match="cannot be read"):
        sites.policy()


def test_a_key_that_others_can_read_is_refused(sites: Sites) -> None:
    key = sites.folder / "aspen" / "silo.key"
    key.chmod(0o644)
    with pytest.raises(InputError, match="can be read by other accounts"):
        sites.silo()
    key.chmod(0o600)
    key.write_bytes(b"no key")
    with pytest.raises(InputError, match="holds no Ed25519 key"):
        sites.silo()
