"""`/docs`: the OpenAPI document as a page, with its scripts from this service: it is read without the internet, too."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles

_SCRIPTS = "/docs/scripts"
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'"
}


def install(app: FastAPI) -> None:
    """Serve the page and its scripts: those that the package fastapi-offline carries."""
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=f"{app.title}: API",
        swagger_js_url="docs/scripts/swagger-ui-bundle.js",
        swagger_css_url="docs/scripts/swagger-ui.css",
        swagger_favicon_url="docs/scripts/favicon.png",
    )
    page.headers.update(_HEADERS)

    @app.get("/docs", include_in_schema=False)
    def documentation() -> HTMLResponse:
        return page

    app.mount(_SCRIPTS, StaticFiles(directory=str(files("fastapi_offline") / "static")))
