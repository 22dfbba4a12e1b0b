"""The command line: thin shells over library calls. Figures go to stdout, messages to stderr; bad input exits 2."""

import gc
import sys
from importlib.metadata import entry_points
from typing import Any

import click
import typer
from typer.core import TyperCommand, TyperOption

from polyeps import __version__
from polyeps.cli import (
    audit,
    certificate,
    certify,
    data,
    deploy,
    export,
    ledger,
    model,
    new,
    plan,
    predict,
    report,
    run,
    watch,
)
from polyeps.cli.output import be_quiet
from polyeps.errors import LedgerTampered, PolyepsError, suggest

app = typer.Typer(
    name="polyeps",
    help="Federated learning in which every client sets its own privacy budget.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
_EXPERIMENTS, _PRIVACY, _MODELS, _DEPLOYED = "Experiments", "Privacy", "Data and models", "Federations of silos"
for panel, name, command in (
    (_EXPERIMENTS, "demo", run.demo),
    (_EXPERIMENTS, "new", new.new),
    (_EXPERIMENTS, "plan", plan.plan_command),
    (_EXPERIMENTS, "run", run.run_command),
    (_EXPERIMENTS, "watch", watch.watch),
    (_EXPERIMENTS, "report", report.report),
    (_PRIVACY, "certificate", certificate.certificate),
    (_PRIVACY, "audit", audit.audit),
    (_MODELS, "predict", predict.predict),
    (_MODELS, "export", export.export),
    (_DEPLOYED, "superlink", deploy.superlink),
    (_DEPLOYED, "serve", deploy.serve_command),
    (_DEPLOYED, "silo", deploy.silo_command),
):
    app.command(name, rich_help_panel=panel)(command)
app.add_typer(certify.certify_app, name="certify", rich_help_panel=_PRIVACY)
app.add_typer(certify.calibrate_app, name="calibrate", rich_help_panel=_PRIVACY)
app.add_typer(ledger.ledger_app, name="ledger", rich_help_panel=_PRIVACY)
app.add_typer(data.data_app, name="data", rich_help_panel=_MODELS)
app.add_typer(model.model_app, name="model", rich_help_panel=_MODELS)
app.add_typer(deploy.deploy_app, name="deploy", rich_help_panel=_DEPLOYED)
_OWN = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
_OTHERS = {found.name: found for found in entry_points(group="polyeps.commands") if found.name not in _OWN}
for found in _OTHERS.values():  # of packages that build on this one, such as reproductions
    try:
        app.command(found.name, rich_help_panel=_EXPERIMENTS)(found.load())
    except Exception as problem:  # of another package: the other commands work without it
        print(f"polyeps: the command {found.name!r} of {found.value} cannot be loaded: {problem}", file=sys.stderr)


class QuietCommand(TyperCommand):
    """A command that takes --quiet, beside its own options."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.params.append(
            TyperOption(
                param_decls=["--quiet", "-q"],
                is_flag=True,
                expose_value=False,
                callback=be_quiet,
                help="No progress and no remarks; figures and errors stay.",
            )
        )


def _all_quiet(some: typer.Typer) -> None:
    for command in some.registered_commands:
        command.cls = QuietCommand
    for group in some.registered_groups:
        if group.typer_instance is not None:
            _all_quiet(group.typer_instance)


_all_quiet(app)


@app.callback(invoke_without_command=True)
def polyeps(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    """Federated learning in which every client sets its own privacy budget."""
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; errors of our own become one sentence on stderr."""
    gc.set_threshold(50_000)  # of 700, imports alone would collect thousands of times, and find nothing
    sys.exit(execute(sys.argv[1:]))


def execute(arguments: list[str]) -> int:
    """Run one command and return its exit status: 0 done, 1 a check failed, 2 bad input."""
    try:
        status = app(arguments, standalone_mode=False, prog_name="polyeps")
    except click.exceptions.NoArgsIsHelpError as asked:
        asked.show(sys.stdout)
        return 2
    except click.ClickException as problem:
        # For an unknown command typer suggests one in the message, and click repeats it.
        hinted = "Did you mean" in problem.message
        if arguments[:1] == ["reproduce"] and "reproduce" not in _OTHERS:
            return _say("the papers' studies are the package polyeps-reproductions; pip install ./reproductions", 2)
        return _say(problem.message if hinted else _with_remedy(problem), 2)
    except click.Abort:
        return _say("stopped", 130)
    except LedgerTampered as problem:
        return _say(str(problem), 1)
    except PolyepsError as problem:
        return _say(str(problem), 2)
    return status if isinstance(status, int) else 0


def _with_remedy(problem: click.ClickException) -> str:
    """Return what is wrong, and the name that may be meant or where to look."""
    said, context = problem.format_message(), getattr(problem, "ctx", None)
    kind = getattr(getattr(problem, "param", None), "type", None)
    if isinstance(problem, click.NoSuchOption) and context:
        options = {one.lstrip("-"): one for param in context.command.params for one in param.opts if one[:2] == "--"}
        near = suggest(problem.option_name.lstrip("-"), options, " ").removeprefix("did you mean ").strip("'? ")
        said = f"No such option {problem.option_name!r}." + (f" Did you mean {options[near]!r}?" if near else "")
    elif isinstance(kind, click.Choice):
        near = suggest(problem.message.split("'")[1], kind.choices, " ")
        return f"{said} {near[0].upper()}{near[1:]}".rstrip()
    if context and not said.endswith("?"):
        return f"{said.removesuffix('.')}; see {context.command_path} -h"
    return said


def _say(message: str, status: int) -> int:
    print(f"polyeps: {message}", file=sys.stderr)
    return status
