"""Guard a party's records: the one process that holds records, noise and ledger, and enforces the policy."""
