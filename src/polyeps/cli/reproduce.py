"""`polyeps reproduce`: a paper's figures and tables again, beside the numbers it printed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyeps.cli.output import Json, remark
from polyeps.errors import InputError

Study = Annotated[str, typer.Argument(help="pfa or pdp-fl.")]


def reproduce(
    study: Study,
    figure: Annotated[str | None, typer.Option(help="Only this figure.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="In small: minutes instead of hours.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Repeat everything with this many seeds.")] = 5,
    device: Annotated[str, typer.Option(help="cpu, or cuda where there is one.")] = "cpu",
    processes: Annotated[int, typer.Option(min=1, help="How many trainings at once.")] = 1,
    shard: Annotated[str, typer.Option(help="Take a part of the work: 3/8 is the third of eight.")] = "1/1",
    work: Annotated[Path | None, typer.Option(help="Folder of finished trainings, to go on from.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of figures, tables, JSON.")] = Path("results"),
    as_json: Json = False,
) -> None:
    """Run a paper's figures again; whatever is finished is kept, so a stopped study goes on where it was."""
    from polyeps.accounting.cache import default_directory
    from polyeps.studies import choosing
    from polyeps.studies.figures import quick as in_small
    from polyeps.studies.figures import trials_of, without_missing_data
    from polyeps.studies.pfa import FIGURES
    from polyeps.studies.running import Means, run_all
    from polyeps.studies.trials import Store

    means = Means(device, processes, _shard(shard), choosing.QUICK_GRID if quick else choosing.GRID)
    store = Store(work or default_directory() / "studies" / study)
    wanted = [FIGURES[figure]] if figure else list(FIGURES.values())
    trials = []
    for one in wanted:
        one, sentences = without_missing_data(in_small(one) if quick else one)
        for sentence in sentences:
            remark(f"figure {one.number}: {sentence}")
        trials += list(trials_of(one, 1 if quick else seeds))
    run_all(trials, store, means, lambda what, done, total: remark(f"{what}: {done} of {total}"))


def _shard(text: str) -> tuple[int, int]:
    number, slash, count = text.partition("/")
    if not slash or not number.isdigit() or not count.isdigit():
        raise InputError(f"--shard takes a number of a count, such as 3/8, not {text!r}")
    return int(number), int(count)
