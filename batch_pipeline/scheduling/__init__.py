"""Pure policy: which chunk next, how many workers for which model, why a batch waits and when it will be done."""
