"""A study as a whole: which figures and tables are wanted, their trials run, their outcomes gathered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from polyeps.errors import InputError
from polyeps_reproductions import cmp_fed, fedhdp, fedsel, pdp_fl, pdp_fl_tables, pfa, pfa_tables
from polyeps_reproductions.figures import Figure, quick, trials_of, without_missing_data
from polyeps_reproductions.running import Means, Told, run_all
from polyeps_reproductions.summaries import Summary, summarise
from polyeps_reproductions.tabulated import Tabulated, tabulate
from polyeps_reproductions.trials import Store, Trial

# Studies whose trials are of another kind than those of papers 000 and 002: each runs and shows its parts itself.
OWN: dict[str, Any] = {"fedsel": fedsel, "fedhdp": fedhdp, "cmp-fed": cmp_fed}
STUDIES = ("pfa", "fedsel", "pdp-fl", "fedhdp", "cmp-fed")
REPEATS = {"fedsel": 10, "fedhdp": 3}  # of the paper, where it is not the usual number
USUAL = 5


@dataclass(frozen=True)
class Wanted:
    """What is to be shown, and a sentence for each part that cannot be."""

    study: str
    figures: tuple[Figure, ...]
    tables: tuple[Tabulated, ...]
    quick: bool
    skipped: tuple[str, ...]
    own: tuple[Tabulated, ...] = ()  # parts of a study that runs its trials itself

    def trials(self, seeds: int) -> list[Trial]:
        own = [trial for table in self.tables for trial in table.trials(self.quick)]
        return [trial for figure in self.figures for trial in trials_of(figure, seeds)] + own


def choose(study: str, figures: Sequence[str] = (), tables: Sequence[str] = (), in_small: bool = False) -> Wanted:
    """The parts of a study by number; all of them, if none is named."""
    compared, tabulated = parts(study, in_small)
    known = {
        "figure": [*compared, *(one.number for one in tabulated if one.kind == "figure")],
        "table": [one.number for one in tabulated if one.kind == "table"],
    }
    for kind, numbers in (("figure", figures), ("table", tables)):
        for number in numbers:
            if number not in known[kind]:
                raise InputError(f"{study} has no {kind} {number} here; choose one of {', '.join(known[kind])}")
    everything = not figures and not tables
    chosen, said = [], []
    for number, figure in compared.items():
        if everything or number in figures:
            there, sentences = without_missing_data(figure)
            said += [f"figure {number}: {sentence}" for sentence in sentences]
            chosen += [there] if there.cells else []
    named = {"figure": figures, "table": tables}
    made = [one for one in tabulated if everything or one.number in named[one.kind]]
    if study in OWN:
        return Wanted(study, (), (), in_small, (), tuple(made))
    return Wanted(study, tuple(chosen), tuple(made), in_small, tuple(said))


def parts(study: str, in_small: bool) -> tuple[dict[str, Figure], tuple[Tabulated, ...]]:
    """A study's comparisons of methods by number, and its other figures and tables."""
    match study:
        case "pfa":
            return pfa.quick_figures() if in_small else pfa.FIGURES, tuple(pfa_tables.TABLES.values())
        case _ if study in OWN:
            return {}, OWN[study].PARTS
        case "pdp-fl":
            figures = {number: quick(figure) if in_small else figure for number, figure in pdp_fl.FIGURES.items()}
            return figures, (*pdp_fl.TABULATED, *pdp_fl_tables.TABLES)
        case _:
            raise InputError(f"there is no study {study!r}; choose one of {', '.join(STUDIES)}")


def perform(wanted: Wanted, store: Store, means: Means, seeds: int, told: Told) -> None:
    """Run what is missing."""
    if wanted.own:
        OWN[wanted.study].run(wanted.own, store, means, seeds, wanted.quick, told)
    else:
        run_all(wanted.trials(seeds), store, means, told)


def outcome(wanted: Wanted, store: Store, grid: Iterable[float], seeds: int, options: str = "") -> dict[str, Summary]:
    """Every part by the name of its files; what is quick is called so, lest it pass for the study itself.

    With each goes the command that makes it, with these options.
    """
    ending, more = ("-quick", f" --quick{options}") if wanted.quick else ("", options)
    rates = tuple(grid)
    found = {}
    for figure in wanted.figures:
        command = f"polyeps reproduce {wanted.study} --figure {figure.number}{more}"
        found[f"{figure.name}{ending}"] = summarise(figure, store, seeds, rates, command)
    for table in wanted.tables:
        command = f"polyeps reproduce {wanted.study} --{table.kind} {table.number}{more}"
        found[f"{table.name}{ending}"] = tabulate(table, store, wanted.quick, command)
    for part in wanted.own:
        command = f"polyeps reproduce {wanted.study} --{part.kind} {part.number}{more}"
        found[f"{part.name}{ending}"] = OWN[wanted.study].outcome(part, store, seeds, wanted.quick, command)
    return found
