"""How much was learnt: every accountant in a small file that cites its theorem."""
