"""Train a small network and three experts on tasks with points of the plane, in seconds.

Run it once (it writes base/, experts/, data/ and heads/ beside this file), then::

    mergestream bench examples/own_suite/suite.yaml --orders 3 --methods opcm,average,ties -o own-results
"""

from __future__ import annotations

from pathlib import Path

import torch
from features import network
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy, normalize

HERE = Path(__file__).parent


def ring(points: torch.Tensor) -> torch.Tensor:
    return (points.norm(dim=1) * 1.3).long().clamp(max=2)


def sector(points: torch.Tensor) -> torch.Tensor:
    return ((torch.atan2(points[:, 1], points[:, 0]) / torch.pi + 1) * 2.5).long().clamp(max=4)


def square(points: torch.Tensor) -> torch.Tensor:
    return ((points[:, 0] > 0) ^ (points[:, 1] > 0)).long()


TASKS = {"ring": ring, "sector": sector, "square": square}


def write_model(directory: Path, model: torch.nn.Module) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text('{"model_type": "example-mlp"}\n')


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the network is too small to share
    base = network()
    write_model(HERE / "base", base)
    for task, labels_of in TASKS.items():
        train, test = torch.randn(2000, 2), torch.randn(1000, 2)
        labels = labels_of(train)
        with torch.no_grad():  # the head: class means of the base's features, fixed before training
            features = normalize(base(train), dim=1)
            head = torch.stack([features[labels == label].mean(0) for label in range(int(labels.max()) + 1)])
        expert = network()
        expert.load_state_dict(base.state_dict())
        optimizer = torch.optim.AdamW(expert.parameters(), lr=5e-3)
        for _ in range(500):
            optimizer.zero_grad()
            cross_entropy(20 * normalize(expert(train), dim=1) @ head.T, labels).backward()
            optimizer.step()
        write_model(HERE / "experts" / task, expert)
        for folder in (HERE / "data" / task, HERE / "heads"):
            folder.mkdir(parents=True, exist_ok=True)
        save_file({"inputs": test, "labels": labels_of(test)}, HERE / "data" / task / "test.safetensors")
        save_file({"weight": head}, HERE / "heads" / f"{task}.safetensors")
    print(f"base, {len(TASKS)} experts, data and heads are in {HERE}")


if __name__ == "__main__":
    main()
