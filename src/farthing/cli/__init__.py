"""The command line: `main` lists the commands, each a file; none of the library imports this folder."""
