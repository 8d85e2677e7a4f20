"""The page of a run: its notebook as one HTML file, complete in itself, with the result on top."""

from __future__ import annotations

import copy
import html
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
FORMULA = re.compile(r"\$[^$\n]+\$|\$\$|\\\(|\\begin\{")

STYLE = """<style>
body.jp-Notebook { max-width: 68rem; margin: 0 auto; padding: 1rem 1.5rem 4rem; overflow-x: auto; }
.gallery-run { border-left: 4px solid #1f6f43; background: #f4f6f5; padding: .6rem 1rem;
  margin: 0 0 1rem; font: 14px/1.5 system-ui, sans-serif; }
.gallery-run.bad { border-color: #a4262c; background: #fbf3f3; }
.gallery-run table { border-collapse: collapse; margin-top: .4rem; }
.gallery-run td { padding: .1rem 1.2rem .1rem 0; vertical-align: top; }
.jp-RenderedText[data-mime-type="application/vnd.jupyter.stderr"] { background: none; border-left: 3px solid #ccc; }
.jp-OutputArea-output pre { white-space: pre-wrap; overflow-wrap: anywhere; }
</style>"""


def write(notebook: nbformat.NotebookNode, record: Mapping[str, Any], path: Path) -> Path:
    """Write an executed notebook as a page, the outcome of its run at the top.

    The page holds its pictures and styles, and loads nothing; only where the text has formulas does it ask for
    MathJax, without which they show as TeX.
    """
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(
        template_name="lab", embed_images=True, exclude_input_prompt=True, exclude_output_prompt=True,
        preprocessors=["nbconvert.preprocessors.CoalesceStreamsPreprocessor"],
        require_js_url="", jquery_url="", mermaid_js_url="",
    )  # fmt: skip
    if not any(FORMULA.search(cell.source) for cell in notebook.cells if cell.cell_type == "markdown"):
        exporter.mathjax_url = ""
    body, _ = exporter.from_notebook_node(without_papermill_notes(notebook))
    title = html.escape(str(record["title"]))
    body = re.sub(r"<title>.*?</title>", lambda _: f"<title>{title}</title>", body, count=1, flags=re.S)
    body = re.sub(r"<script[^>]+src=\"\"[^>]*>\s*</script>", "", body)
    body = body.replace("</head>", f"{STYLE}</head>", 1)  # last, so that it wins
    body = re.sub(r"(<body[^>]*>)", lambda tag: tag[1] + _banner(record), body, count=1)
    path.write_text(body)
    return path


def without_papermill_notes(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A copy without the red notes that papermill puts above a failed notebook: the banner says it once."""
    notebook = copy.deepcopy(notebook)
    notebook.cells = [
        cell for cell in notebook.cells if "papermill-error-cell-tag" not in cell.metadata.get("tags", [])
    ]
    return notebook


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def _banner(record: Mapping[str, Any]) -> str:
    hardware, versions = record["hardware"], record["versions"]
    gpus = ", ".join(gpu["name"] for gpu in hardware["gpus"]) or "no GPU"
    shown = [f"{name} {versions[name]}" for name in ("torch", "mlflow") if name in versions]
    commit = record["git"]["commit"]
    rows = {
        "Result": f"{record['result']} in {record['seconds']:.0f} s"
        + (f": {record['reason']}" if record["reason"] else ""),
        "Claims": "; ".join(
            f"{claim['claim']} {'holds' if claim['holds'] else 'does not hold'} ({_short(claim['value'])})"
            for claim in record["claims"]
        ),
        "Profile": f"{record['profile']} on {hardware['cores']} cores ({hardware['cpu']}), {gpus}",
        "Versions": ", ".join([f"environment {record['environment']}", *shown]),
        "Run": record["started"] + (f", commit {commit[:10]}" if commit else ""),
    }
    cells = "".join(
        f"<tr><td>{name}</td><td>{html.escape(ANSI.sub('', text))}</td></tr>" for name, text in rows.items() if text
    )
    kind = "gallery-run" if record["exit_code"] == 0 else "gallery-run bad"
    return f'<div class="{kind}"><table>{cells}</table></div>'
