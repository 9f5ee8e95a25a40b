"""What mkdocstrings makes of the package's docstrings: an extension of Griffe, which reads them."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Takes reST's roles out (``:class:`Tokens```), and names sections as Griffe knows them."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of a class, a function or a module, as it is loaded."""
        if obj.docstring is not None:
            text = re.sub(r":(?:class|func|meth|attr|mod|math):`~?([^`]+)`", r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
