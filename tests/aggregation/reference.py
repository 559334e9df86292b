"""Slow reference implementations of all rules in NumPy, written from their definitions."""

from __future__ import annotations

import itertools
import math

import numpy as np


def distances(x):
    return np.array([[np.linalg.norm(a - b) for b in x] for a in x])


def nearest_mean(x, centre, keep):
    order = np.argsort(np.abs(x - centre), axis=0, kind="stable")[:keep]
    return np.take_along_axis(x, order, axis=0).mean(0)


def krum_scores(x, f):
    squares, n = distances(x) ** 2, len(x)
    return np.array([np.sort(np.delete(squares[i], i))[: max(1, n - f - 2)].sum() for i in range(n)])


def first_least(values, count=1):
    return np.argsort(np.round(values, 10), kind="stable")[:count]


def mean(x):
    return sum(x) / len(x)


def median(x):
    return np.median(x, axis=0)


def trimmed_mean(x, f):
    return np.sort(x, axis=0)[f : len(x) - f].mean(0)


def meamed(x, f):
    return nearest_mean(x, median(x), len(x) - f)


def phocas(x, f):
    return nearest_mean(x, trimmed_mean(x, f), len(x) - f)


def krum(x, f):
    return x[first_least(krum_scores(x, f))[0]]


def multi_krum(x, f, m=None):
    return x[first_least(krum_scores(x, f), m or len(x) - f)].mean(0)


def bulyan(x, f):
    left, picked = list(range(len(x))), []
    while len(picked) < len(x) - 2 * f:
        picked.append(left.pop(first_least(krum_scores(x[left], f))[0]))
    chosen = x[sorted(picked)]
    return nearest_mean(chosen, median(chosen), len(chosen) - 2 * f)


def mda(x, f):
    away, n = np.round(distances(x), 10), len(x)
    best = min(itertools.combinations(range(n), n - f), key=lambda s: (away[np.ix_(s, s)].max(), s))
    return x[list(best)].mean(0)


def smea(x, f):
    def spread(subset):
        away = x[list(subset)] - x[list(subset)].mean(0)
        if x.shape[1] > len(subset):  # the covariance is zero along any further direction
            away = away @ np.linalg.qr(away.T)[0]
        return np.linalg.eigvalsh(away.T @ away / len(subset))[-1]

    subsets = list(itertools.combinations(range(len(x)), len(x) - f))
    spreads = np.array([spread(subset) for subset in subsets])
    return x[list(subsets[(spreads <= spreads.min() * (1 + 1e-10)).argmax()])].mean(0)


def medoid(x):
    return x[first_least(distances(x).sum(1))[0]]


def cge(x, f):
    return x[first_least(np.linalg.norm(x, axis=1), len(x) - f)].mean(0)


def aksel(x, f):
    return x[first_least(np.linalg.norm(x - median(x), axis=1), len(x) - f)].mean(0)


def monna(x, f, row=0):
    return x[first_least(np.linalg.norm(x - x[row], axis=1), len(x) - f)].mean(0)


def clipped(x, c):
    return np.array([row if np.linalg.norm(row) <= c else row * (c / np.linalg.norm(row)) for row in x])


def norm_clipping(x, c):
    return clipped(x, c).mean(0)


def arc_rows(x, f):
    n = len(x)
    k = math.floor(2 * f / n * (n - f) + 1e-9)
    order = sorted(range(n), key=lambda i: -np.linalg.norm(x[i]))
    bound = np.linalg.norm(x[order[k]])
    return np.array([clipped(x[i : i + 1], bound)[0] if i in order[:k] else x[i] for i in range(n)])


def arc(x, f):
    return arc_rows(x, f).mean(0)


def centered_clipping(x, tau=10.0, iterations=1, start="zeros", last=None):
    v = last if last is not None else np.zeros(x.shape[1]) if start == "zeros" else x.mean(0)
    for _ in range(iterations):
        v = v + np.mean([(row - v) * min(1, tau / max(np.linalg.norm(row - v), 1e-300)) for row in x], axis=0)
    return v


