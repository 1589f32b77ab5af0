"""Run the command ``farthing``, as ``python -m farthing`` and as the installed script."""

import sys


def main() -> int:
    """Run the command line; Ctrl-C during its imports ends it with a sentence, too."""
    try:
        from farthing.cli.main import main as command

        return command()
    except KeyboardInterrupt:
        print("farthing: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
