"""Topologies, compared with definitions by hand: neighbours, weights, connectivity, spectral gaps, given matrices."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import fedsim
from fedsim.asynchronous.policies.topologies import CommunicationGraph, line_of, spectral_gap, topology
from fedsim.config.load import load_experiment
from fedsim.config.schema import Topology
from fedsim.config.validation import warnings_about
from fedsim.core.objects import plain
from fedsim.core.randomness import numpy_generator

GOSSIP = {"mode": "clock", "policy.name": "gossip", "model": "logistic"}


class Graph:
    """A graph with the methods of networkx.Graph: a dict from node to {neighbour: attributes}."""

    def __init__(self, edges, nodes, directed=False):
        self._edges, self._directed = {node: {} for node in nodes}, directed
        for i, j, *weight in edges:
            attributes = {"weight": weight[0]} if weight else {}
            self._edges[i][j] = attributes
            if not directed:
                self._edges[j][i] = attributes

    def adjacency(self):
        return iter(self._edges.items())

    def is_directed(self):
        return self._directed


def graph_of(given) -> CommunicationGraph:
    return Topology.model_validate(plain(given)).component


def experiment(given, workers=4, **changes):
    return load_experiment({**GOSSIP, "workers": workers, "policy.topology": given, **changes})


def neighbours(given, n, worker, seed=0):
    weights = graph_of(given).mixing_matrix(n, seed)
    return [other for other in np.flatnonzero(weights[worker]) if other != worker]


def test_neighbours_by_hand():
    assert neighbours("ring", 5, 0) == [1, 4]
    assert neighbours("ring", 2, 0) == [1]
    assert neighbours("complete", 4, 1) == [0, 2, 3]
    assert neighbours("exponential", 8, 0) == [1, 2, 4, 6, 7]
    assert neighbours("exponential", 6, 3) == [1, 2, 4, 5]  # 3 +- 1, 2 and 4
    assert neighbours("star", 5, 0) == [1, 2, 3, 4]
    assert neighbours("star", 5, 3) == [0]
    assert neighbours("torus", 12, 5) == [1, 4, 6, 9]  # 3 x 4: up, left, right, down
    assert neighbours("torus", 7, 0) == [1, 6]  # a prime number: a ring
    assert neighbours("torus", 4, 0) == [1, 2]
    assert neighbours({"name": "small_world", "k": 4, "p": 0.0}, 7, 0) == [1, 2, 5, 6]
    for registration in topology:
        if registration.name not in ("matrix", "csv", "small_world"):
            assert neighbours(registration.name, 1, 0) == []


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("n", [2, 5, 9, 16])
@pytest.mark.parametrize("name", [r.name for r in topology if r.name not in ("matrix", "csv")])
def test_weights_are_metropolis_hastings_and_doubly_stochastic(name, n, seed):
    if name == "small_world" and n < 5:
        return
    weights = graph_of(name).mixing_matrix(n, seed)
    degree = [sum(weights[i, j] > 0 for j in range(n) if j != i) for i in range(n)]
    for i, j in itertools.product(range(n), repeat=2):
        if i != j and weights[i, j]:
            assert weights[i, j] == pytest.approx(1 / (1 + max(degree[i], degree[j])), rel=1e-15)
    assert np.array_equal(weights, weights.T)
    assert weights.min() >= 0
    assert np.allclose(weights.sum(0), 1, rtol=0, atol=1e-15)
    assert (np.linalg.matrix_power(weights + np.eye(n), n) > 0).all()  # connected


def test_spectral_gaps_by_formulas():
    """The eigenvalues of a ring of n workers are 1/3 + 2/3 cos(2 pi k / n), those of a complete graph 1 and 0."""
    for n in (5, 8, 20):
        ring = [1 / 3 + 2 / 3 * math.cos(2 * math.pi * k / n) for k in range(1, n)]
        assert spectral_gap(graph_of("ring").mixing_matrix(n, 0)) == pytest.approx(1 - max(map(abs, ring)), abs=1e-12)
        assert spectral_gap(graph_of("complete").mixing_matrix(n, 0)) == pytest.approx(1, abs=1e-12)
        assert spectral_gap(graph_of("star").mixing_matrix(n, 0)) == pytest.approx(1 / n, abs=1e-12)
    assert spectral_gap(np.array([[0.0, 1.0], [1.0, 0.0]])) == 0  # lambda_n = -1
    assert spectral_gap(np.ones((1, 1))) == 1


# Random graphs


def test_erdos_renyi_is_drawn_from_the_seed_until_it_is_connected():
    given, n = {"name": "erdos_renyi", "p": 0.25}, 8
    rng, draws, connected = numpy_generator(3, "topology"), 0, False
    while not connected:
        uniform, draws = rng.random((n, n)), draws + 1
        edges = {(i, j) for i in range(n) for j in range(i + 1, n) if uniform[i, j] < 0.25}
        reached = {0}
        for _ in range(n):
            reached |= {j for edge in edges for i, j in (edge, edge[::-1]) if i in reached}
        connected = len(reached) == n
    assert draws > 1
    weights = graph_of(given).mixing_matrix(n, 3)
    assert {(i, j) for i in range(n) for j in range(i + 1, n) if weights[i, j]} == edges
    assert not np.array_equal(weights, graph_of(given).mixing_matrix(n, 4))


def test_small_worlds_keep_the_number_of_edges():
    rewired = 0
    for seed in range(20):
        weights = graph_of({"name": "small_world", "k": 4, "p": 0.3}).mixing_matrix(20, seed)
        edges = np.argwhere(np.triu(weights, 1))
        assert len(edges) == 20 * 4 / 2
        rewired += sum(min((j - i) % 20, (i - j) % 20) > 2 for i, j in edges)
    assert 0.2 < rewired / (20 * 40) < 0.35  # a few rewired edges end within the ring's distances


# Given matrices

PATH = [[0.5, 0.5, 0.0], [0.5, 0.2, 0.3], [0.0, 0.3, 0.7]]


def half(n):
    return np.full((n, n), 1 / n)


@pytest.mark.parametrize(
    "given",
    [
        PATH,
        np.array(PATH),
        {"name": "matrix", "weights": PATH},
        (np.array(PATH) * (1 - np.eye(3))).tolist(),  # the diagonal follows from the rest
        Graph([(0, 0, 0.5), (0, 1, 0.5), (1, 1, 0.2), (1, 2, 0.3), (2, 2, 0.7)], [2, 1, 0]),
        lambda n: PATH,
        lambda n, round: PATH,
        lambda n: Graph([(0, 0, 0.5), (0, 1, 0.5), (1, 1, 0.2), (1, 2, 0.3), (2, 2, 0.7)], range(3)),
    ],
)
def test_a_matrix_may_be_given_in_many_ways(given):
    assert np.allclose(experiment(given, 3).policy.topology.component.mixing_matrix(3, 0), PATH, rtol=0, atol=1e-15)


def test_a_matrix_may_be_a_csv_file_or_the_path_of_a_function(tmp_path):
    (tmp_path / "weights.csv").write_text("0.5, 0.5, 0 # a comment\n0.5, 0.2, 0.3\n\n0, 0.3, 0.7\n")
    for given in (f"{tmp_path}/weights.csv", {"name": f"{tmp_path}/weights.csv"}):
        assert np.allclose(graph_of(given).mixing_matrix(3, 0), PATH)
    assert experiment(f"{__name__}:half", 3).policy.topology.component.mixing_matrix(3, 0)[0, 2] == 1 / 3


def test_zeros_and_ones_are_an_adjacency_matrix():
    star = graph_of("star").mixing_matrix(4, 0)
    adjacency = [[1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]  # with an ignored loop
    for given in (adjacency, Graph([(0, 1), (0, 2), (3, 0)], range(4)), lambda n: np.array(adjacency, dtype=bool)):
        assert np.array_equal(graph_of(given).mixing_matrix(4, 0), star)
    assert graph_of([[0, 1], [1, 0]]).mixing_matrix(2, 0).tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_rounding_errors_are_corrected_on_the_diagonal():
    rounded = [[0.333333] * 3, [0.333333] * 3, [0.333333, 0.3333332, 0.333333]]
    weights = graph_of(rounded).mixing_matrix(3, 0)
    assert np.allclose(weights.sum(0), 1, rtol=0, atol=1e-15)
    assert np.array_equal(weights, weights.T)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[0, 1, 0], [0, 0, 1], [1, 0, 0]], r"\[0\]\[1\] is 1, but \[1\]\[0\] is 0; must be symmetric, so directed"),
        (Graph([(0, 1), (1, 2), (2, 0)], range(3), directed=True), "must be symmetric, so directed graphs"),
        ([[0.5, 0.5, 0], [0.3, 0.4, 0.3], [0, 0.5, 0.5]], "matrices of which only rows sum to 1 are not supported"),
        ([[0.5, 0.4, 0], [0.4, 0.2, 0.4], [0, 0.4, 0.6]], "row 0 sums to 0.9; rows and columns must sum to 1 \\(at"),
        ([[0, 0.7, 0.4], [0.7, 0, 0.2], [0.4, 0.2, 0]], "row 0 sums to 1.1; rows and columns must sum to 1 \\(at"),
        ([[1.2, -0.2, 0], [-0.2, 1, 0.2], [0, 0.2, 0.8]], r"weight \[0\]\[0\] is 1.2; must be between 0 and 1"),
        ([[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]], "no path leads from worker 0 to worker 2; use more edges"),
        ([[0.5, 0.5], [0.5, 0.5]], r"has the shape \[2, 2\]; with workers = 3 it must be \[3, 3\]"),
        ([[0.5, 0.5], [0.5]], r"must be a matrix of numbers \[3, 3\] or a networkx graph"),
        ([[math.nan] * 3] * 3, r"weights\[0\]\[0\] = nan: must be a finite number .*\(as must 8 other values\)$"),
        (lambda n: np.full((n, n), np.nan), r"weight \[0\]\[0\] is nan; must be between 0 and 1"),
        (lambda n: "ring", "must be a matrix of numbers"),
        (lambda n: drawn_at_random(n), "returned two different graphs; use its argument rng for random draws"),
        (lambda n: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda size: half(size), "does not pass the argument size, only n, round, rng"),
        (lambda n, round: np.eye(n), "no path leads from worker 0 to worker 1 in the graphs of 10 rounds together"),
        (lambda n, rng: np.eye(n), "none of 1,000 drawn graphs is connected; use more edges"),
        (Graph([("a", "b"), ("b", "c")], "abc"), "the worker IDs, 0 to 2; use networkx.convert_node_labels_to_int"),
        ({"name": "erdos_renyi", "p": 0.0}, "none of 1,000 drawn graphs is connected"),
        ({"name": "small_world", "k": 4}, "policy.topology.k = 4: must be less than 3, the number of workers"),
        ({"name": "small_world", "k": 3}, "policy.topology.k = 3: must be a multiple of 2"),
        ("nowhere.csv", 'policy.topology.path = "nowhere.csv": no such file; must be a text file with one line per'),
        (3, "policy.topology = 3: must be a name or a table"),
    ],
)
def test_an_invalid_topology_is_one_line(given, message):
    with pytest.raises(fedsim.ExperimentError, match=message) as caught:
        experiment(given, 3)
    assert len(caught.value.lines) == 1


def drawn_at_random(n):
    share = np.random.default_rng().uniform(0, 1 / n)
    return np.full((n, n), share) + np.eye(n) * (1 - n * share)


def test_too_many_workers_are_refused():
    with pytest.raises(fedsim.ExperimentError, match="workers = 10001: must be at most 10,000 with policy.topology"):
        experiment("ring", 10_001)


def matching(n, round):
    """Connect pairs (0, 1), (2, 3), ... in odd rounds, and (1, 2), (3, 4), ... in even ones."""
    adjacency = np.zeros((n, n))
    for i in range(round % 2 == 0, n, 2):
        adjacency[i, (i + 1) % n] = adjacency[(i + 1) % n, i] = 1
    return adjacency


def test_the_graphs_of_all_rounds_together_must_be_connected():
    assert experiment(matching, 6, rounds=2).policy.topology.component.changes
    with pytest.raises(fedsim.ExperimentError, match="to worker 2 in the graphs of 1 round"):
        experiment(matching, 6, rounds=1)


# Metadata and settings


def test_metadata_is_one_line():
    torus = graph_of("torus").metadata(12, 0)
    assert line_of(torus) == "topology: torus, degree 4, Metropolis-Hastings weights, spectral gap 0.4"
    assert (
        line_of(graph_of(PATH).metadata(3, 0)) == "topology: matrix, degree 1 to 2, given weights, spectral gap 0.3641"
    )
    assert line_of(graph_of(matching).metadata(4, 0)).startswith(
        "topology: tests.asynchronous.policies.test_topologies:matching in round 1, "
    )


def test_topology_is_for_policies_without_a_server():
    without = load_experiment({"mode": "clock", "policy": "asgd", "policy.topology": "star"})
    assert warnings_about(without) == ["policy.topology has no effect with policy=asgd; omit it"]
    assert not warnings_about(experiment("star"))
