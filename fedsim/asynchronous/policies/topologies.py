"""Topologies of decentralized training: which workers exchange their models, and with which weights.

A component of the registry `topology` is a function that returns one of

    an adjacency matrix    of zeros and ones, [n, n]; the diagonal is ignored
    a mixing matrix        W [n, n] with weights between 0 and 1
    a graph                an undirected networkx graph of the nodes 0 to n - 1; its edge weights are entries of W

Its positional parameters may have these names:

    n        number of workers
    round    number of the round, from 1, for graphs that change
    rng      a NumPy generator; unless the graph changes, it is drawn again until it is connected

An adjacency matrix gets Metropolis-Hastings weights: W_ij = 1 / (1 + max(degree of i, degree of j)) for an edge, and
W_ii = 1 - sum of the other weights of row i. Every W must be symmetric and doubly stochastic up to 1e-6. Its diagonal
is then set so that each row sums to 1. If the whole diagonal is 0, as for a weighted graph, rows may sum to less than 1
before this correction. The spectral gap is 1 - max(|lambda_2|, |lambda_n|) for the eigenvalues
1 = lambda_1 >= ... >= lambda_n of W. The larger it is, the faster averaging brings the models together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedsim.core.numbers import Example, Fraction, PositiveInt
from fedsim.core.randomness import numpy_generator
from fedsim.core.registry import Component, Registry
from fedsim.delays import read_numbers
from fedsim.errors import ExperimentError, FedsimError, one_line, plural, show

MOST_WORKERS = 10_000  # the mixing matrix then takes 0.8 GB
MOST_EIGENVALUES = 2_000  # maximum number of workers for which the spectral gap is computed, which takes seconds
MOST_DRAWS = 1_000
MOST_ROUNDS = 100  # of a graph that changes, how many rounds are checked before the run
EvenCount = Annotated[PositiveInt, Field(multiple_of=2)]
NO_PATH = "no path leads from worker 0 to worker"
TOLERANCE = 1.000001e-6  # 1e-6, and the rounding errors of sums


@dataclass(frozen=True)
class CommunicationGraph(Component):
    """Topology with its parameters (setting `policy.topology`), as mixing matrices."""

    @property
    def place(self) -> str:
        """The setting that chooses the topology, such as `policy.topology = "ring"`, for error messages."""
        return f"policy.topology = {show(getattr(self.function, 'keywords', {}).get('path', self.name))}"

    @property
    def changes(self) -> bool:
        """Whether the graph changes from round to round."""
        return "round" in self.accepts

    def mixing_matrix(self, n: int, seed: int, round: int = 1) -> np.ndarray:
        """Return the mixing matrix of n workers in a round, float64 [n, n].

        Raises ExperimentError if the matrix is not symmetric and doubly stochastic, or if no drawn graph is connected.
        """
        rng = numpy_generator(seed, "topology", *([round] if self.changes else []))
        draws = MOST_DRAWS if "rng" in self.accepts and not self.changes else 1
        for _ in range(draws):
            try:
                matrix = self.on({"n": n, "round": round, "rng": rng})
            except FedsimError:
                raise
            except Exception as error:
                raise ExperimentError(f"{self.place}: {one_line(error)}") from error
            weights = _checked(self.place, adjacency_of(matrix) if is_graph(matrix) else matrix, n)
            if self.changes or (alone := _unreachable(weights)) is None:
                return weights
        problem = f"none of {draws:,} drawn graphs is connected" if draws > 1 else f"{NO_PATH} {alone}"
        raise ExperimentError(f"{self.place}: {problem}; use more edges")

    def check(self, n: int, seed: int, rounds: int) -> None:
        """Raise ExperimentError if the graph of n workers, or the graphs of `rounds` rounds together, are invalid."""
        if n > MOST_WORKERS:
            raise ExperimentError(f"workers = {n}: must be at most {MOST_WORKERS:,} with policy.topology")
        checked, union = self.checked_rounds(rounds), np.zeros((n, n))
        is_own = ":" in self.name or self.name.startswith("<")  # a function of the user
        if is_own and not np.array_equal(self.mixing_matrix(n, seed), self.mixing_matrix(n, seed)):
            raise ExperimentError(f"{self.place}: returned two different graphs; use its argument rng for random draws")
        for round in checked:
            union += self.mixing_matrix(n, seed, round)
            if (alone := _unreachable(union)) is None:
                return
        raise ExperimentError(
            f"{self.place}: {NO_PATH} {alone} in the graphs of {plural(len(checked), 'round')} together, which must "
            "connect all workers"
        )

    def checked_rounds(self, rounds: int) -> range:
        """Return the rounds whose graphs are checked before a run: the first one, or more if the graph changes."""
        return range(1, 1 + (min(rounds, MOST_ROUNDS) if self.changes else 1))

    def adjacency(self, n: int, seed: int, round: int) -> np.ndarray:
        """Return which of n workers are neighbours in a round, bool [n, n]."""
        adjacent = self.mixing_matrix(n, seed, round) > 0
        np.fill_diagonal(adjacent, False)
        return adjacent

    def metadata(self, n: int, seed: int) -> dict[str, Any]:
        """Return a description of the graph of n workers (of round 1 if it changes) as a JSON-serializable dict."""
        weights = self.mixing_matrix(n, seed)
        usual = _metropolis_hastings(weights > 0)
        degrees = (np.count_nonzero(usual, axis=1) - 1).tolist()
        metadata = {
            "name": self.name + " in round 1" * self.changes,
            "degrees": sorted({min(degrees), max(degrees)}),
            "weights": "Metropolis-Hastings" if np.allclose(weights, usual, rtol=0, atol=TOLERANCE) else "given",
        }
        return metadata if n > MOST_EIGENVALUES else {**metadata, "spectral_gap": spectral_gap(weights)}


def line_of(metadata: Mapping[str, Any]) -> str:
    """Return the metadata of a graph (see `CommunicationGraph.metadata`) as a line of text."""
    gap = f"{metadata['spectral_gap']:.4g}" if "spectral_gap" in metadata else "not computed"
    degrees = " to ".join(map(str, metadata["degrees"]))
    return f"topology: {metadata['name']}, degree {degrees}, {metadata['weights']} weights, spectral gap {gap}"


def spectral_gap(weights: np.ndarray) -> float:
    """Return the spectral gap 1 - max(|lambda_2|, |lambda_n|) of a mixing matrix [n, n].

    >>> round(spectral_gap(np.array([[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 0.5, 0.5]])), 6)
    0.5
    """
    values = np.linalg.eigvalsh(weights)
    return float(1 - max(abs(values[-2]), abs(values[0]))) if len(values) > 1 else 1.0


def is_graph(value: Any) -> bool:
    """Whether a value is a graph of networkx, judged by its methods."""
    return hasattr(value, "adjacency") and hasattr(value, "is_directed")


def adjacency_of(graph: Any) -> list[list[float]]:
    """Return the matrix of a networkx graph: the weight of each edge, which is 1 by default.

    Raises ExperimentError if the nodes are not 0 to n - 1.
    """
    neighbours = {node: dict(edges) for node, edges in graph.adjacency()}
    nodes = range(len(neighbours))
    if set(neighbours) != set(nodes):
        raise ExperimentError(
            f"policy.topology: the nodes of a graph must be the worker IDs, 0 to {len(nodes) - 1}; use "
            "networkx.convert_node_labels_to_integers"
        )
    return [[neighbours[i][j].get("weight", 1) if j in neighbours[i] else 0 for j in nodes] for i in nodes]


def _checked(place: str, returned: Any, n: int) -> np.ndarray:
    """Check the matrix that a topology returned, and return the mixing matrix, float64 [n, n].

    Args:
        place: the setting that chooses the topology, for error messages.
        returned: mixing matrix, or adjacency matrix, which is converted with Metropolis-Hastings weights.
        n: number of workers.
    """
    try:
        matrix = np.asarray(returned, dtype=np.float64)
    except (TypeError, ValueError):
        raise ExperimentError(f"{place}: must be a matrix of numbers [{n}, {n}] or a networkx graph") from None
    if matrix.shape != (n, n):
        raise ExperimentError(f"{place}: has the shape {list(matrix.shape)}; with workers = {n} it must be [{n}, {n}]")
    for i, j in np.argwhere(~((matrix >= 0) & (matrix <= 1 + TOLERANCE)))[:1]:
        raise ExperimentError(
            f"{place}: the weight [{i}][{j}] is {matrix[i, j]:g}; must be between 0 and 1 (for "
            "a networkx graph with other edge weights, use networkx.to_numpy_array(graph, weight=None))"
        )
    for i, j in np.argwhere(abs(matrix - matrix.T) > TOLERANCE)[:1]:
        raise ExperimentError(
            f"{place}: the weight [{i}][{j}] is {matrix[i, j]:g}, but [{j}][{i}] is {matrix[j, i]:g}; must be "
            "symmetric, so directed graphs and matrices of which only rows sum to 1 are not supported"
        )
    if np.isin(matrix, (0, 1)).all():
        return _metropolis_hastings(matrix)
    missing = 1 - matrix.sum(1)
    missing[missing > 0] *= matrix.diagonal().any()  # of a matrix without a diagonal, which follows from the rows
    for i in np.flatnonzero(abs(missing) > TOLERANCE)[:1]:
        raise ExperimentError(
            f"{place}: row {i} sums to {matrix[i].sum():g}; rows and columns must sum to 1 (at most 1 without a "
            "diagonal), or contain only zeros and ones (an adjacency matrix)"
        )
    return _with_diagonal((matrix + matrix.T) / 2)


def _metropolis_hastings(adjacency: np.ndarray) -> np.ndarray:
    """Return the mixing matrix with Metropolis-Hastings weights for an adjacency matrix [n, n]."""
    edges = np.array(adjacency, dtype=np.float64)
    np.fill_diagonal(edges, 0)
    degrees = edges.sum(1)
    return _with_diagonal(edges / (1 + np.maximum.outer(degrees, degrees)))


def _with_diagonal(weights: np.ndarray) -> np.ndarray:
    """Set the diagonal of a matrix so that its rows sum to 1, and return the matrix."""
    np.fill_diagonal(weights, 0)
    np.fill_diagonal(weights, 1 - weights.sum(1))
    return weights


def _unreachable(weights: np.ndarray) -> int | None:
    """Return a worker that cannot be reached from worker 0 along edges, or None if the graph is connected."""
    frontier = np.arange(len(weights)) == 0
    reached = frontier.copy()
    while frontier.any():
        frontier = (weights[frontier] > 0).any(0) & ~reached
        reached |= frontier
    return None if reached.all() else int(np.argmin(reached))


topology = Registry("topology", inputs=("n", "round", "rng"), component=CommunicationGraph)


def _circulant(n: int, steps: Any) -> np.ndarray:
    """Return the adjacency matrix of n workers on a ring that are connected at the distances `steps`."""
    distances = (np.arange(n) - np.arange(n)[:, None]) % n
    return np.isin(distances, list(steps)) | np.isin(distances.T, list(steps))


@topology("ring")
def ring(n: int) -> np.ndarray:
    """Connect each worker with two others: worker i with i - 1 and i + 1 (modulo n).

    >>> ring(4).astype(int).tolist()
    [[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]]
    """
    return _circulant(n, [1])


@topology("complete")
def complete(n: int) -> np.ndarray:
    """Connect all workers with each other. The spectral gap is 1.

    >>> complete(3).astype(int).tolist()
    [[0, 1, 1], [1, 0, 1], [1, 1, 0]]
    """
    return ~np.eye(n, dtype=bool)


@topology("exponential")
def exponential(n: int) -> np.ndarray:
    """Connect each worker with the workers at distances 1, 2, 4, ... on a ring, both ways (Ying et al. 2021).

    >>> np.flatnonzero(exponential(8)[0])  # neighbours of worker 0
    array([1, 2, 4, 6, 7])
    """
    return _circulant(n, [2**k for k in range(n.bit_length()) if 2**k < n])


@topology("torus")
def torus(n: int) -> np.ndarray:
    """Connect neighbours in a grid that wraps around. Its sides are the two factors of n that are closest.

    Worker i is in row i // width and column i % width. If n is a prime number, the torus is a ring.

    >>> np.flatnonzero(torus(12)[0])  # a grid of 3 x 4 workers
    array([1, 3, 4, 8])
    """
    rows = max(side for side in range(1, math.isqrt(n) + 1) if n % side == 0)
    grid = np.arange(n).reshape(rows, n // rows)
    adjacency = np.zeros((n, n), dtype=bool)
    for axis in (0, 1):
        adjacency[grid, np.roll(grid, 1, axis)] = True
    return adjacency | adjacency.T


@topology("star")
def star(n: int) -> np.ndarray:
    """Connect worker 0 with all other workers.

    >>> star(3).astype(int).tolist()
    [[0, 1, 1], [1, 0, 0], [1, 0, 0]]
    """
    adjacency = np.zeros((n, n), dtype=bool)
    adjacency[0, 1:] = adjacency[1:, 0] = True
    return adjacency


@topology("erdos_renyi")
def erdos_renyi(n: int, rng: np.random.Generator, *, p: Fraction = 0.5) -> np.ndarray:
    """Draw each edge independently with probability `p` (Erdos and Renyi 1959) until the graph is connected.

    Args:
        p: probability of an edge. Below about ln(n) / n, few graphs are connected.

    Draws: `rng.random((n, n))`, of which the part above the diagonal is used.

    >>> erdos_renyi(4, np.random.default_rng(0), p=1.0).sum(1)
    array([3, 3, 3, 3])
    """
    upper = np.triu(rng.random((n, n)) < p, 1)
    return upper | upper.T


@topology("small_world")
def small_world(n: int, rng: np.random.Generator, *, k: EvenCount = 4, p: Fraction = 0.1) -> np.ndarray:
    """Connect each worker with the `k` nearest on a ring, then rewire each edge with probability `p` at one end.

    Watts and Strogatz 1998. The new neighbour is drawn among the workers that are not neighbours yet. The graph is
    drawn again until it is connected.

    Args:
        k: number of neighbours on the ring, an even number below n.
        p: probability that an edge is rewired.

    Draws, for each distance 1, ..., k / 2 and each worker i: `rng.random()`, and to rewire `rng.choice(others)`.
    Raises ExperimentError if `k` is not below n.

    >>> small_world(6, np.random.default_rng(0), k=2, p=0.0).sum(1)
    array([2, 2, 2, 2, 2, 2])
    """
    if k >= n:
        raise ExperimentError(f"policy.topology.k = {k}: must be less than {n}, the number of workers")
    adjacency = _circulant(n, range(1, k // 2 + 1))
    for distance in range(1, k // 2 + 1):
        for i in range(n):
            others = np.flatnonzero(~adjacency[i] & (np.arange(n) != i))
            if rng.random() < p and len(others):
                before, after = (i + distance) % n, rng.choice(others)
                adjacency[i, before] = adjacency[before, i] = False
                adjacency[i, after] = adjacency[after, i] = True
    return adjacency


Rows = Annotated[list[list[float | bool]], Field(max_length=500), Example([[0.5, 0.5], [0.5, 0.5]])]


@topology("matrix")
def matrix(*, weights: Rows) -> Any:
    """Use the matrix in the experiment: a mixing matrix, or an adjacency matrix of zeros and ones.

    Args:
        weights: rows of the matrix, at most 500. For more workers, use a CSV file or a function.

    >>> matrix(weights=[[0.5, 0.5], [0.5, 0.5]])
    [[0.5, 0.5], [0.5, 0.5]]
    """
    return weights


@topology("csv")
def csv(*, path: Annotated[str, Example("weights.csv")]) -> np.ndarray:
    """Read the matrix from a text file: a mixing matrix, or an adjacency matrix of zeros and ones.

    Args:
        path: text file with one line per worker. Numbers are separated by commas or blanks. Empty lines and text after
            a # are ignored.

    Raises ExperimentError if the file cannot be read.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w") as file:
    ...     _ = file.write("0, 1\\n1, 0\\n")
    ...     file.flush()
    ...     csv(path=file.name)
    array([[0., 1.],
           [1., 0.]])
    """
    return read_numbers(f"policy.topology.path = {show(path)}", path, "must be a text file with one line per worker")
