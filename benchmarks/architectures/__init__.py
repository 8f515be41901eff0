"""Which layers do the zoo's networks have? Each file writes one family; sizes and weights are chosen in `zoo`."""
