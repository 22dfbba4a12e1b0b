"""`polyeps watch`: the report's page while a run goes on, in a browser on this machine."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from polyeps.cli.output import Json, print_either, remark


def watch(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs or of sweeps.", metavar="RUN...")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port on 127.0.0.1; 0: one that is free.")] = 0,
    as_json: Json = False,
) -> None:
    """Serve the page of a run, simulated or deployed, while it goes on: on this machine alone, read-only.

    Open the address that is printed. Its token is the key: whoever has it on this machine sees the page. Ctrl-C ends.
    """
    from polyeps.experiment.sweep import run_folders
    from polyeps.report.live import serve_live

    def ready(address: str) -> None:
        print_either(as_json, {"address": address}, address)
        sys.stdout.flush()
        remark("open this address in a browser on this machine; Ctrl-C ends the live view, not the run")

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        serve_live(run_folders(runs), port, ready, remark)
    except KeyboardInterrupt:
        remark("the live view has ended")
