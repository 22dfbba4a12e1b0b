"""Secure sums one step at a time, so that a test can change what is sent in between."""

import numpy as np
from numpy.typing import NDArray

from polyeps.secagg import masks
from polyeps.secagg.client import Kept
from polyeps.secagg.messages import Step, open_signed, stamp
from polyeps.secagg.protocol import seat, take_step
from polyeps.secagg.server import Server
from polyeps.secagg.shamir import Entropy


def seeded(seed: int) -> Entropy:
    """Bytes that are the same in every run of a test."""
    return np.random.default_rng(seed).bytes


class Walk:
    """Some clients and a server that stand before a step: nothing of it is answered yet."""

    def __init__(
        self,
        before: Step,
        names: str = "abcd",
        vector: NDArray[np.uint64] | None = None,  # the same for everybody; zeros, if not given
        bits: int = 16,
        threshold: int = 3,
        run: str = "run",
        round: int = 1,
        seed: int = 0,
        colluders: int = 0,
        late: str = "",  # whose masked vector does not arrive
    ) -> None:
        self.vector = np.zeros(3, np.uint64) if vector is None else vector
        length = len(self.vector)
        self.terms, self.agents = seat(list(names), seeded(seed), run, round, bits, length, threshold, 1, colluders)
        self.server = Server(self.terms)
        self.asked = dict.fromkeys(self.agents, b"")  # what the server sent each client for the present step
        self.past: dict[str, list[Kept]] = {name: [] for name in names}  # what each kept after each step
        self.down: dict[Step, dict[str, bytes]] = {}  # all the server sent
        self.up: dict[Step, dict[str, bytes]] = {}  # all it was sent
        self.late = late
        for step in Step:
            if step == before:
                break
            self.answer_all(step)
            self.asked = self.down[Step(step + 1)] = self.server.advance()

    def answer(self, name: str, step: Step, content: bytes | None = None) -> bytes:
        """A client's answer to what the server sent, or to something else."""
        kept = self.past[name][-1] if self.past[name] else None
        message = self.asked[name] if content is None else content
        after, sent = take_step(self.agents[name], step, kept, message, self.vector)
        self.past[name].append(after)
        return sent

    def answer_all(self, step: Step) -> None:
        """Everybody who is asked answers, and the server takes it, but from those who are late."""
        self.up[step] = {name: self.answer(name, step) for name in self.asked}
        for name, content in self.up[step].items():
            if not (step is Step.MASK and name in self.late):
                self.server.receive(name, content)

    def lie(self, step: Step, to: str, body: bytes) -> bytes:
        """A client's answer to a message a lying server made up."""
        return self.answer(to, step, stamp(self.terms, step, to, body))

    def masked(self, name: str) -> masks.Words:
        """What the server sees of a client's vector."""
        return masks.from_bytes(open_signed(self.terms, Step.MASK, name, self.up[Step.MASK][name]), self.terms.bits)
