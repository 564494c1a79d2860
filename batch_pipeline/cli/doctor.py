"""`doctor`: looks at every part and says what to mend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.text import Text

from batch_pipeline.cli.app import App, pass_app, print_json
from batch_pipeline.plain import printable

if TYPE_CHECKING:
    from batch_pipeline.cli.checks import Finding

_STYLES = {"ok": "green", "note": "yellow", "mend": "bold red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a list of {part, state, detail, mend}.")
@pass_app
def doctor(app: App, as_json: bool) -> int:
    """Check the configuration and every part, and say what to mend.

    Exit status 1 where something must be mended. Takes some seconds: it imports the engine.
    """
    # The checks import every part; the other commands have no need of that.
    from batch_pipeline.cli import checks

    findings = []
    for finding in checks.run_all(app):
        findings.append(finding)
        if not as_json:
            _show(app.console, finding)
    if as_json:
        print_json(findings)
    broken = sum(finding.state == checks.State.MEND for finding in findings)
    if not as_json:
        app.console.print(f"{broken} of {len(findings)} must be mended" if broken else "everything works")
    return 1 if broken else 0


def _show(console: Console, finding: Finding) -> None:
    console.print(
        Text.assemble((f"{finding.state:<5}", _STYLES[finding.state]), printable(f"{finding.part}: {finding.detail}"))
    )
    if finding.mend is not None:
        console.print(f"     mend: {finding.mend}")


COMMANDS = (doctor,)
