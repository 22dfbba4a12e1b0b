"""Tables on stdout."""

import pytest

from polyeps.cli.output import print_table


@pytest.mark.parametrize("columns", [3, 40])
def test_no_figure_is_cut_short_however_wide_the_table(columns: int, capsys: pytest.CaptureFixture[str]) -> None:
    values = [0.12345 + place for place in range(columns)]
    print_table([f"method {place}" for place in range(columns)], [values])
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert [float(word) for word in shown.split() if "." in word] == [float(f"{value:.5g}") for value in values]


def test_the_narrowest_terminal_still_shows_every_figure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    print_table(["a\nheading", "b", "c"], [["a long name of a method", 0.4992, 9.911]])
    assert "…" not in (shown := capsys.readouterr().out)
    assert "0.4992" in shown


def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["[bold]ward", "[/]", ":smile:"]
    print_table(["client"], [[name] for name in names])
    shown = capsys.readouterr().out.split()
    assert set(names) <= set(shown)
