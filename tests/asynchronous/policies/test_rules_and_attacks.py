"""Rules and attacks with asynchronous policies, compared with plain loops in this file.

The loops combine vectors with `fedsim.aggregate` and replace those of Byzantine workers with `fedsim.attack`.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import fedsim
from fedsim.core.randomness import numpy_generator
from fedsim.errors import ExperimentError
from tests.asynchronous.policies.test_decentralized import metropolis
from tests.asynchronous.simulated import (
    LR,
    START,
    delays_of,
    nth_step,
    policy_of,
    replayed,
    same,
    simulate,
    zero_result,
)
from tests.asynchronous.simulated import some_result as result

SPEEDS = [1.0, 1.7123, 2.3456, 4.3219, 1.4142]
RULES = {
    "median": {"rule": "median"},
    "trimmed_mean": {"rule": "trimmed_mean"},
    "geometric_median": {"rule": "geometric_median"},
    "centered_clipping": {"rule": "centered_clipping", "tau": 0.4},  # uses the result before
    "norm_clipping + median": {"rule": [{"rule": "norm_clipping", "c": 0.5}, "median"]},
}
FILTERS = {"norm_clipping": {"rule": "norm_clipping", "c": 0.4}, "centered_clipping": RULES["centered_clipping"]}
ATTACKS = {
    "ipm": {"name": "ipm", "eps": 0.8},
    "alie": {"name": "alie", "z": 1.5, "ddof": 0},
    "sign_flipping": {"name": "sign_flipping", "scale": 2.0},
}
TUNED = {"name": f"{__name__}:against"}


# pairs of a rule and an attack
RULES_UNDER_ATTACK = [("median", None), ("trimmed_mean", "ipm"), ("geometric_median", "alie")]
RULES_UNDER_ATTACK += [("centered_clipping", "sign_flipping"), ("norm_clipping + median", "ipm")]
FILTERS_UNDER_ATTACK = [("norm_clipping", None), ("norm_clipping", "sign_flipping"), ("centered_clipping", "ipm")]


def attack_of(name, workers):
    return None if name is None else {**ATTACKS.get(name, TUNED), "workers": workers}


class Combined:
    """Combines vectors with a rule, which may use its result before."""

    def __init__(self, table, f=1):
        stages = table["rule"] if isinstance(table["rule"], list) else [table]
        self._stages = [s if isinstance(s, str) else {**s, "name": s["rule"]} for s in stages]
        self._stages = [s if isinstance(s, str) else {k: v for k, v in s.items() if k != "rule"} for s in self._stages]
        self._params = {"f": f} if "trimmed_mean" in str(table) else {}
        self._last = None

    def __call__(self, vectors, weights=None):
        last = self._last if "centered_clipping" in str(self._stages) else None
        rows = torch.stack(list(vectors))
        self._last = fedsim.aggregate(rows, self._stages, weights=weights, last=last, **self._params)
        return self._last


def mean(vectors):
    return torch.stack(list(vectors)).mean(0)


class Sent:
    """Computes what workers send. A Byzantine worker sends what the attack computes from the vectors that it knows."""

    def __init__(self, attack=None, first=0):
        """`first`: number of the first arrival that may be Byzantine, from 0."""
        self._attack = {key: value for key, value in (attack or {}).items() if key != "start_round"}
        self._workers = self._attack.pop("workers", ())
        self._knows, self._first = self._attack.pop("knows", "latest"), first
        self._known, self._arrivals = {}, 0

    def __call__(self, worker, vector):
        self._known[worker] = vector
        self._arrivals += 1
        if worker not in self._workers or self._arrivals <= self._first:
            return vector
        honest = [each for k, each in self._known.items() if k not in self._workers]
        own = {k: each for k, each in self._known.items() if k in self._workers}
        if not honest and self._attack["name"] != "sign_flipping":
            return vector
        return attacked(list(own.values()), honest or [vector], self._attack)[list(own).index(worker)]

    def use(self):
        """Forget the vectors in the buffer, because an update has used them."""
        if self._knows == "buffer":
            self._known.clear()


def attacked(own, honest, attack):
    tuned = {"aggregate": partial(fedsim.aggregate, name="median")} if "against" in attack["name"] else {}
    return fedsim.attack(torch.stack(honest), own_updates=torch.stack(own), n_byzantine=len(own), **tuned, **attack)


def against(own_updates, aggregate):
    """Return an attack against the median, which depends on the median of all known vectors and larger own ones."""
    return -aggregate(3 * own_updates)


# Each function takes a vector that has arrived and may replace the row, like the rules of `replayed`. In `memory`,
# `combine` is the rule, and `sent` returns what a worker sends.


def buffered(k, weight, vector_of, step):
    """Return the formula of a policy that combines k vectors, each multiplied by its weight, and then takes a step."""

    def formula(row, read, given, arrival, memory):
        rows = memory.setdefault("rows", [])
        sent = memory["sent"](arrival.worker, vector_of(read, given))
        rows.append(sent * weight(arrival.staleness))
        if len(rows) < k:
            return row
        memory["sent"].use()
        update = memory["combine"](rows)
        rows.clear()
        return row + step * update

    return formula


def by_worker(b):
    """Return the formula of a policy that combines the means of b buffers, each of which has some of the workers."""

    def formula(row, read, given, arrival, memory):
        buffers = memory.setdefault("buffers", [[] for _ in range(b)])
        buffers[arrival.worker % b].append(memory["sent"](arrival.worker, given))
        if not all(buffers):
            return row
        memory["sent"].use()
        update = memory["combine"]([mean(buffer) for buffer in buffers])
        memory["buffers"] = [[] for _ in range(b)]
        return row - LR * update

    return formula


def delta(read, model):
    return model - read


def gradient(read, given):
    return given


def alone(step, vector_of=gradient):
    """Return the formula of a policy that uses each vector alone, after the rule as a filter."""

    def formula(row, read, given, arrival, memory):
        sent = memory["sent"](arrival.worker, vector_of(read, given))
        return step(row, read, memory["combine"]([sent]), arrival, memory)

    return formula


def plain_step(row, read, g, arrival, memory):
    return row - LR * g


def by_staleness(row, read, g, arrival, memory):
    return row - LR / max(1, arrival.staleness) * g


def compensated(row, read, g, arrival, memory):
    return row - LR * (g + 0.3 * g * g * (row - read))


def mixed(row, read, change, arrival, memory):
    share = 0.6 * (arrival.staleness + 1) ** -0.5
    return (1 - share) * row + share * (read + change)


def nesterov(row, read, change, arrival, memory):
    gathered = memory.setdefault("gathered", [])
    gathered.append(-change)
    share, n = 0.1, 5
    if len(gathered) % n == 0:
        memory["m"] = 0.8 * memory.get("m", 0 * row) + sum(gathered[-n:]) / n
        share = 1 - 0.1 * n + 0.1
    return row - 0.6 * (share * 0.8 * memory.get("m", 0 * row) + gathered[-1] / n)


BUFFERS = {
    "fedbuff": ("fedbuff", {"k": 4}, buffered(4, lambda tau: (1 + tau) ** -0.5, delta, 1.0)),
    "softsync": ("staleness_aware", {"softsync": 1}, buffered(5, lambda tau: 1 / max(1, tau), gradient, -LR)),
    "basgd": ("basgd", {"b": 3}, by_worker(3)),
}
SINGLE = {
    "asgd": ("asgd", {}, alone(plain_step)),
    "hogwild": ("hogwild", {}, alone(plain_step)),
    "locked": ("locked", {}, alone(plain_step)),
    "staleness_aware": ("staleness_aware", {}, alone(by_staleness)),
    "dc_asgd": ("dc_asgd", {"lam": 0.3}, alone(compensated)),
    "fedasync": ("fedasync", {"alpha": 0.6, "staleness": "polynomial", "a": 0.5}, alone(mixed, delta)),
    "async_local_sgd": ("async_local_sgd", {"lr": 0.6, "beta": 0.8, "c": 0.1}, alone(nesterov, delta)),
}


def check(policy, params, formula, table, attack=None):
    run = simulate(policy_of(policy, **params), delays_of(SPEEDS, "lognormal"), rule=table, f=1, attack=attack)
    run.advance(20)
    first = 0
    if attack and attack.get("start_round", 1) > 1:
        first = len(run.arrivals)
        run.clock.dispatcher.start_round(attack["start_round"])
    run.advance(40)
    given = {"sent": Sent(attack, first), "combine": mean if table is None else Combined(table)}

    def rule(row, read, each, arrival, memory):
        return formula(row, read, each, arrival, given)

    assert same(run.row, replayed(run, rule))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", BUFFERS)
def test_a_rule_combines_the_vectors_of_a_buffer(case, rule):
    check(*BUFFERS[case], RULES[rule])


@pytest.mark.parametrize("rule", FILTERS)
@pytest.mark.parametrize("case", SINGLE)
def test_a_rule_filters_single_vectors(case, rule):
    check(*SINGLE[case], FILTERS[rule])


def by_inputs(updates, workers, staleness):
    """Return the sum of the vectors, each multiplied by a function of its worker and its staleness, as a rule."""
    return (((1 + torch.tensor(workers)) / (1 + staleness)).unsqueeze(1) * updates).sum(0)


def by_models(updates, workers, staleness, models):
    return by_inputs(updates + 0.1 * models, workers, staleness)


@pytest.mark.parametrize("case", ["fedbuff", "softsync", *SINGLE])
def test_a_rule_receives_the_senders_the_staleness_and_the_start_models(case):
    (name, params, formula), seen = {**BUFFERS, **SINGLE}[case], []

    def combine(vectors):
        rows, (arrivals, starts) = torch.stack(vectors), zip(*seen, strict=True)
        seen.clear()
        staleness = torch.tensor([arrival.staleness for arrival in arrivals])
        rows = rows + 0.1 * torch.stack(starts) if case in SINGLE else rows
        return by_inputs(rows, [arrival.worker for arrival in arrivals], staleness)

    def rule(row, read, each, arrival, memory):
        seen.append((arrival, read))
        return formula(row, read, each, arrival, given)

    given = {"sent": Sent(), "combine": combine}
    table = {"rule": f"{__name__}:{'by_models' if case in SINGLE else 'by_inputs'}"}
    run = simulate(policy_of(name, **params), delays_of(SPEEDS, "lognormal"), rule=table).advance(40)
    scale = float(run.row.abs().max())
    assert same(run.row / scale, replayed(run, rule) / scale)


@pytest.mark.parametrize(("start_round", "knows"), [(1, "latest"), (1, "buffer"), (3, "latest")])
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("case", BUFFERS)
def test_an_attack_replaces_vectors_of_a_buffer(case, attack, start_round, knows):
    table = {**ATTACKS[attack], "workers": [1, 2], "start_round": start_round, "knows": knows}
    for rule in (None, RULES["median"]):
        check(*BUFFERS[case], rule, table)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("case", SINGLE)
def test_an_attack_replaces_single_vectors(case, attack):
    for rule, workers in ((None, [0]), (FILTERS["norm_clipping"], [1, 2])):
        check(*SINGLE[case], rule, {**ATTACKS[attack], "workers": workers})


def reject(updates, workers):
    """Reject the vectors of worker 1, as a rule."""
    accepted = torch.tensor([float(worker != 1) for worker in workers], dtype=torch.float64)
    return fedsim.aggregation.LinearCombination(accepted)


REJECTING = {case: (name, params, 1) for case, (name, params, _) in SINGLE.items()}
REJECTING |= {"downpour": ("asgd", {"n_push": 3}, 3), "easgd": ("easgd", {"period": 2, "alpha": 0.1}, 2)}


@pytest.mark.parametrize("case", REJECTING)
def test_a_rejected_vector_changes_nothing_on_the_server(case):
    name, params, period = REJECTING[case]
    run = simulate(policy_of(name, **params), delays_of(SPEEDS), rule={"rule": f"{__name__}:reject"})
    for _ in range(60):
        row, version, taken = run.row.clone(), run.server.version, len(run.arrivals)
        run.advance(1)
        if len(run.arrivals) == taken or run.arrivals[-1].worker == 1:
            assert torch.equal(run.row, row)
            assert run.server.version == version
    sent = sum(item.worker == 1 for items in run.trained for item in items)
    assert run.clock.dispatcher.stats.rejected.keys() == {1}
    assert run.clock.dispatcher.stats.rejected[1] in (sent // period, (sent - 1) // period)


@pytest.mark.parametrize("case", BUFFERS)
def test_an_attack_is_tuned_against_the_rule(case):
    check(*BUFFERS[case], RULES["median"], {**TUNED, "workers": [3]})


# Policies with an order of their own


@pytest.mark.parametrize(("rule", "attack"), FILTERS_UNDER_ATTACK)
def test_a_rule_and_an_attack_change_the_sums_that_downpour_pushes(rule, attack):
    """Workers fetch before every second step, and push the sum of three gradients."""
    table = attack_of(attack, [0, 3])
    chosen = policy_of("asgd", n_fetch=2, n_push=3)
    run = simulate(chosen, delays_of(SPEEDS), rule=FILTERS[rule], attack=table).advance(90)
    row, local, steps, at = START, [START] * 5, [0] * 5, list(SPEEDS)
    accrued, combine, sent = [0 * START] * 5, Combined(FILTERS[rule]), Sent(table)
    for _ in range(90):
        worker = at.index(min(at))
        gradient = result(local[worker], nth_step(worker, steps[worker]))
        steps[worker] += 1
        accrued[worker] = accrued[worker] + gradient
        local[worker] = local[worker] - LR * gradient
        if steps[worker] % 3 == 0:
            row = row - LR * combine([sent(worker, accrued[worker])])
            accrued[worker] = 0 * START
        if steps[worker] % 2 == 0:
            local[worker] = row
        at[worker] += SPEEDS[worker]
    assert same(run.row, row)


@pytest.mark.parametrize("knows", ["latest", "buffer"])
@pytest.mark.parametrize(("rule", "attack"), RULES_UNDER_ATTACK)
def test_k_async_combines_the_first_vectors(rule, attack, knows):
    """Workers wait until the next update."""
    table = None if attack is None else {**ATTACKS[attack], "workers": [0, 2], "knows": knows}
    run = simulate(policy_of("k_async", k=3), delays_of(SPEEDS), rule=RULES[rule], f=1, attack=table).advance(60)
    row, done, at, read, rows = START, [0] * 5, list(SPEEDS), [START] * 5, []
    combine, sent = Combined(RULES[rule]), Sent(table)
    for _ in range(60):
        worker = at.index(min(at))
        now, at[worker] = at[worker], np.inf
        rows.append(sent(worker, result(read[worker], nth_step(worker, done[worker]))))
        done[worker] += 1
        if len(rows) == 3:
            row, rows = row - LR * combine(rows), []
            sent.use()
            for slot in np.flatnonzero(np.isinf(at)):
                read[slot], at[slot] = row, now + SPEEDS[slot]
    assert same(run.row, row)


@pytest.mark.parametrize(("rule", "attack"), RULES_UNDER_ATTACK)
def test_k_sync_and_backup_workers_combine_the_first_vectors(rule, attack):
    n, k, delays = 5, 3, delays_of(SPEEDS, "shifted_exponential")
    table = attack_of(attack, [1])
    row, done, begun = START, [0] * n, [0] * n
    combine, sent = Combined(RULES[rule]), Sent(table)
    for _ in range(12):
        seconds = [delays.seconds(worker, begun[worker], 1) for worker in range(n)]
        begun = [count + 1 for count in begun]
        first = np.argsort(seconds, kind="stable")[:k].tolist()
        vectors = []
        for worker in first:
            vectors.append(sent(worker, result(row, nth_step(worker, done[worker]))))
            done[worker] += 1
        row = row - LR * combine(vectors)
    for chosen in (policy_of("k_sync", k=k), policy_of("backup_workers", backups=n - k)):
        run = simulate(chosen, delays, rule=RULES[rule], f=1, attack=table).advance(12 * k)
        assert same(run.row, row)


@pytest.mark.parametrize(("rule", "attack"), [pair for pair in RULES_UNDER_ATTACK if pair[0] != "trimmed_mean"])
@pytest.mark.parametrize("s", [0, 2])
def test_ssp_combines_the_vectors_of_those_who_wait(rule, s, attack):
    """The buffer is combined before the next worker reads the model."""
    table = attack_of(attack, [1])
    run = simulate(policy_of("ssp", s=s), delays_of(SPEEDS), rule=RULES[rule], f=1, attack=table).advance(60)
    row, done, at, read, rows = START, [0] * 5, list(SPEEDS), [START] * 5, []
    combine, sent, taken = Combined(RULES[rule]), Sent(table), 0
    while taken < len(run.arrivals):
        worker = at.index(min(at))
        now, taken = at[worker], taken + 1
        rows.append(sent(worker, result(read[worker], nth_step(worker, done[worker]))))
        done[worker], at[worker] = done[worker] + 1, np.inf
        for slot in range(5):
            if at[slot] == np.inf and done[slot] - min(done) <= s:
                if rows:
                    row, rows = row - LR * combine(rows), []
                    sent.use()
                read[slot], at[slot] = row, now + SPEEDS[slot]
    assert len(run.arrivals) == 60
    assert same(run.row, row)


@pytest.mark.parametrize(("rule", "attack"), RULES_UNDER_ATTACK)
def test_a_rule_combines_elastic_differences(rule, attack):
    """The centre moves by 5 times the result. Workers move by their own differences."""
    table = attack_of(attack, [1])
    chosen = policy_of("easgd", alpha=0.15, synchronous=True, period=2)
    run = simulate(chosen, delays_of(SPEEDS), rule=RULES[rule], f=1, attack=table).advance(5 * 12)
    models, centre, combine, sent = [START] * 5, START, Combined(RULES[rule]), Sent(table)
    for step in range(12):
        models = [model - LR * result(model, nth_step(worker, step)) for worker, model in enumerate(models)]
        if step % 2:
            elastic = [0.15 * (model - centre) for model in models]
            models = [model - e for model, e in zip(models, elastic, strict=True)]
            centre = centre + 5 * combine([sent(worker, elastic[worker]) for worker in np.argsort(SPEEDS)])
    assert same(run.row, centre)
    assert same(run.server.replicas, torch.stack(models))


@pytest.mark.parametrize(("rule", "attack"), FILTERS_UNDER_ATTACK)
def test_a_rule_filters_elastic_differences(rule, attack):
    table = attack_of(attack, [1, 3])
    run = simulate(policy_of("easgd", alpha=0.4, period=2), delays_of(SPEEDS), rule=FILTERS[rule], attack=table)
    run.advance(60)
    models, centre, steps, at = [START] * 5, START, [0] * 5, list(SPEEDS)
    combine, sent = Combined(FILTERS[rule]), Sent(table)
    for _ in range(60):
        worker = at.index(min(at))
        models[worker] = models[worker] - LR * result(models[worker], nth_step(worker, steps[worker]))
        steps[worker] += 1
        if steps[worker] % 2 == 0:
            elastic = 0.4 * (models[worker] - centre)
            models[worker] = models[worker] - elastic
            centre = centre + combine([sent(worker, elastic)])
        at[worker] += SPEEDS[worker]
    assert same(run.row, centre)
    assert same(run.server.replicas, torch.stack(models))


# Graphs

GRAPHS = {"ring": [[0, 1, 0, 0, 1], [1, 0, 1, 0, 0], [0, 1, 0, 1, 0], [0, 0, 1, 0, 1], [1, 0, 0, 1, 0]]}
GRAPHS["complete"] = (1 - np.eye(5)).tolist()
ON_GRAPHS = {
    **{name: RULES[name] for name in ("median", "trimmed_mean", "geometric_median")},
    "norm_clipping": {"rule": "norm_clipping", "c": 0.2},
}
ON_GRAPHS_UNDER_ATTACK = [(None, "ipm"), (None, "sign_flipping"), ("median", None), ("trimmed_mean", "alie")]
ON_GRAPHS_UNDER_ATTACK += [
    ("median", "against"),
    ("geometric_median", "ipm"),
    ("norm_clipping", None),
    ("norm_clipping", "sign_flipping"),
]


def received(models, i, present, weights, rule, attack=None, workers=()):
    """Return what worker i adds to its model: the rule of the differences x_j - x_i of `present`, which has i.

    An attack knows the differences of all neighbours of an honest worker, also of those that are not `present`.
    """
    known = [j for j in range(5) if j == i or weights[i][j]]
    rows = {j: models[j] - models[i] for j in known}
    byzantine = [j for j in known if j in workers]
    if byzantine and attack and i not in workers:
        honest = [rows[k] for k in known if k not in workers]
        rows |= zip(byzantine, attacked([rows[j] for j in byzantine], honest, attack), strict=True)
    if len(present) == 2:
        weights = [[0.5] * 5] * 5
    shares = [weights[i][j] for j in present]
    if rule is None:
        return sum(share * rows[j] for share, j in zip(shares, present, strict=True))
    return Combined(rule)([rows[j] for j in present], shares if rule["rule"] == "geometric_median" else None)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize(("rule", "attack"), ON_GRAPHS_UNDER_ATTACK)
def test_d_psgd_combines_the_models_of_neighbours(rule, graph, attack):
    adjacency, table = GRAPHS[graph], attack_of(attack, [2])
    weights, rule = metropolis(adjacency), None if rule is None else ON_GRAPHS[rule]
    run = simulate(policy_of("d_psgd"), delays_of(SPEEDS), topology=graph, rule=rule, f=1, attack=table)
    run.advance(5 * 12)
    models = [START] * 5
    for step in range(12):
        moves = []
        for i in range(5):
            present = [j for j in range(5) if j == i or adjacency[i][j]]
            change = received(models, i, present, weights, rule, attack and ATTACKS.get(attack, TUNED), [2])
            moves.append(change - LR * result(models[i], nth_step(i, step)))
        models = [model + move for model, move in zip(models, moves, strict=True)]
    assert same(run.server.replicas, torch.stack(models))
    run.server.policy.publish(run.server)
    tested = [model for i, model in enumerate(models) if attack is None or i != 2]
    assert same(run.row, sum(tested) / len(tested))
    spread = sum(float((model - run.row).square().sum()) for model in tested) / len(tested)
    assert run.server.policy.numbers(run.server)["consensus_distance"] == pytest.approx(spread**0.5, rel=1e-9)


@pytest.mark.parametrize("name", ["gossip", "ad_psgd"])
@pytest.mark.parametrize(("rule", "attack"), [pair for pair in ON_GRAPHS_UNDER_ATTACK if pair[0] != "trimmed_mean"])
def test_pairs_combine_their_models(name, rule, attack):
    adjacency, table = GRAPHS["ring"], attack_of(attack, [2])
    weights, rule = metropolis(adjacency), None if rule is None else ON_GRAPHS[rule]
    run = simulate(policy_of(name), delays_of(SPEEDS), seed=4, topology="ring", rule=rule, f=1, attack=table)
    run.advance(60)
    models, began, steps, at = [START] * 5, [START] * 5, [0] * 5, list(SPEEDS)
    for _ in range(60):
        mine = at.index(min(at))
        step = LR * result(began[mine], nth_step(mine, steps[mine]))
        neighbours = [j for j in range(5) if adjacency[mine][j]]
        theirs = neighbours[int(numpy_generator(4, "neighbour", mine, steps[mine]).integers(len(neighbours)))]
        if name == "gossip":
            models[mine] = models[mine] - step
        pair = sorted([mine, theirs])
        moves = {i: received(models, i, pair, weights, rule, attack and ATTACKS.get(attack, TUNED), [2]) for i in pair}
        for i in pair:
            models[i] = models[i] + moves[i]
        if name == "ad_psgd":
            models[mine] = models[mine] - step
        steps[mine] += 1
        began[mine] = models[mine]
        at[mine] += SPEEDS[mine]
    assert same(run.server.replicas, torch.stack(models))
    run.server.policy.publish(run.server)
    tested = [model for i, model in enumerate(models) if attack is None or i != 2]
    assert same(run.row, sum(tested) / len(tested))


def test_two_byzantine_neighbours_and_a_start_round_on_a_graph():
    """Byzantine workers send their own models to each other. Until the start round, all models are tested."""
    weights, workers, attack = metropolis(GRAPHS["complete"]), [1, 3], ATTACKS["sign_flipping"]
    table = {**attack, "workers": workers, "start_round": 2}
    run = simulate(policy_of("d_psgd"), delays_of(SPEEDS), topology="complete", attack=table)
    models = [START] * 5
    for step in range(12):
        run.clock.dispatcher.start_round(1 + step // 6)
        run.advance(5)
        sent = (attack, workers) if step >= 6 else ()
        moves = [received(models, i, range(5), weights, None, *sent) for i in range(5)]
        gradients = [result(model, nth_step(i, step)) for i, model in enumerate(models)]
        models = [x + move - LR * g for x, move, g in zip(models, moves, gradients, strict=True)]
        assert same(run.server.replicas, torch.stack(models))
        run.server.policy.publish(run.server)
        assert same(run.row, mean(model for i, model in enumerate(models) if step < 6 or i not in workers))


@pytest.mark.parametrize(("rule", "attack"), ON_GRAPHS_UNDER_ATTACK)
def test_a_rule_combines_the_models_of_present_workers(rule, attack):
    """Worker 4 leaves in the third step, and its weights count for the workers themselves."""
    table, rule = attack_of(attack, [2]), None if rule is None else ON_GRAPHS[rule]
    options = {"topology": "complete", "departures": {4: 2.5}, "rule": rule, "f": 1, "attack": table}
    run = simulate(policy_of("d_psgd"), delays_of([1.0] * 5), **options)
    run.advance(5 * 2 + 4 * 6)
    models, weights, present = [START] * 5, np.full((5, 5), 0.2), list(range(5))
    for step in range(8):
        if step == 2:
            present.remove(4)
            weights[4] = weights[:, 4] = 0
            weights[range(4), range(4)] += 0.2
        gradients = [result(models[i], nth_step(i, step)) for i in range(5)]
        moves = [
            received(models, i, present, weights, rule, attack and ATTACKS.get(attack, TUNED), [2]) for i in present
        ]
        for i, move in zip(present, moves, strict=True):
            models[i] = models[i] + move - LR * gradients[i]
    assert same(run.server.replicas[:4], torch.stack(models[:4]))


def test_no_model_is_tested_if_only_byzantine_workers_remain():
    attack = {**ATTACKS["ipm"], "workers": [1]}
    run = simulate(policy_of("gossip"), delays_of([1.0, 1.0]), departures={0: 0.5}, attack=attack).advance(1)
    with pytest.raises(ExperimentError, match="all honest workers have left .* keep at least one honest worker"):
        run.server.policy.publish(run.server)


def noise(updates, rng):
    """Return random numbers, as a rule."""
    return updates[0] * 0 + float(rng.normal())


@pytest.mark.parametrize("name", ["d_psgd", "gossip"])
def test_draws_differ_between_receivers_and_times(name):
    """A rule draws the result for each worker, and a Byzantine worker draws what it sends to each neighbour."""
    rule = {"rule": f"{__name__}:noise"}
    run = simulate(policy_of(name), delays_of([1.0] * 5), rule=rule, train=zero_result)
    seen = []
    for _ in range(2):
        before = run.server.replicas.clone()
        run.advance(5)
        seen += (run.server.replicas - before)[:, 0].tolist()
    assert len({round(move, 6) for move in seen if move}) == 10
    attack = {"name": "gaussian", "std": 100.0, "workers": [2]}
    moved = [simulate(policy_of("d_psgd"), delays_of(SPEEDS), attack=a).advance(5).server for a in (attack, None)]
    difference = moved[0].replicas - moved[1].replicas
    assert all(10 < 3 * difference[i].norm() < 1000 for i in (1, 3))
    assert not same(difference[1], difference[3])
    assert same(difference[[0, 2, 4]], torch.zeros(3, 3, dtype=torch.float64))


def check_workers(own_updates, workers):
    """Check that no worker is known twice, as an attack."""
    assert len(set(workers)) == len(workers)
    return own_updates


def test_an_attack_knows_the_last_vector_of_each_worker_in_a_cohort():
    """Workers train in changing slots."""
    tables = {"workers": 6, "cohort": 5, "rounds": 20, "model": "logistic", "data": "tests.components:tiny"}
    attack = {"name": f"{__name__}:check_workers", "workers": [0, 1]}
    clock = {"slowdown": "lognormal", "noise": "lognormal"}
    fedsim.run({**tables, "mode": "clock", "policy": "fedasync", "attack": attack, "clock": clock, "engine": "serial"})
