"""A vision transformer on synthetic images. It measures how many samples a second a machine or a cluster trains on."""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import spotrun

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=64, help="images of one worker in a step")
parser.add_argument("--steps", type=int, default=100, help="with one worker; several workers share them")
parser.add_argument("--image-size", type=int, default=224)
parser.add_argument("--patch-size", type=int, default=16)
parser.add_argument("--classes", type=int, default=1000)
parser.add_argument("--depth", type=int, default=12)
parser.add_argument("--dim", type=int, default=768)
parser.add_argument("--heads", type=int, default=0, help="0: one for each 64 of --dim")
parser.add_argument("--workers", type=int, default=0, help="of the data loader")
args = parser.parse_args()


class Synthetic(Dataset):
    """Random images; image `i` is always the same one."""

    def __len__(self):
        return args.steps * args.batch_size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(3, args.image_size, args.image_size, generator=generator)
        return image, torch.randint(args.classes, (), generator=generator)


class Block(nn.Module):
    """Attention and MLP, each normalized before and added to what came in."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """As in https://arxiv.org/abs/2010.11929, classifying by the mean over the patches."""

    def __init__(self, image, patch, classes, depth, dim, heads):
        super().__init__()
        self.embed = nn.Conv2d(3, dim, patch, patch)
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2, dim) * 0.02)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))

    def forward(self, images):
        patches = self.embed(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.blocks(patches).mean(1))


run = spotrun.init(seed=0)
heads = args.heads or max(1, args.dim // 64)
model = run.ddp(ViT(args.image_size, args.patch_size, args.classes, args.depth, args.dim, heads))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
dataset = Synthetic()
sampler = spotrun.ElasticSampler(dataset, seed=0)
loader = DataLoader(
    dataset, args.batch_size, sampler=sampler, num_workers=args.workers, pin_memory=torch.cuda.is_available()
)
run.track(model=model, optimizer=optimizer, sampler=sampler)

bf16 = run.device.type == "cuda" and torch.cuda.is_bf16_supported()
millions = sum(p.numel() for p in model.parameters()) / 1e6
run.print(f"{millions:.1f} M parameters, {run.world_size} workers on {run.device.type}, {'bf16' if bf16 else 'fp32'}")

since, images = time.perf_counter(), 0
for _ in run.epochs(1):
    for x, y in run.steps(loader):
        with torch.autocast(run.device.type, torch.bfloat16, enabled=bf16):
            loss = nn.functional.cross_entropy(model(x), y)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
        images += len(x) * run.world_size
        if (run.step + 1) % 10 == 0:
            value = loss.item()  # waits for the device
            rate = images / (time.perf_counter() - since)
            run.print(f"step {run.step + 1}: loss {value:.3f}, {rate:.1f} samples/s")
            since, images = time.perf_counter(), 0
