"""`polyeps reproduce`: a paper's figures and tables, run again, beside the numbers it printed.

`polyeps.cli` imports this module, so functions import it in turn when they run.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyeps.errors import InputError

if TYPE_CHECKING:
    from polyeps_reproductions.running import Progress
    from polyeps_reproductions.studies import Summary


def reproduce(
    study: Annotated[str, typer.Argument(help="One of the studies above.")],
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Run the figures and tables of a paper again.

    pfa (Liu et al., VLDB 2022), fedsel (Liu et al., DASFAA 2020),
    pdp-fl (Liu et al., CIKM 2023), fedhdp (Aldaghri et al., 2021)
    or cmp-fed (Guo et al., IEEE CNS 2022).
    Finished trials are kept, so an interrupted study continues.
    """
    from polyeps.accounting.cache import default_directory
    from polyeps.cli.output import remark
    from polyeps.cli.run import check_device
    from polyeps_reproductions import presenting
    from polyeps_reproductions.running import Machines, run_all
    from polyeps_reproductions.studies import available, find
    from polyeps_reproductions.trials import Store

    if not show:
        check_device(device)
    machines = Machines(device, processes, _shard(shard))
    chosen = find(study)
    parts = chosen.choose(tuple(figure or ()), tuple(table or ()), quick)
    folder = output or _results()
    if show and work is None:
        whole = not (figure or table)
        there = [part for part in parts if not whole or presenting.path_of(folder, study, part.name, quick).exists()]
        _present([presenting.read(folder, study, part.name, quick) for part in there], folder, quick, as_json)
        return
    if show and work and not work.is_dir():
        raise InputError(f"{work} is no folder of finished trials; leave out --show to train, or change --work")
    store = Store(work or default_directory() / "studies" / study)
    repeats = seeds or (1 if quick else chosen.seeds)
    if not show:
        presenting.make(folder)
        trials = []
        for part in parts:
            cells, sentences = available(part.cells(quick))
            for sentence in sentences:
                remark(f"{part.kind} {part.number}: {sentence}")
            trials += [one for cell in cells for one in chosen.trials(part, cell, repeats, quick)]
        try:
            run_all(trials, store, machines, _progress())
        except KeyboardInterrupt:
            remark(f"stopped; the same command continues with the trials in {store.folder}")
            raise typer.Exit(130) from None
    options = f"{' --quick' if quick else ''}{_options(seeds, device, processes, work)}"
    summaries = []
    for part in parts:
        command = f"polyeps reproduce {study} --{part.kind} {part.number}{options}"
        done_before = part.partial and presenting.path_of(folder, study, part.name, quick).exists()
        earlier = presenting.read(folder, study, part.name, quick) if done_before else None
        summaries.append(chosen.summary(part, store, repeats, quick, command, earlier))
    _present(summaries, folder, quick, as_json)


def _present(summaries: list[Summary], folder: Path, quick: bool, as_json: bool) -> None:
    """Write and print finished parts; an unfinished one leaves the results of an earlier run as they are."""
    from polyeps.cli.output import print_json, print_table, remark
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
    if as_json:
        print_json(summaries)


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
