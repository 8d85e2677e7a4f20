"""Where packages come from: pip's settings, handed on to uv, which reads only its own."""

import os
from collections.abc import Mapping

# uv's variable -> (pip's variable, how several values are separated in uv's). uv's own setting always wins.
PASSED_ON = {
    "UV_FIND_LINKS": ("PIP_FIND_LINKS", ","),
    "UV_DEFAULT_INDEX": ("PIP_INDEX_URL", " "),
    "UV_INDEX": ("PIP_EXTRA_INDEX_URL", " "),
    "UV_HTTP_TIMEOUT": ("PIP_DEFAULT_TIMEOUT", " "),
    "SSL_CERT_FILE": ("PIP_CERT", " "),
}
OLD_NAMES = {"UV_DEFAULT_INDEX": "UV_INDEX_URL", "UV_INDEX": "UV_EXTRA_INDEX_URL"}


def uv_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for uv: `environ`, with pip's variables under uv's names where those are unset."""
    result = dict(environ)
    for ours, (theirs, separator) in PASSED_ON.items():
        if environ.get(theirs) and not (environ.get(ours) or environ.get(OLD_NAMES.get(ours, ours))):
            result[ours] = separator.join(environ[theirs].split())
            if ours == "UV_INDEX":  # pip takes the best version of all indexes; uv would stop at the first
                result.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    # An activated environment must not attract what is meant for another one.
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "UV_PROJECT_ENVIRONMENT", "PYTHONPATH", "PYTHONHOME"):
        result.pop(name, None)
    return result
