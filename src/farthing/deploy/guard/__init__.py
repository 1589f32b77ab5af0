"""The party's own process: it alone holds records, noise and ledger, and answers what its policy allows."""
