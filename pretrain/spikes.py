"""Losses that jump: the sign of a bad batch or of an update that was too long, seen before it ruins a run."""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

WINDOW, FEWEST = 128, 32  # losses looked back on; before there are so many nothing is a spike


class Spikes:
    """Robust z-scores: how far a loss lies above the median of those before it, in units of 1.4826 × their median absolute deviation, which
    is the standard deviation of a normal distribution and which the spikes themselves do not widen.

    llm.c skips an update by the ordinary z-score over 128 steps (llmc/outlier_detector.h), OLMo-core likewise (SkipStepOptimizer).
    """

    def __init__(self, limit: float, before: Sequence[float] = ()) -> None:
        self.limit = limit  # 0: nothing is
        self.before = deque(before, WINDOW)

    def first(self, losses: Sequence[float]) -> int | None:
        """The index of the first spike among these, which come after all that was looked at before; what follows it is forgotten."""
        for index, loss in enumerate(losses):
            if self.limit and len(self.before) >= FEWEST and self.score(loss) > self.limit:
                return index
            if math.isfinite(loss):
                self.before.append(loss)
        return None

    def score(self, loss: float) -> float:
        middle = median(self.before)
        spread = 1.4826 * median(abs(value - middle) for value in self.before)
        return (loss - middle) / max(spread, 1e-6)
