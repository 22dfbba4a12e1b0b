"""`polyeps reproduce`: a paper's figures and tables, run again, beside the numbers it printed.

`polyeps.cli` imports this module, so functions import it in turn when they run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyeps.errors import InputError

if TYPE_CHECKING:
    from polyeps_reproductions.running import Machines, Progress
    from polyeps_reproductions.studies import Part, Summary

ALL = "all"


def reproduce(
    study: Annotated[str, typer.Argument(help="One of the studies above, or all.")],
    figure: Annotated[list[str] | None, typer.Option(help="Only this figure; may be repeated.")] = None,
    table: Annotated[list[str] | None, typer.Option(help="Only this table; may be repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Quick versions: minutes instead of hours.")] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds; by default 5, fedsel 10, fedhdp 3, quick 1.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda where there is one.")] = "cpu",
    processes: Annotated[int, typer.Option(min=1, help="Number of trials that run at once.")] = 1,
    shard: Annotated[str, typer.Option(help="Run a part of the trials: 3/8 is the third of eight parts.")] = "1/1",
    show: Annotated[
        bool, typer.Option("--show", help="Train nothing: redraw the JSON in --output, or the trials in --work.")
    ] = False,
    work: Annotated[Path | None, typer.Option(help="Folder of finished trials, to continue from.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for results: reproductions/results in a clone, else results."),
    ] = None,
    missing: Annotated[
        bool, typer.Option("--missing", help="Run only the seeds that the results in --output lack.")
    ] = False,
    minutes: Annotated[float | None, typer.Option(min=0, help="Begin no training after so many minutes.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Run the figures and tables of a paper again.

    pfa (Liu et al., VLDB 2022), fedsel (Liu et al., DASFAA 2020),
    pdp-fl (Liu et al., CIKM 2023), fedhdp (Aldaghri et al., 2021),
    cmp-fed (Guo et al., IEEE CNS 2022), or all of them.
    Finished trials are kept, so an interrupted study continues.
    """
    from polyeps.cli.run import check_device
    from polyeps_reproductions import presenting
    from polyeps_reproductions.running import Machines
    from polyeps_reproductions.studies import STUDIES, find

    if study == ALL and (figure or table):
        raise InputError("--figure and --table belong to one study; name it instead of all")
    if show and (missing or minutes is not None):
        raise InputError("--show trains nothing; leave it out, or --missing and --minutes")
    names = STUDIES if study == ALL else (study,)
    chosen = {name: find(name).choose(tuple(figure or ()), tuple(table or ()), quick) for name in names}
    if not show:
        check_device(device)
    machines, folder, summaries = Machines(device, processes, _shard(shard)), output or _results(), []
    ends = None if minutes is None else time.time() + 60 * minutes
    for place, (name, parts) in enumerate(chosen.items()):
        if show and work is None:
            whole = not (figure or table)
            parts = [one for one in parts if not whole or presenting.path_of(folder, name, one.name, quick).exists()]
            shown = [presenting.read(folder, name, one.name, quick) for one in parts]
        else:
            # What one study leaves of its share of the time goes to those after it.
            left = None if ends is None else (ends - time.time()) / (len(chosen) - place)
            until = None if left is None else time.time() + left
            options = f"{' --quick' if quick else ''}{_options(seeds, device, processes, work)}"
            own = work if work is None or study != ALL else work / name
            wanted = Wanted(name, parts, quick, seeds, replace(machines, until=until), folder, missing, show, options)
            shown = _run(wanted, own)
        summaries += shown
        _present(shown, folder, quick, as_json)
    if show and not summaries:
        raise InputError(f"{folder} holds no results; leave out --show to run it, or change --output")
    if as_json:
        from polyeps.cli.output import print_json

        print_json(summaries)
    if study == ALL:
        from polyeps.cli.output import remark

        remark(f"wrote {presenting.write_page(folder, quick)}")


