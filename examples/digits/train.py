"""A small CNN on scikit-learn's digits: 1797 real images of 8x8 pixels, which ship inside the package."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spotrun

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=45)
parser.add_argument("--batch-size", type=int, default=16, help="samples of one worker in a step")
parser.add_argument("--lr", type=float, default=1e-3)
args = parser.parse_args()

run = spotrun.init(seed=0)

# Data: every fifth image is for testing.
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
test = torch.arange(len(images)) % 5 == 0
dataset = TensorDataset(images[~test], labels[~test])

# Model
model = run.ddp(
    nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10)),
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
sampler = spotrun.ElasticSampler(dataset, seed=0)
loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
run.track(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)


def accuracy() -> float:
    """Share of test images recognized, in percent. Every worker computes it: there are only 360 images."""
    model.eval()
    with torch.no_grad():
        guesses = model(images[test].to(run.device)).argmax(1).cpu()
    model.train()
    return (guesses == labels[test]).float().mean().item() * 100


for epoch in run.epochs(args.epochs):
    for x, y in run.steps(loader):
        loss = nn.functional.cross_entropy(model(x), y)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss, epoch=epoch)
    scheduler.step()
    if (epoch + 1) % 10 == 0:
        run.print(f"epoch {epoch + 1} of {args.epochs}, step {run.step}: test accuracy {accuracy():.1f} %")

run.print(f"test accuracy {accuracy():.1f} %")
