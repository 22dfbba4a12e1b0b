"""A cell that is run again on this machine agrees with the stored one, which another machine may have made."""

import os

import pytest
from polyeps_reproductions.other_tables import RESULTS
from polyeps_reproductions.rerun import CELLS, SEED, Agreement, _cell, again, main, stored_range

needs_data = pytest.mark.skipif(not os.environ.get("POLYEPS_DATA"), reason="needs MNIST; set POLYEPS_DATA")


def test_agreement_is_thestored_range_spread_or_half_a_point() -> None:
    assert Agreement("pfa", "", 0.80, 0.02, 0.819).agrees
    assert not Agreement("pfa", "", 0.80, 0.02, 0.821).agrees
    assert Agreement("pfa", "", 0.80, 0.0, 0.804).agrees
    assert not Agreement("pfa", "", 0.80, 0.0, 0.806).agrees


def test_fedsel_gives_the_same_run_on_every_machine() -> None:
    part, wanted = CELLS["fedsel"]  # synthetic data; the stored run is of another machine
    summary = RESULTS.summary("fedsel", part)
    assert summary is not None
    (stored,) = (one for one in summary["records"] if wanted.items() <= one.items())
    assert again("fedsel").again == pytest.approx(stored["finals"][str(SEED)], abs=1e-3)


@needs_data
def test_pfa_agrees() -> None:
    assert again("pfa").agrees


def test_every_cell_that_is_run_again_has_a_spread_to_agree_within() -> None:
    """A single run has none, and noise alone would move it by more than half a point; exact runs need none."""
    for study, (part, wanted) in CELLS.items():
        _, spread = stored_range(RESULTS, study, part, _cell(study, part, wanted))
        assert spread > 0


def test_a_difference_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("polyeps_reproductions.rerun.again", lambda study: Agreement(study, "cell", 0.8, 0.01, 0.5))
    assert main(["pfa"]) == 1
    assert "DIFFERS" in capsys.readouterr().out
