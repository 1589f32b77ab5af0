"""The site: `make docs` builds it into site/, offline, and fails at the first warning."""

import re

import farthing

project = "farthing"
author = "the farthing authors"
version = release = farthing.__version__
html_title = f"farthing {version}"
language = "en-GB"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
napoleon_google_docstring = False
napoleon_use_ivar = True  # attributes as a list: members have entries of their own
# Tables under figures/ are linked where they are discussed; a type of several homes is linked to one of them.
suppress_warnings = ["toc.not_included", "ref.python"]
myst_heading_anchors = 3  # page.md#a-heading leads to the same place here and in the repository

html_theme = "furo"  # light and dark; no fonts or scripts from elsewhere
html_static_path = ["_static"]
html_css_files = ["site.css"]
pygments_dark_style = "github-dark"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6b63", "color-brand-content": "#0b6b63"},
    "dark_css_variables": {"color-brand-primary": "#5fc9bd", "color-brand-content": "#5fc9bd"},
}

# A name in single backticks becomes a link where it is known, and stays code where it is not.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False

# Docstrings are plain sentences: |x|, coef_ and a * b mean themselves, not reStructuredText.
_LITERAL = re.compile(r"(^ *\* |``.+?``|`[^`]+`|\*\*[\w .,]+\*\*|\*\w+\*)")  # the first: an item of a list
# Aliases, as they come out when they are written out.
_ALIASES = {
    r"~[\w.]*GaussianEvent \| .*?ComposedEvent": "Event",
    r"~[\w.]*_Buffer \| .*?_NestedSequence\[complex[^\]]*\]": "ArrayLike",
    r"~numpy\.ndarray\[tuple\[~typing\.Any, \.\.\.\], ~numpy\.dtype\[~?(?:[\w.]*\.)?(\w+)\]\]": "Array",
}


def _plain(line):
    parts = _LITERAL.split(line)
    parts[::2] = [re.sub(r"([|*]|_\b)", r"\\\1", part) for part in parts[::2]]
    return re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", "".join(parts))


def _docstring(app, what, name, obj, options, lines):
    """Escapes what is not meant as markup; makes lists of scikit-learn's "Parameters" and "Attributes"."""
    made, listed, literal = [], False, False
    for line in lines:
        literal = line.lstrip().startswith(">>>") or (literal and bool(line.strip()))
        if literal:
            made.append(line)
        elif line and not line.strip("-"):
            made[-1:] = [f"**{made[-1]}**", ""]
            listed = True
        elif listed and (entry := re.match(r"([\w, ]+) : (.*)", line)):
            names = ", ".join(f"``{each}``" for each in entry[1].split(", "))
            made.append(f"* {names}: {_plain(entry[2])}")
        else:
            made.append(_plain(line))
    lines[:] = made


def _signature(app, what, name, obj, options, signature, returns):
    for long, short in _ALIASES.items():
        signature, returns = (text and re.sub(long, short, text) for text in (signature, returns))
    return signature, returns


def setup(app):
    app.connect("autodoc-process-docstring", _docstring)
    app.connect("autodoc-process-signature", _signature)