@dataclass(frozen=True)
class Wanted:
    """Parts of a study, and how to run them."""

    study: str
    parts: list[Part]
    quick: bool
    seeds: int | None
    machines: Machines
    folder: Path
    missing: bool  # only what the results in the folder lack
    show: bool
    options: str


def _run(wanted: Wanted, work: Path | None) -> list[Summary]:
    """Train what is not finished, unless it is only to be shown, and return the summaries."""
    from polyeps.accounting.cache import default_directory
    from polyeps.cli.output import remark
    from polyeps_reproductions import presenting
    from polyeps_reproductions.running import run_all
    from polyeps_reproductions.studies import available, find
    from polyeps_reproductions.trials import Store

    study, quick, folder = find(wanted.study), wanted.quick, wanted.folder
    if wanted.show and work and not work.is_dir():
        raise InputError(f"{work} is no folder of finished trials; leave out --show to train, or change --work")
    store = Store(work or default_directory() / "studies" / wanted.study)
    repeats = wanted.seeds or (1 if quick else study.seeds)
    paths = {part.name: presenting.path_of(folder, wanted.study, part.name, quick) for part in wanted.parts}
    earlier = {
        name: presenting.read(folder, wanted.study, name, quick) for name, path in paths.items() if path.exists()
    }
    if not wanted.show:
        presenting.make(folder)
        trials = []
        for part in wanted.parts:
            cells, sentences = available(part.cells(quick))
            for sentence in sentences:
                remark(f"{part.kind} {part.number}: {sentence}")
            before = earlier.get(part.name) if wanted.missing else None
            trials += [one for cell in cells for one in study.lacking(part, cell, repeats, quick, before)]
        try:
            run_all(trials, store, wanted.machines, _progress())
        except KeyboardInterrupt:
            remark(f"stopped; the same command continues with the trials in {store.folder}")
            raise typer.Exit(130) from None
    summaries = []
    for part in wanted.parts:
        command = f"polyeps reproduce {wanted.study} --{part.kind} {part.number}{wanted.options}"
        before = earlier.get(part.name) if part.partial or wanted.missing else None
        summaries.append(study.summary(part, store, repeats, quick, command, before))
    return summaries


def _present(summaries: list[Summary], folder: Path, quick: bool, as_json: bool) -> None:
    """Write and print finished parts; an unfinished one leaves the results of an earlier run as they are."""
    from polyeps.cli.output import print_table, remark
    from polyeps_reproductions import presenting

    for summary in summaries:
        heading = presenting.heading(summary)
        if not summary["table"]:
            remark(f"{heading}: nothing is finished yet, so nothing is written")
            continue
        files = presenting.write(summary, folder, quick)
        if not as_json:
            print_table(summary["columns"], summary["table"], title=heading)
            for sentence in presenting.sentences(summary):
                print(sentence)
        remark(f"wrote {', '.join(map(str, files))}")


def _results() -> Path:
    """The results of this repository, or a folder of one's own."""
    here = Path("reproductions") / "results"
    return here if here.is_dir() else Path("results")


def _options(seeds: int | None, device: str, processes: int, work: Path | None) -> str:
    """The options a result depends on, or took long without; without folders of this machine."""
    given: dict[str, int | str] = {"--seeds": seeds or 0, "--device": "" if device == "cpu" else device}
    given |= {"--processes": 0 if processes == 1 else processes, "--work": "WORK" if work else ""}
    return "".join(f" {name} {value}" for name, value in given.items() if value)


def _shard(text: str) -> tuple[int, int]:
    number, slash, count = text.partition("/")
    if not slash or not number.isdigit() or not count.isdigit() or not 1 <= int(number) <= int(count):
        raise InputError(f"--shard takes a number from 1 to a count, such as 3/8, not {text!r}")
    return int(number), int(count)


def _progress() -> Progress:
    """Return a function that prints a line at the end of a stage, and every 20 seconds."""
    from polyeps.cli.output import remark

    last = 0.0

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal last
        if total and (time.monotonic() - last > 20 or done == total):
            last = time.monotonic()
            remark(f"{stage}: {done} of {total}")

    return progress
