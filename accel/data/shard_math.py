"""The samples of a process in an epoch: pure arithmetic, no torch.

An epoch of N samples is distributed in rounds. A round is one batch for each of P processes, b samples each: in
round s, process r has the samples from (s·P + r)·b on. Accelerate documents this for complete batches in turn
as well as for split batches; only b differs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Share:
    """The share of process ``index`` of ``processes`` in an epoch of ``samples``, ``batch`` of them at a time.

    ``drop_last`` drops the last round if it is incomplete. Otherwise ``even`` completes it with samples from the
    start of the epoch; without ``even`` the last processes have a short batch in it, or none.
    """

    samples: int
    batch: int
    processes: int = 1
    index: int = 0
    even: bool = True
    drop_last: bool = False

    @property
    def round_size(self) -> int:
        """Samples in one round, over all processes."""
        return self.batch * self.processes

    @property
    def steps(self) -> int:
        """Batches of this process."""
        full_rounds, rest = divmod(self.samples, self.round_size)
        if self.drop_last or rest == 0:
            return full_rounds
        return full_rounds + (self.even or rest > self.index * self.batch)

    def span(self, step: int) -> tuple[int, int]:
        """Return first and past-the-end position of batch ``step``; positions from ``samples`` on wrap around."""
        start = step * self.round_size + self.index * self.batch
        end = start + self.batch
        return (start, end) if self.even else (start, min(end, self.samples))

    def real_counts(self, step: int) -> tuple[int, ...]:
        """Return each process's number of real (not repeated) samples in round ``step``, in rank order."""
        start = step * self.round_size
        return tuple(
            min(self.batch, max(0, self.samples - start - rank * self.batch)) for rank in range(self.processes)
        )

    @property
    def remainder(self) -> int:
        """Samples in the last round if it is incomplete and not dropped, else 0."""
        return 0 if self.drop_last else self.samples % self.round_size
