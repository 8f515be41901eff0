"""The layers of the zoo's networks. Each file has one family of networks; sizes and weights are chosen in `zoo`."""
