"""An independent second implementation of the algorithms: plain Python loops over lists, written from the papers.

Nothing here imports the product. Rows are lists of Python floats; a row's trained tokens are those with mask 1.
"""

import math

Row = list[float]
Rows = list[Row]


def kl_estimate(estimator: str, log_prob: float, reference_log_prob: float) -> float:
    """Schulman, "Approximating KL Divergence" (2020): r = q(x) / p(x) for x ~ p."""
    r = math.exp(reference_log_prob - log_prob)
    return {"k1": -math.log(r), "k2": 0.5 * math.log(r) ** 2, "k3": (r - 1) - math.log(r)}[estimator]


def trained_columns(mask_row: list[int]) -> list[int]:
    return [t for t, trained in enumerate(mask_row) if trained]


def token_rewards(
    scores: Row, old: Rows, reference: Rows, mask: list[list[int]], coefficient: float, estimator: str, in_reward: bool
) -> Rows:
    result = [[0.0] * len(row) for row in mask]
    for i, row in enumerate(mask):
        columns = trained_columns(row)
        for t in columns:
            if in_reward:
                result[i][t] -= coefficient * kl_estimate(estimator, old[i][t], reference[i][t])
        if columns:
            result[i][columns[-1]] += scores[i]
    return result


def gae(rewards: Rows, values: Rows, mask: list[list[int]], gamma: float, lam: float) -> tuple[Rows, Rows]:
    """Schulman et al. (2016), eq. 16: A_t = sum over l of (gamma lam)^l delta_{t+l}, the sum written out."""
    advantages = [[0.0] * len(row) for row in mask]
    returns = [[0.0] * len(row) for row in mask]
    for i, row in enumerate(mask):
        columns = trained_columns(row)
        r = [rewards[i][t] for t in columns]
        v = [values[i][t] for t in columns] + [0.0]
        deltas = [r[k] + gamma * v[k + 1] - v[k] for k in range(len(columns))]
        for k, t in enumerate(columns):
            advantages[i][t] = sum((gamma * lam) ** step * delta for step, delta in enumerate(deltas[k:]))
            returns[i][t] = advantages[i][t] + values[i][t]
    return advantages, returns


def whiten(rows: Rows, mask: list[list[int]]) -> Rows:
    trained = [rows[i][t] for i, row in enumerate(mask) for t in trained_columns(row)]
    if not trained:
        return [[0.0] * len(row) for row in mask]
    mean = math.fsum(trained) / len(trained)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in trained) / len(trained))
    return [
        [(rows[i][t] - mean) / (deviation + 1e-8) if trained_here else 0.0 for t, trained_here in enumerate(row)]
        for i, row in enumerate(mask)
    ]


def grpo(rewards: Rows, positions: list[int], mask: list[list[int]], divide: bool) -> Rows:
    """Shao et al. (2024), section 4.1.2: (r_i - mean(r)) / std(r) of the answer's group, at each of its tokens."""
    result = [[0.0] * len(row) for row in mask]
    totals = {i: math.fsum(rewards[i][t] for t in trained_columns(row)) for i, row in enumerate(mask) if any(row)}
    for i in totals:
        group = [totals[j] for j in totals if positions[j] == positions[i]]
        mean = math.fsum(group) / len(group)
        advantage = totals[i] - mean
        if divide and len(group) == 1:
            advantage = 0.0
        elif divide:
            advantage /= math.sqrt(math.fsum((x - mean) ** 2 for x in group) / (len(group) - 1)) + 1e-6
        for t in trained_columns(mask[i]):
            result[i][t] = advantage
    return result


def normalize(earlier: Row, rewards: Row) -> Row:
    """Two passes over everything seen so far, this step's rewards included."""
    seen = earlier + rewards
    mean = math.fsum(seen) / len(seen)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in seen) / len(seen))
    return [(x - mean) / (deviation + 1e-8) for x in rewards]


def policy_loss(
    new: Rows, old: Rows, advantages: Rows, mask: list[list[int]], clip: float
) -> tuple[float, Rows, int, float]:
    """Schulman et al. (2017), eq. 7, as (sum, its gradient by ``new``, clipped tokens, sum of KL(old || new) by k3)."""
    total, clipped_tokens, approx_kl = 0.0, 0, 0.0
    gradient = [[0.0] * len(row) for row in mask]
    for i, row in enumerate(mask):
        for t in trained_columns(row):
            ratio, advantage = math.exp(new[i][t] - old[i][t]), advantages[i][t]
            # The objective stops rewarding a ratio that has already left the range on the good side.
            if advantage > 0 and ratio > 1 + clip:
                total -= (1 + clip) * advantage
                clipped_tokens += 1
            elif advantage < 0 and ratio < 1 - clip:
                total -= (1 - clip) * advantage
                clipped_tokens += 1
            else:
                total -= ratio * advantage
                gradient[i][t] = -ratio * advantage
            approx_kl += kl_estimate("k3", old[i][t], new[i][t])
    return total, gradient, clipped_tokens, approx_kl


def value_loss(
    new: Rows, old: Rows, returns: Rows, mask: list[list[int]], clip: float | None
) -> tuple[float, Rows, int, float]:
    """Half the larger squared error: (sum, gradient by ``new``, clipped tokens, sum of plain squared errors)."""
    total, clipped_tokens, squared = 0.0, 0, 0.0
    gradient = [[0.0] * len(row) for row in mask]
    for i, row in enumerate(mask):
        for t in trained_columns(row):
            error = new[i][t] - returns[i][t]
            squared += error**2
            limited = error
            if clip is not None:
                limited = min(max(new[i][t], old[i][t] - clip), old[i][t] + clip) - returns[i][t]
            if abs(limited) > abs(error):
                total += limited**2 / 2
                clipped_tokens += 1
            else:
                total += error**2 / 2
                gradient[i][t] = error
    return total, gradient, clipped_tokens, squared


def adapt(coefficient: float, observed: float, target: float, horizon: int, num_samples: int) -> float:
    """Ziegler et al. (2019), section 2.2."""
    error = (observed - target) / target
    if error > 0.2:
        error = 0.2
    if error < -0.2:
        error = -0.2
    return coefficient + coefficient * error * num_samples / horizon
