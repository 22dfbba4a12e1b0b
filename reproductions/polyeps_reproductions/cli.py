"""`polyeps reproduce`: a paper's figures and tables again, beside the numbers it printed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyeps.cli.output import Json, print_json, print_table, remark
from polyeps.errors import InputError

if TYPE_CHECKING:
    from polyeps_reproductions.running import Told


def reproduce(
    study: Annotated[str, typer.Argument(help="One of the studies above.")],
    figure: Annotated[list[str] | None, typer.Option(help="Only this figure; may be given again.")] = None,
    table: Annotated[list[str] | None, typer.Option(help="Only this table; may be given again.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="In small: minutes instead of hours.")] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Repeat so often; 5 times, fedsel 10, fedhdp 3, in small once.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda where there is one.")] = "cpu",
    processes: Annotated[int, typer.Option(min=1, help="How many trainings at once.")] = 1,
    shard: Annotated[str, typer.Option(help="Take a part of the work: 3/8 is the third of eight.")] = "1/1",
    show: Annotated[bool, typer.Option("--show", help="Train nothing: show what is finished.")] = False,
    work: Annotated[Path | None, typer.Option(help="Folder of finished trainings, to go on from.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of figures, tables, JSON.")] = Path("results"),
    as_json: Json = False,
) -> None:
    """Run the figures and tables of pfa (paper 000), fedsel (001), pdp-fl (002), fedhdp (003) or cmp-fed (004) again.

    What is finished is kept, so a stopped study goes on where it was.
    """
    from polyeps.accounting.cache import default_directory
    from polyeps.cli.run import check_device
    from polyeps_reproductions import fedhdp_theory, pictures, presenting, reproducing
    from polyeps_reproductions.choosing import GRID, QUICK_GRID
    from polyeps_reproductions.running import Means
    from polyeps_reproductions.trials import Store

    if not show:
        check_device(device)
    means = Means(device, processes, _shard(shard), QUICK_GRID if quick else GRID)
    wanted = reproducing.choose(study, tuple(figure or ()), tuple(table or ()), quick)
    for sentence in wanted.skipped:
        remark(sentence)
    finished = work or default_directory() / "studies" / study
    if show and not finished.is_dir():
        raise InputError(f"{finished} is no folder of finished trainings; leave out --show to train, or change --work")
    store = Store(finished)
    if not show:
        presenting.make(output)
    repeats = seeds or (1 if quick else reproducing.REPEATS.get(study, reproducing.USUAL))
    try:
        with _telling() as told:
            if not show:
                reproducing.perform(wanted, store, means, repeats, told)
    except KeyboardInterrupt:
        remark(f"stopped; the same command goes on with what {store.folder} holds")
        raise typer.Exit(130) from None
    options = _options(seeds, device, processes, work)
    summaries = reproducing.outcome(wanted, store, means.grid, repeats, options)
    for name, summary in summaries.items():
        if presenting.is_empty(summary):  # and what an earlier run wrote stays
            remark(f"{presenting.heading(summary)}: nothing is finished yet, so nothing is written")
            continue
        presenting.make(output)
        files = presenting.write(summary, output, name)
        for draw in (pictures.draw, fedhdp_theory.draw):
            files += draw(summary, output / name)
        if not as_json:
            print_table(*presenting.shown(summary), title=presenting.heading(summary))
            for sentence in presenting.said(summary):
                print(sentence)
            if "table" in summary and summary["note"]:
                print(f"{summary['note']}.")
        remark(f"wrote {', '.join(map(str, files))}")
    if as_json:
        print_json(list(summaries.values()))


def _options(seeds: int | None, device: str, processes: int, work: Path | None) -> str:
    """The options a result depends on, or took long without; folders of this machine are nobody else's business."""
    given: dict[str, int | str] = {}
    given["--seeds"] = seeds or 0
    given["--device"] = "" if device == "cpu" else device
    given["--processes"] = 0 if processes == 1 else processes
    given["--work"] = "WORK" if work else ""
    return "".join(f" {name} {value}" for name, value in given.items() if value)


def _shard(text: str) -> tuple[int, int]:
    number, slash, count = text.partition("/")
    if not slash or not number.isdigit() or not count.isdigit() or not 1 <= int(number) <= int(count):
        raise InputError(f"--shard takes a number from 1 to a count, such as 3/8, not {text!r}")
    return int(number), int(count)


@contextmanager
def _telling() -> Iterator[Told]:
    """A bar where somebody watches, now and then a line where not."""
    import time

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    tasks: dict[str, tuple[object, int]] = {}
    last = 0.0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:

        def told(what: str, done: int, total: int) -> None:
            nonlocal last
            if not total:
                return
            if what not in tasks:
                tasks[what] = (bar.add_task(what, total=total), 0)
            bar.update(tasks[what][0], completed=done, total=total)  # type: ignore[arg-type]
            if not console.is_terminal and (time.monotonic() - last > 20 or done == total):
                last = time.monotonic()
                remark(f"{what}: {done} of {total}")

        yield told
