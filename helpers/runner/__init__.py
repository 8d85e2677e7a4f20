"""The `gallery` command: finds recipes, makes their environments, runs them, judges the result."""

import sys

# jsonschema, which reads notebooks for us, would load a grammar of internationalised web addresses: seconds
# at every start, for a check that no notebook needs. None makes that import fail, and jsonschema goes on.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
