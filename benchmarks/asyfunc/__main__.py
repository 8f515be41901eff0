"""Repeats AsyFunc's evaluation: `python -m benchmarks.asyfunc --level model` simulates scaling by whole models."""

import argparse

from benchmarks.asyfunc import model_level


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", choices=("model",), required=True, help="whole models, under bursts")
    parser.add_argument(
        "--seconds", type=float, help="seconds of the day to simulate; by default those of the scenario"
    )
    parser.add_argument("--seed", type=int, help="seed of the arrivals; by default that of the scenario")
    parser.add_argument(
        "--seeds", type=int, default=2, help="number of seeds for the table of equal conditions; default 2"
    )
    options = parser.parse_args()
    model_level.run(options.seconds, options.seed, options.seeds)


if __name__ == "__main__":
    main()
