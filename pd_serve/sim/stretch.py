"""A stretch of equal steps: between two changes of its batch an engine's steps can be foretold."""

from __future__ import annotations

from math import sqrt


class Stretch:
    """`steps` steps that follow each other, each `growth` seconds longer than the one before.

    Args:
        start: when the first step begins.
        first_s: seconds of the first step.
        growth_s: how much longer each step is: the KV that the sequences read grows by one token each.
        steps: how many; `cut` may lower it.
    """

    __slots__ = ("first_s", "growth_s", "start", "steps")

    def __init__(self, start: float, first_s: float, growth_s: float, steps: int) -> None:
        self.start = start
        self.first_s = first_s
        self.growth_s = growth_s
        self.steps = steps

    def elapsed(self, steps: int) -> float:
        """Seconds that the first `steps` steps take."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) // 2)

    @property
    def end(self) -> float:
        return self.start + self.elapsed(self.steps)

    def done(self, now: float) -> int:
        """Steps that are over at `now`."""
        passed = now - self.start
        if passed <= 0:
            return 0
        if self.growth_s == 0:
            guess = int(passed / self.first_s)
        else:
            half = self.first_s / self.growth_s - 0.5
            guess = int(sqrt(half * half + 2 * passed / self.growth_s) - half)
        guess = min(max(guess, 0), self.steps)
        while guess < self.steps and self.start + self.elapsed(guess + 1) <= now:
            guess += 1
        while guess > 0 and self.start + self.elapsed(guess) > now:
            guess -= 1
        return guess

    def cut(self, now: float) -> bool:
        """End with the step that runs at `now`. False when it does so anyway."""
        steps = self.done(now) + 1
        if steps >= self.steps:
            return False
        self.steps = steps
        return True
