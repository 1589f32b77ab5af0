"""What papers report, computed again: ``python -m experiments NAME``. The library never imports this."""
