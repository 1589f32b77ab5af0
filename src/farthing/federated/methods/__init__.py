"""Train over clients that keep their own records and budgets: one paper a file."""
