"""Two sharded models and one loss: `python examples/gan.py`, or under torchrun.

Each model is sharded separately; there is nothing global to configure. All ranks draw the same 64
rows from one seed, and each trains on its own part of them.
"""

import torch
from torch import nn
from torch.nn import functional as F

import onefold

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
critic = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
onefold.shard(generator, generator_optimizer, stage=3)
onefold.shard(critic, critic_optimizer, stage=2)

report = onefold.report(generator)
device = next(generator.parameters()).device
own = slice(report.rank, None, report.world_size)  # this rank's rows of a batch


def draw():
    angle = torch.rand(64) * 6.2832
    circle = torch.stack([angle.cos(), angle.sin()], dim=1)
    return circle.to(device), torch.randn(64, 8).to(device)


for _ in range(200):
    circle, noise = draw()
    real, fake = circle[own], generator(noise[own])

    critic_loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(real)).mean()
    critic_loss.backward()
    critic_optimizer.step()
    critic_optimizer.zero_grad()

    generator_loss = F.softplus(-critic(fake)).mean()  # backward crosses both models
    generator_loss.backward()
    generator_optimizer.step()
    generator_optimizer.zero_grad()
    critic_optimizer.zero_grad()

circle, noise = draw()
with torch.no_grad():  # every rank evaluates: forward is a collective
    radius = generator(noise).norm(dim=1).mean()
    judged = critic(circle).mean()
if report.rank == 0:
    print(f"mean radius {radius.item():.3f}, critic of real rows {judged.item():.3f}")
