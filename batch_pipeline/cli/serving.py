"""`serve`: the HTTP service in this process."""

from __future__ import annotations

import logging
import sys

import click
import msgspec

from batch_pipeline.cli.app import App, pass_app


@click.command()
@click.option("--host", help="Address to listen on. Default: api.host of the configuration.")
@click.option("--port", type=click.IntRange(1, 65_535), help="Default: api.port of the configuration.")
@pass_app
def serve(app: App, host: str | None, port: int | None) -> None:
    """Serve the APIs of the openai and anthropic SDKs in this process, until Ctrl-C.

    Keys are made by `batch-pipeline customers keys add CUSTOMER`. It speaks plain HTTP, on loopback unless told
    otherwise: put a proxy with TLS before it where others can reach it.
    """
    # Only this command needs the web framework.
    from batch_pipeline.api import serving

    settings = app.settings
    api = msgspec.structs.replace(settings.api, host=host or settings.api.host, port=port or settings.api.port)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    click.echo(f"serving http://{api.host}:{api.port}/v1 (documentation at /docs)", err=True)
    serving.serve(app.ledger, app.store, msgspec.structs.replace(settings, api=api))


COMMANDS = (serve,)
