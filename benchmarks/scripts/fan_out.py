"""`fan_out.py CONFIG HOSTS`: a program that does nothing, on all of them at once; prints the seconds of doing so again,
over connections that are there by then, with a third argument `again`."""

import sys
import time

from schedulers.hosts.host_list import parse_hosts
from schedulers.hosts.transport import Pool

config, hosts = sys.argv[1], parse_hosts(sys.argv[2])
with Pool(config=config) as pool:
    for _ in range(2 if sys.argv[3:] == ["again"] else 1):
        started = time.perf_counter()
        for outcome in pool.map(lambda remote: remote.run(["true"]), hosts):
            outcome.get()
        taken = time.perf_counter() - started
print(taken)
