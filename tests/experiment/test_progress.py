"""Progress of runs that Python code starts: where it is seen, and that nobody is bothered elsewhere."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.federations import experiment

from polyeps.experiment.progress import in_notebook, seen, watching
from polyeps.experiment.run import resume, run


def test_progress_is_shown_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(experiment(), tmp_path / "silent")
    run(experiment(), tmp_path / "off", progress=False)
    assert capsys.readouterr().err == ""
    run(experiment(), tmp_path / "on", progress=True)
    assert "polyeps: fedavg-1 is done, last accuracy " in capsys.readouterr().err
    resume(tmp_path / "on", progress=True)  # nothing is left to do
    assert capsys.readouterr().err == ""


def test_a_terminal_or_a_notebook_sees_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not seen()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert seen()
    monkeypatch.undo()
    kernel = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel))
    assert in_notebook()
    assert seen()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert not in_notebook()


def test_jobs_of_a_sweep_have_lines_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    with watching(2) as watch:
        watch.job_done("fedavg-1")
        watch.job_done("fedavg-1")
    assert capsys.readouterr().err.count("fedavg-1 is done, not evaluated") == 2
