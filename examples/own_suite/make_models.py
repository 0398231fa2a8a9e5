"""Train a small base and fine-tune three experts of it, in seconds.

Each task sorts points of its own plane in a space of 32 dimensions, so that experts see different inputs, as the
experts of real tasks do. The base has learnt to tell where on its plane a point lies.

Run it once (it writes base/, experts/, data/ and heads/ beside this file), then::

    mergestream bench examples/own_suite/suite.py --orders 3 --methods ledger,opcm,average -o own-results
"""

from __future__ import annotations

from pathlib import Path

import torch
from features import FEATURES, INPUTS, network
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy, normalize

HERE = Path(__file__).parent
NOISE = 0.05


def ring(points: torch.Tensor) -> torch.Tensor:
    return (points.norm(dim=1) * 1.3).long().clamp(max=2)


def sector(points: torch.Tensor) -> torch.Tensor:
    return ((torch.atan2(points[:, 1], points[:, 0]) / torch.pi + 1) * 2.5).long().clamp(max=4)


def square(points: torch.Tensor) -> torch.Tensor:
    return ((points[:, 0] > 0) ^ (points[:, 1] > 0)).long()


TASKS = {"ring": ring, "sector": sector, "square": square}


def cell(points: torch.Tensor) -> torch.Tensor:
    """The cell of a 4 × 4 grid: what the base learns of every plane."""
    column, row = ((points + 1) * 2).long().clamp(0, 3).T
    return 4 * column + row


def draw(plane: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of the plane, and the inputs that the network sees of them."""
    points = torch.randn(count, 2)
    return points, points @ plane.T + NOISE * torch.randn(count, INPUTS)


def train(
    model: torch.nn.Module, head: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor, steps: int, rate: float
) -> None:
    """Train the model, and the head if it asks for gradients: logits are 20 times a cosine."""
    learnt = [*model.parameters(), *([head] if head.requires_grad else [])]
    optimizer = torch.optim.AdamW(learnt, lr=rate)
    for _ in range(steps):
        batch = torch.randint(len(inputs), (256,))
        logits = 20 * normalize(model(inputs[batch]), dim=1) @ normalize(head, dim=1).T
        optimizer.zero_grad()
        cross_entropy(logits, labels[batch]).backward()
        optimizer.step()


def write_model(directory: Path, model: torch.nn.Module) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text('{"model_type": "example-mlp"}\n')


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the network is too small to share
    planes = {task: torch.linalg.qr(torch.randn(INPUTS, 2))[0] for task in TASKS}
    seen = [draw(plane, 2000) for plane in planes.values()]
    labels = torch.cat([16 * number + cell(points) for number, (points, _) in enumerate(seen)])
    base = network()
    head = torch.randn(16 * len(seen), FEATURES, requires_grad=True)
    train(base, head, torch.cat([inputs for _, inputs in seen]), labels, steps=300, rate=3e-3)
    write_model(HERE / "base", base)
    for task, labels_of in TASKS.items():
        (points, inputs), (test_points, test_inputs) = draw(planes[task], 2000), draw(planes[task], 1000)
        labels = labels_of(points)
        with torch.no_grad():  # the head: class means of the base's features, fixed before training
            features = normalize(base(inputs), dim=1)
            means = [features[labels == label].mean(0) for label in range(int(labels.max()) + 1)]
            head = normalize(torch.stack(means), dim=1)
        expert = network()
        expert.load_state_dict(base.state_dict())
        train(expert, head, inputs, labels, steps=150, rate=3e-4)
        write_model(HERE / "experts" / task, expert)
        for folder in (HERE / "data" / task, HERE / "heads"):
            folder.mkdir(parents=True, exist_ok=True)
        test = {"inputs": test_inputs, "labels": labels_of(test_points)}
        save_file(test, HERE / "data" / task / "test.safetensors")
        save_file({"weight": head}, HERE / "heads" / f"{task}.safetensors")
    print(f"base, {len(TASKS)} experts, data and heads are in {HERE}")


if __name__ == "__main__":
    main()
