"""The frame of a page: self-contained, without scripts, in the reader's light or dark scheme. Needs no matplotlib."""

from html import escape
from pathlib import Path


def framed(title: str, body: str) -> str:
    """A whole page around `body`, which is HTML."""
    css = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)} · Quartet</title>
<style>
{css}</style>
</head>
<body><main>
{body}
</main></body>
</html>
"""


def number(value: float, digits: int = 2, signed: bool = False) -> str:
    """The number as text, with a true minus sign, and without a sign before zero."""
    rounded = round(value, digits) + 0.0
    return format(rounded, f"{'+' if signed and rounded else ''},.{digits}f").replace("-", "−")
