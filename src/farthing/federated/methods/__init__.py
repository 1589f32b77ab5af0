"""Train over clients that keep their own records and budgets: one paper per file."""
