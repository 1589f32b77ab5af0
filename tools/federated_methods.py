"""Draw the tables of federated methods into docs/federated.md (``python tools/federated_methods.py``)."""

from pathlib import Path

from farthing.federated.methods.table import METHODS, every_option

PAGE = Path(__file__).parent.parent / "docs" / "federated.md"
BEGIN, END = "<!-- drawn by tools/federated_methods.py -->\n", "<!-- end -->"


def drawn(page: str) -> str:
    """Return the page with its tables as the records say."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n".join([*methods(), "", *said(), "", *options(), ""]) + rest[rest.index(END) :]


def methods() -> list[str]:
    """Return one row per method."""
    rows = ["| `--method` | description | trust | rounds |", "|---|---|---|---|"]
    for one in METHODS.values():
        trusts = ", ".join(f"`{trust}`" for trust in one.trusts) if one.private else ""
        rows.append(f"| `{one.name}` | {one.summary} | {trusts} | {one.rounds} |")
    return rows


def said() -> list[str]:
    """Return the sentence between the tables."""
    deployed = ", ".join(f"`{one.name}`" for one in METHODS.values() if one.deployed)
    return [
        f"These methods can be [deployed](parties.md): {deployed}.",
        "",
        "The options, here and in the `[method]` table of a run's file (with `_` for `-`):",
    ]


def options() -> list[str]:
    """Return one row per option, with its symbol in each method's text."""
    rows = ["| option | meaning | symbol |", "|---|---|---|"]
    for name, (first, _) in every_option().items():
        symbols: dict[str, list[str]] = {}
        for method in METHODS.values():
            for one in method.options:
                if one.name == name:
                    symbols.setdefault(one.symbol, []).append(f"`{method.name}`")
        cell = "; ".join(f"{symbol} ({', '.join(those)})" for symbol, those in symbols.items())
        rows.append(f"| `{first.flag}` | {first.help} | {cell} |")
    return [row.replace("|C|", "\\|C\\|") for row in rows]  # a bar inside a norm must not end a cell


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
