"""Local SGD and (Streaming) DiLoCo of several workers in numpy, as their papers have them."""

import numpy as np


def forward(weights, x):
    hidden = np.tanh(x * 0.05 @ weights[0] + weights[1])
    return hidden, hidden @ weights[2] + weights[3]


def gradients(weights, x, y):
    """Of the mean squared error of `Dense(tanh)`, `Dense` on inputs times 0.05."""
    hidden, output = forward(weights, x)
    error = 2.0 * (output - y) / y.size
    back = error @ weights[2].T * (1.0 - hidden**2)
    return [(x * 0.05).T @ back, back.sum(0), hidden.T @ error, error.sum(0)]


class SGD:
    def __init__(self, rate, momentum=0.0, nesterov=False, ema=None):
        self.rate, self.momentum, self.nesterov, self.ema = rate, momentum, nesterov, ema
        self.velocity, self.average = None, None

    def step(self, weights, grads):
        self.velocity = self.velocity or [np.zeros_like(w) for w in weights]
        for i, (weight, grad) in enumerate(zip(weights, grads)):
            self.velocity[i] = self.momentum * self.velocity[i] - self.rate * grad
            change = self.velocity[i]
            if self.nesterov:
                change = self.momentum * change - self.rate * grad
            weights[i] = weight + change
        if self.ema is not None:
            before = self.average or weights
            self.average = [self.ema * a + (1 - self.ema) * w for a, w in zip(before, weights)]


class Adam:
    def __init__(self, rate):
        self.rate, self.steps, self.m, self.v = rate, 0, None, None

    def step(self, weights, grads):
        self.m = self.m or [np.zeros_like(w) for w in weights]
        self.v = self.v or [np.zeros_like(w) for w in weights]
        self.steps += 1
        rate = self.rate * np.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
        for i, grad in enumerate(grads):
            self.m[i] = 0.9 * self.m[i] + 0.1 * grad
            self.v[i] = 0.999 * self.v[i] + 0.001 * grad**2
            weights[i] = weights[i] - rate * self.m[i] / (np.sqrt(self.v[i]) + 1e-7)


class Fragment:
    """Variables of some places, and what all workers know of them."""

    def __init__(self, places, outer, weights):
        self.places, self.outer = places, outer
        self.anchor = [weights[i].copy() for i in places]
        self.seen, self.under_way = None, None


class Simulation:
    """Workers that step alone, one after the other.

    Args:
        policy: The policy.
        weights: First weights.
        make_inner: Function that makes a worker's optimizer.
        make_outer: Function that makes the outer one, or None.
        fragments: Places of the variables of each fragment.
        workers: Number of workers.
        groups: Groups of workers that step together; by default each alone.
    """

    def __init__(self, policy, weights, make_inner, make_outer, fragments, workers=2, groups=None):
        self.replicas, self.groups = workers, groups or [[i] for i in range(workers)]
        workers = len(self.groups)
        self.policy, self.count, self.total = policy, 0, 0
        self.inner = [make_inner() for _ in range(workers)]
        self.weights = [[np.asarray(w, "float64") for w in weights] for _ in range(workers)]
        self.fragments = [
            Fragment(places, make_outer and make_outer(), self.weights[0]) for places in fragments
        ]

    def step(self, x, y):
        start = getattr(self.policy, "start_step", 0)
        cuts = [-(-r * len(x) // self.replicas) for r in range(self.replicas + 1)]
        own = [np.arange(*pair) for pair in zip(cuts, cuts[1:])]
        parts = [np.concatenate([own[i] for i in group]) for group in self.groups]
        rows = np.array([len(part) for part in parts], "float64")
        grads = [gradients(w, x[part], y[part]) for w, part in zip(self.weights, parts)]
        self.total += 1
        if self.total <= start:
            mean = [sum(r / rows.sum() * g for r, g in zip(rows, all_)) for all_ in zip(*grads)]
            for inner, weights in zip(self.inner, self.weights):
                inner.step(weights, mean)
            for fragment in self.fragments:
                fragment.anchor = [self.weights[0][i].copy() for i in fragment.places]
            return
        for inner, weights, own in zip(self.inner, self.weights, grads):
            inner.step(weights, own)
        self.count += 1
        policy, number = self.policy, len(self.fragments)
        for i, fragment in enumerate(self.fragments):
            fragment.seen = rows if fragment.seen is None else fragment.seen + rows
            if fragment.under_way and self.count == fragment.under_way[0] + policy.overlap_steps:
                self._arrive(fragment, fragment.under_way[1], policy.alpha)
            if (self.count - (i + 1) * policy.every // number) % policy.every == 0:
                self._send(fragment)
                if not policy.overlap_steps:
                    self._arrive(fragment, fragment.under_way[1], policy.alpha)

    def finish(self):
        for fragment in self.fragments:
            if fragment.under_way:
                self._arrive(fragment, fragment.under_way[1], self.policy.alpha)
            if fragment.seen is not None:
                self._send(fragment)
                self._arrive(fragment, fragment.under_way[1], 0.0)
            for weights in self.weights:
                for i, anchor in zip(fragment.places, fragment.anchor):
                    weights[i] = anchor
        self.count = 0

    def _send(self, fragment):
        shares = fragment.seen / fragment.seen.sum()
        mean = [
            sum(share * (anchor - weights[i]) for share, weights in zip(shares, self.weights))
            for i, anchor in zip(fragment.places, fragment.anchor)
        ]
        fragment.under_way, fragment.seen = (self.count, mean), None
        if fragment is self.fragments[-1]:
            self._average_the_rest(shares)

    def _average_the_rest(self, shares):
        kinds = ["average"] if self.inner[0].ema is not None else []
        kinds += ["velocity"] if getattr(self.policy, "average_slots", False) else []
        for kind in kinds:
            of_all = zip(*(getattr(inner, kind) for inner in self.inner))
            mean = [sum(s * one for s, one in zip(shares, ones)) for ones in of_all]
            for inner in self.inner:
                setattr(inner, kind, list(mean))

    def _arrive(self, fragment, grads, alpha):
        new = [anchor.copy() for anchor in fragment.anchor]
        (fragment.outer or SGD(1.0)).step(new, grads)
        fragment.anchor, fragment.under_way = new, None
        for weights in self.weights:
            for i, one in zip(fragment.places, new):
                weights[i] = alpha * weights[i] + (1 - alpha) * one