def geometric_median(x, nu=1e-6, iterations=1000, tol=1e-10, start="mean", weights=None):
    a = np.ones(len(x)) / len(x) if weights is None else np.asarray(weights) / np.sum(weights)
    z = a @ x if start == "mean" else np.zeros(x.shape[1])
    for _ in range(iterations):
        pull = a / np.maximum(nu, np.linalg.norm(x - z, axis=1))
        before, z = z, pull @ x / pull.sum()
        if np.linalg.norm(z - before) <= tol * np.linalg.norm(z):
            break
    return z


def nnm_rows(x, f):
    away = np.round(distances(x), 10)
    np.fill_diagonal(away, -1)
    return np.array([x[np.argsort(row, kind="stable")[: len(x) - f]].mean(0) for row in away])


def fltrust(x, root):
    size = np.linalg.norm(root)
    trust = np.array([max(0, row @ root / np.linalg.norm(row) / size) for row in x])
    return sum(t * row * size / np.linalg.norm(row) for t, row in zip(trust, x, strict=True)) / trust.sum()


def foolsgold_weights(histories):
    n = len(histories)
    norms = np.linalg.norm(histories, axis=1)
    alike = histories @ histories.T / np.outer(norms, norms)
    np.fill_diagonal(alike, 0)
    most = alike.max(1)
    pardoned = alike.copy()
    for i in range(n):
        for j in range(n):
            if i != j and most[j] > most[i]:
                pardoned[i, j] *= most[i] / most[j]
    a = np.clip(1 - pardoned.max(1), 0, 1)
    a = a / a.max()
    with np.errstate(divide="ignore"):
        a = np.clip(np.log(a / (1 - a)) + 0.5, 0, 1)
    return a / a.sum()


def foolsgold(x):
    return foolsgold_weights(x) @ x


def sign_vote(x):
    return np.sign(np.sign(x).sum(0))


def caf(x, f):
    c, best, least = np.ones(len(x)), None, math.inf
    while True:
        centre = c @ x / c.sum()
        away = x - centre
        values, vectors = np.linalg.eigh((away.T * c) @ away / c.sum())
        if values[-1] < least:
            best, least = centre, values[-1]
        t = (away @ vectors[:, -1]) ** 2
        c = c * (1 - t / t[c > 0].max())
        c[c < 0] = 0
        if c.sum() <= len(x) - 2 * f:
            return best


def dnc(x, f, c=1.0):
    return x[dnc_kept(x, f, c)].mean(0)


def dnc_kept(x, f, c=1.0):
    away = x - x.mean(0)
    top = np.linalg.svd(away, full_matrices=False)[2][0]
    return first_least((away @ top) ** 2, len(x) - int(c * f))


def qfedavg(x, losses, q, lr):
    g = -x / lr
    h = sum(q * F ** (q - 1) * (row @ row) + F**q / lr for F, row in zip(losses, g, strict=True))
    return -sum(F**q * row for F, row in zip(losses, g, strict=True)) / h


def gossip_weights(x, own, weights):
    """Return the weights, by default equal ones, and the distances of all rows from the own row."""
    weights = np.full(len(x), 1 / len(x)) if weights is None else weights
    return weights, np.array([np.linalg.norm(row - x[own]) for row in x])


def clipped_gossip(x, f, own, weights=None, tau=None):
    weights, away = gossip_weights(x, own, weights)
    farthest = set(first_least(-away, f).tolist())
    if tau is None:
        spread = sum(weights[j] * away[j] ** 2 for j in range(len(x)) if j not in farthest)
        tau = math.sqrt(spread / sum(weights[j] for j in farthest)) if f else math.inf
    result = x[own].copy()
    for j in range(len(x)):
        if j != own:
            result += weights[j] * (x[j] - x[own]) * (1 if away[j] <= tau else tau / away[j])
    return result


def ios(x, f, own, weights=None):
    weights, _ = gossip_weights(x, own, weights)
    left = list(range(len(x)))

    def centre():
        return sum(weights[j] * x[j] for j in left) / sum(weights[j] for j in left)

    for _ in range(f):
        others = [j for j in left if j != own]
        left.remove(others[first_least(-np.array([np.linalg.norm(x[j] - centre()) for j in others]))[0]])
    return centre()


def bridge(x, f, own):
    n = len(x)
    neighbours = np.sort(np.delete(x, own, axis=0), axis=0)[f : n - 1 - f]
    return (neighbours.sum(0) + x[own]) / (n - 2 * f)
