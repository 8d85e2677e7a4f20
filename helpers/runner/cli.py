"""The `gallery` command line: a few lines per command here, what it does in a module of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from helpers.runner import catalog, environments, errors, locks, parameters
from helpers.runner.errors import BadInput, BuildFailed
from helpers.runner.processes import signals_as_exceptions

app = typer.Typer(
    help="Run, check and look after the recipes of the DDP gallery.",
    context_settings={"max_content_width": 120},
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
)  # fmt: skip

Recipes = Annotated[list[str], typer.Argument(help='Numbers or names of recipes ("01"), or "all".')]


@app.command("list")
def list_() -> None:
    """List the recipes, their environments and profiles."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("recipe", "title", "environment", "profiles (expected minutes)"):
        table.add_column(head)
    for recipe in catalog.recipes(catalog.root()):
        profiles = ", ".join(f"{p.name} ({p.minutes:g})" for p in recipe.profiles.values())
        table.add_row(recipe.name, recipe.title, recipe.environment, profiles)
    _console().print(table)


@app.command()
def show(recipe: Annotated[str, typer.Argument(help="Number or name of a recipe.")]) -> None:
    """Show one recipe: what it is, its profiles, and its parameters with their types and defaults."""
    console = _console()
    (found,) = catalog.select(catalog.root(), [recipe])
    console.print(Text(found.title, style="bold"))
    console.print(Text(str(found.metadata["summary"])))
    facts = ("environment", "framework", "task", "strategy")
    console.print(Text("\n".join(f"{name}: {found.metadata[name]}" for name in facts)))
    profiles = Table("profile", "hardware", "minutes", "ran", box=None, pad_edge=False, header_style="bold")
    for profile in found.profiles.values():
        ran = "yes" if profile.ran else "not yet"
        profiles.add_row(profile.name, profile.hardware, f"{profile.minutes:g}", ran)
    console.print("", profiles, "")
    table = Table("parameter", "type", "default", "meaning", box=None, pad_edge=False, header_style="bold")
    for parameter in parameters.read_parameters(found.load()).values():
        kind, default = " | ".join(parameter.types), repr(parameter.default)
        table.add_row(parameter.name, kind, Text(default), Text(parameter.comment))
    console.print(table)


@app.command()
def env(
    names: Annotated[list[str] | None, typer.Argument(help="Environments to make; none lists them.")] = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Make it again, even if it is ready.")] = False,
) -> None:
    """Make environments from their locks and register them as Jupyter kernels of the same name."""
    base = catalog.root()
    known = [name for name in locks.environment_names(base) if name != "runner"]
    for name in names or []:
        if name not in known:
            raise errors.unknown("environment", name, known)
    for name in names or []:
        python = environments.make(base, name, _say, rebuild=rebuild)
        _say(f"environment {name}: {python}, kernel {name!r}")
    if not names:
        for name in known:
            state = "ready" if environments.is_ready(base, name) else "not made"
            _say(f"{name}: {locks.fault(base, name) or state}")


@app.command()
def lock(
    names: Annotated[list[str] | None, typer.Argument(help="Environments to lock; none means all.")] = None,
    upgrade: Annotated[bool, typer.Option("--upgrade", help="Take newer versions where allowed.")] = False,
) -> None:
    """Compile an environment's requirements to one pinned file for CPU and CUDA machines."""
    base = catalog.root()
    for name in names or locks.environment_names(base):
        locks.specification(base, name)  # a misspelt name fails before the first is compiled
    for name in names or locks.environment_names(base):
        path = locks.compile_lock(base, name, upgrade=upgrade)
        _say(f"wrote {path.relative_to(base)}")


