"""Claims about speed, as programs: ours and its peers in turn, in one run, with the ratios printed.

    python -m benchmarks                 all of them
    python -m benchmarks gang --rounds 9

Machines are shared and noisy: the rounds are interleaved, and the ratio of medians is the figure to quote.
Every run is kept in `benchmarks/results/`, with the commit that it measured.

    python -m benchmarks.tables          the README's and docs/accelerator.md's tables, from the kept results
"""