@app.command()
def run(
    recipes: Recipes,
    profile: Annotated[str | None, typer.Option(help="Profile; without it the notebook's default.")] = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option("-p", "--parameter", metavar="NAME VALUE",
                     help="Set a parameter; may be repeated."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help="YAML file of parameters; -p wins over it.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(help="Time limit in minutes; without it ten times the expected time, at least 15."),
    ] = None,
    kernel: Annotated[
        str | None,
        typer.Option(help="Run in this Jupyter kernel instead of making the recipe's environment."),
    ] = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first failure.")] = False,
    budget: Annotated[
        float | None, typer.Option(help="Minutes for all: what no longer fits is named and not run.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="A git revision: recipes changed since then run first.")
    ] = None,
) -> None:  # fmt: skip
    """Run recipes: live output, a folder per run, exit code 0 only if every claim holds.

    Exit codes: 0 all passed, 1 a notebook failed, 2 bad input (nothing was started), 3 a claim does not
    hold or nothing was recorded, 130 interrupted (143 by SIGTERM).
    """
    from helpers.runner import batch

    pairs = [parameters.split_pair(text) for text in parameter or []]
    request = batch.Request(recipes, profile, pairs, file, timeout, kernel, fail_fast, budget, since)
    raise typer.Exit(batch.run(catalog.root(), request, _console(), _say))


@app.command(
    "fit",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def fit_(context: typer.Context) -> None:
    """Tell whether a language model's full-size training step fits, on any machine: `gallery fit --help`."""
    from helpers.runner import fit

    raise typer.Exit(fit.run(catalog.root(), context.args, _say))


@app.command("check")
def check_(recipes: Recipes) -> None:
    """Check notebooks without running them: structure, parameters, names, lock, links."""
    from helpers.runner import check

    base = catalog.root()
    paths = catalog.select_paths(base, recipes)
    faults = [fault for path in paths for fault in check.check(base, path)]
    for fault in faults:
        _say(str(fault))
    stale = [problem for name in locks.environment_names(base) if (problem := locks.fault(base, name))]
    for problem in stale:
        _say(problem)
    count = f"{len(paths)} notebook{'s' if len(paths) != 1 else ''}"
    _say(f"gallery check: {count}, {len(faults) + len(stale)} faults")
    raise typer.Exit(errors.NOTEBOOK_FAILED if faults or stale else errors.OK)


@app.command("doctor")
def doctor_() -> None:
    """Look at this machine: GPUs, drivers, torch, disk, shared memory, ports, hub."""
    from helpers.runner import doctor

    console, wrong = _console(), 0
    styles = {doctor.GOOD: "green", doctor.NOTE: "yellow", doctor.BAD: "bold red"}
    for finding in doctor.examine(catalog.root()):
        line = Text(f"{finding.state:<6}", style=styles[finding.state]) + Text(f"{finding.topic}: {finding.text}")
        console.print(line, soft_wrap=True)
        if finding.remedy:
            console.print(Text(f"      -> {finding.remedy}"), soft_wrap=True)
        wrong += finding.state == doctor.BAD
    raise typer.Exit(errors.NOTEBOOK_FAILED if wrong else errors.OK)


@app.command("clean")
def clean_(
    what: Annotated[
        list[str] | None, typer.Argument(help="runs, environments, caches or all; none shows their sizes.")
    ] = None,
    keep: Annotated[int, typer.Option(min=0, help="Keep this many newest runs of each recipe.")] = 0,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove runs, environments or caches; says what would be freed, and asks."""
    from helpers.runner import clean

    found = clean.heaps(catalog.root(), keep=keep)
    for kind in what or []:
        if kind != "all" and kind not in found:
            raise errors.unknown("kind of files", kind, [*found, "all"])
    chosen = list(found) if not what or "all" in what else what
    for kind in chosen:
        _say(str(found[kind]))
    if not what:
        return
    if not yes and not sys.stdin.isatty():
        raise BadInput("nothing was removed: give --yes where nobody can be asked.")
    if not yes and not typer.confirm("Remove them?"):
        _say("nothing was removed")
        return
    for kind in chosen:
        clean.remove(found[kind])
    _say(f"freed {sum(found[kind].size for kind in chosen) / 2**20:,.1f} MiB")


def main(arguments: list[str] | None = None) -> None:
    """Entry point: bad input ends in one sentence and exit code 2, never in a traceback."""
    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")  # our kernels, not a user's of the same name
    with signals_as_exceptions():
        try:
            app(parameters.join_pairs(sys.argv[1:] if arguments is None else arguments))
        except (BadInput, BuildFailed) as error:
            Console(stderr=True, highlight=False).print(Text(f"gallery: {error}"), soft_wrap=True)
            sys.exit(errors.BAD_INPUT if isinstance(error, BadInput) else errors.NOTEBOOK_FAILED)


def _console() -> Console:
    """Colours on a terminal; elsewhere lines as long as they need, so that logs can be searched."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
